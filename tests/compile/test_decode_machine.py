"""Decode's compiled SM90 kernels executed on the CPU and compared with float64: see `run_decode.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import INSTALLED, reports

# Of `run_decode.CASES`: every option, merges in two levels; then the rest.
FEW = [
    "bf16 window, cap, sinks",
    "fp8 merge in two levels",
    "rows: fp8 64 rows, page 16",
    "rows: bf16 80 rows",
]
REST = [
    "fp8", "fp8 four new tokens", "bf16", "bf16 static", "fp8 head dim 64", "fp8 head dim 256",
    "bf16 two heads, group 3, page 16", "bf16 map of another call", "rows: fp8", "rows: bf16",
    "rows: bf16 48 rows, page 128", "rows: fp8 17 rows", "rows: fp8 8 heads", "rows: fp8 144 rows",
    "rows: fp8 window, cap, sinks", "rows: bf16 window, cap, sinks", "rows: fp8 head dim 64", "rows: bf16 head dim 64",
    "rows: fp8 merge in two levels", "rows: fp8 static", "rows: fp8 map of another call",
]  # fmt: skip

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("names", [FEW, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "rest"])
def test_the_kernel_computes_the_right_numbers(
    names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """CTAs in random order, twice over one task map; outputs and partials are NaN before."""
    found = reports(INSTALLED, root, clean_environ, tmp_path, "run_decode.py", names)
    results = {report["name"]: report for report in found}
    assert sorted(results) == sorted(names)
    for name, result in results.items():
        if name.endswith("map of another call"):
            assert result["nan"] == 2 * result["rows"], "NaN everywhere, in both runs"
            continue
        assert result["nan"] == 0 and result["same"], result
        assert result["rms"] <= result["rms_limit"] and result["max"] <= result["max_limit"], result
        assert result["lse"] <= 1e-4, result
