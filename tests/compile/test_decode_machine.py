"""Decode's compiled SM90 kernel executed on the CPU and compared with float64: see `run_decode.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# Of `run_decode.CASES`, one for each way through the kernel; the others can be run by name.
NAMES = [
    "fp8",
    "bf16 window, cap, sinks",
    "fp8 merge in two levels",
    "bf16 static",
    "bf16 map of another call",
]

pytestmark = pytest.mark.compile


def test_the_kernel_computes_the_right_numbers(
    root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """CTAs in random order, twice over one task map; outputs and partials are NaN before."""
    from test_router import run

    environ = {**clean_environ, "TRITON_CACHE_DIR": str(tmp_path)}
    rows = run("3.6.0", root, environ, [str(root / "tests/compile/run_decode.py"), *NAMES]).splitlines()
    results = {row["name"]: row for row in map(json.loads, rows)}
    assert sorted(results) == sorted(NAMES)
    foreign = results.pop("bf16 map of another call")
    assert foreign["nan"] == 2 * foreign["rows"], "a map of another call gives NaN everywhere"
    for result in results.values():
        assert result["nan"] == 0 and result["same"], result
        assert result["rms"] <= result["rms_limit"] and result["max"] <= result["max_limit"], result
        assert result["lse"] <= 1e-4, result
