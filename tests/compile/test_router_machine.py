"""The router's compiled kernels, the Gluon ones too, executed on the CPU and compared with float64."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import few_or_all, reports
from ptx_machine import Deadlock, launch

from hpc.gemm.router.cases import TOLERANCES

FEW = ["row", "small 3 parts", "tile 64x32 in splits", "tile 64x32 3 parts", "DeepSeek-V3"]

pytestmark = pytest.mark.compile


@few_or_all(FEW)
def test_kernels_compute_the_right_numbers(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """More steps than stages, edges, several units a CTA, two and three parts, splits, expert choice."""
    results = reports(version, root, clean_environ, tmp_path, "run_router.py", names)
    assert len(results) == (len(names) or 18)
    wrong = []
    for result in results:
        if "ids" in result:
            good = result["ids"] and result["max"] < 2e-6
        else:
            limit = TOLERANCES[3 if "3 parts" in result["name"] else 2]
            good = result["nan"] == 0 and result["rms"] <= limit.rms and result["max"] <= limit.max
        if not good:
            wrong.append(result)
    assert wrong == []


HANGING = """
.visible .entry k(
)
.reqntid 64
{
    mov.u32 %r1, %tid.x;
    setp.eq.s32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [global_smem], 2;
    bar.sync 0, 64;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [global_smem];
    {
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared.b64 complete, [global_smem], 0;
    @!complete bra.uni waitLoop;
    }
    ret;
}
"""


def test_the_machine_finds_a_deadlock() -> None:
    """One arrival where two are expected."""
    import numpy as np

    with pytest.raises(Deadlock, match="try_wait"):
        launch(HANGING, (1, 1, 1), {}, np.zeros(8, np.uint8))
    launch(HANGING.replace("[global_smem], 2", "[global_smem], 1"), (1, 1, 1), {}, np.zeros(8, np.uint8))
