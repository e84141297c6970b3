"""The compiled prologue, executed on the CPU: the very instructions that a GPU gets give the bits of the reference.

What this cannot show: timing, caches, early launch, and what silicon does beyond IEEE 754 and the PTX manual.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import few_or_all, reports
from run_rope import CASES, QUERY

FEW = [*list(CASES)[:3], "fp8 warp, prefill", "bf16 warp HND, rotate then norm", QUERY]

pytestmark = pytest.mark.compile


@few_or_all(FEW)
def test_compiled_kernels_give_the_bits_of_the_reference(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """A NaN, a head of zeros, padded rows and requests, garbage page ids; nothing beside the outputs is written."""
    found = reports(version, root, clean_environ, tmp_path, "run_rope.py", names)
    assert [report["name"] for report in found] == (names or [*CASES, QUERY])
    for report in found:
        assert report["instructions"] > 1000
        assert not any(report["wrong"].values()), report
