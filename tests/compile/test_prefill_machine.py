"""Prefill attention's compiled kernels for SM90 executed on the CPU, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import few_or_all, reports

FEW = ["fp8 short", "fp8 split"]

pytestmark = pytest.mark.compile


@few_or_all(FEW, newest=["fp8", "bf16 short"])
def test_kernels_compute_the_right_numbers(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """Roles, boxes, masks and operand layouts as compiled; several tiles a CTA, tiles that CTAs place themselves,
    parts of them and their joining."""
    results = reports(version, root, clean_environ, tmp_path, "run_prefill.py", names)
    assert len(results) == (len(names) or 18)
    bad = [
        result
        for result in results
        if result["nan"] or not result["dead"] or result["lse"] > 1e-4
        or result["rms"] > result["rms_limit"] or result["max"] > result["max_limit"]
    ]  # fmt: skip
    assert bad == []
