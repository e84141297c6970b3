"""The compiled prologue, executed on the CPU: the very instructions that a GPU gets give the bits of the reference.

What this cannot show: timing, caches, early launch, and what silicon does beyond IEEE 754 and the PTX manual.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_rope import CASES, QUERY

from hpc.common import env

INSTALLED = "3.6.0"  # ships with torch 2.11
NEWEST = "3.8.0"
ALL = [*CASES, QUERY]
FEW = [*list(CASES)[:3], QUERY]

pytestmark = pytest.mark.compile


@pytest.mark.parametrize(
    ("version", "names"),
    [
        (INSTALLED, FEW),
        pytest.param(INSTALLED, ALL, marks=pytest.mark.slow),
        pytest.param(NEWEST, ALL, marks=pytest.mark.slow),
    ],
    ids=["few", "all", "newest"],
)
def test_compiled_kernels_give_the_bits_of_the_reference(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """A NaN, a head of zeros, padded rows and requests, garbage page ids; nothing beside the outputs is written."""
    environ = {**clean_environ, "TRITON_CACHE_DIR": str(tmp_path)}
    if version != env.triton_version():
        folder = root / ".triton" / version
        if not folder.is_dir():
            pytest.skip(f"Triton {version} is neither installed nor in {folder}")
        environ["PYTHONPATH"] = os.pathsep.join([str(folder), environ["PYTHONPATH"]])
    command = [sys.executable, str(root / "tests/compile/run_rope.py"), *names]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["triton"] for report in reports} == {version}
    assert [report["name"] for report in reports] == names
    for report in reports:
        assert report["instructions"] > 1000
        assert not any(report["wrong"].values()), report
