"""The fused MoE's compiled kernels for SM90 executed on the CPU, the Gluon ones too, and compared with float64."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import few_or_all, reports

FEW = [
    "tensor cut", "block 3 tiles cut", "block pair fresh 64", "tiny block", "portable bf16",
]  # fmt: skip

pytestmark = pytest.mark.compile


@few_or_all(FEW, newest=FEW)
def test_kernels_compute_the_right_numbers(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """Items cut between programs and in turn, experts of several tiles, tails along I and H, both kinds of scales; the
    two-launch kernels; what only the portable kernels have. Weights are read in the order of `hpc.moe.order`.

    The machine adds exactly, so activations are those of float64 to the bit but for ties; y is computed from them.
    """
    results = reports(version, root, clean_environ, tmp_path, "run_moe.py", names)
    assert len(results) == (len(names) or 27)
    # a tie of e4m3 is one step, 1/8 at most; a scale's own error counts hundredfold in `far`
    bad = [
        result
        for result in results
        if result["nan"] or result["rms"] > 2.2e-3 or result["flips"] > 2e-3 or result["far"] > 0.13
    ]
    assert bad == []
