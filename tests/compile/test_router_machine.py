"""The router's compiled kernels, the Gluon ones too, executed on the CPU and compared with float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ptx_machine import Deadlock, launch

from hpc.gemm.router.cases import TOLERANCES

INSTALLED, NEWEST = "3.6.0", "3.8.0"
FEW = ["row", "small 3 parts", "tile 64x32 in splits", "tile 64x32 3 parts", "DeepSeek-V3"]

pytestmark = pytest.mark.compile


@pytest.mark.parametrize(
    ("version", "names"),
    [
        (INSTALLED, FEW),
        pytest.param(INSTALLED, [], marks=pytest.mark.slow),
        pytest.param(NEWEST, [], marks=pytest.mark.slow),
    ],
    ids=["few", "all", "newest"],
)
def test_kernels_compute_the_right_numbers(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """More steps than stages, edges, several units a CTA, two and three parts, splits, expert choice."""
    from test_router import run

    environ = {**clean_environ, "TRITON_CACHE_DIR": str(tmp_path)}
    rows = run(version, root, environ, [str(root / "tests/compile/run_router.py"), *names]).splitlines()
    results = [json.loads(row) for row in rows]
    assert {result["triton"] for result in results} == {version} and len(results) == (len(names) or 18)
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
