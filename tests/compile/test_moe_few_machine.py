"""The fused MoE's kernels for few tokens, compiled for SM90 and executed on the CPU, compared with float64."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import few_or_all, reports

FEW = ["tensor", "block I = 80", "tensor rank 1 of 2"]

pytestmark = pytest.mark.compile


@few_or_all(FEW, newest=FEW)
def test_calls_compute_the_right_numbers(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """Whole calls: odd ids, repeated ids, more rows of an expert than a tile has, tails along I and H, both scales.

    Nothing but the rounding of the output is left of the error.
    """
    results = reports(version, root, clean_environ, tmp_path, "run_moe_few.py", names)
    assert len(results) == (len(names) or 9)
    bad = [result for result in results if result["nan"] or result["rms"] > 2.2e-3 or result["max"] > 8e-3]
    assert bad == []
