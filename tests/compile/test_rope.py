"""The prologue compiled for sm_90a: wide loads and stores, nothing fused into other roundings, nothing spilled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpc.common import env

INSTALLED = "3.6.0"  # ships with torch 2.11
NEWEST = "3.8.0"
# Registers a thread: 28 warps a multiprocessor at least, 20 where a program holds two tiles of queries.
MAX_REGISTERS, MAX_OF_TWO_TILES = 72, 96

FEW = ["fp8 8/1 decode", "fp8 64/8 prefill", "bf16 64/8 prefill, two tiles", "quantise queries"]

pytestmark = pytest.mark.compile


def compile_all(
    version: str, root: Path, environ: dict[str, str], cache: Path, names: list[str]
) -> list[dict[str, Any]]:
    """Reports of tests/compile/compile_rope.py under one Triton."""
    environ = {**environ, "TRITON_CACHE_DIR": str(cache)}
    if version != env.triton_version():
        folder = root / ".triton" / version
        if not folder.is_dir():
            pytest.skip(f"Triton {version} is neither installed nor in {folder}")
        environ["PYTHONPATH"] = os.pathsep.join([str(folder), environ["PYTHONPATH"]])
    command = [sys.executable, str(root / "tests/compile/compile_rope.py"), *names]
    run = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    assert {report["triton"] for report in reports} == {version}
    return reports


def complaints(report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    name, counts = report["name"], report["instructions"]
    found = []
    if report["spill"] or report["regs"] > (MAX_OF_TWO_TILES if "two tiles" in name else MAX_REGISTERS):
        found.append(f"{report['regs']} registers, {report['spill']} bytes of spills")
    if counts["fused"]:
        found.append(f"{counts['fused']} fused multiply-adds: bits would differ from the reference")
    early, hopper = counts["griddepcontrol.launch_dependents"], "sm80" not in name
    if bool(counts["griddepcontrol.wait"]) != hopper:
        found.append(f"{counts['griddepcontrol.wait']} griddepcontrol.wait")
    if name != "quantise queries" and (early > 0) != (hopper and "prefill" not in name):
        found.append(f"{early} griddepcontrol.launch_dependents")
    if not counts["16-byte loads"] or counts["single loads"] or counts["byte stores"]:
        found.append("narrow accesses")
    if (hopper and "bf16" not in name) != (counts["e4m3"] > 0):
        found.append(f"{counts['e4m3']} conversions to e4m3")
    return [f"{name}, {report['kernel']}: {complaint}" for complaint in found]


@pytest.mark.parametrize(
    ("version", "names"),
    [
        (INSTALLED, FEW),
        pytest.param(INSTALLED, [], marks=pytest.mark.slow),
        pytest.param(NEWEST, [], marks=pytest.mark.slow),
    ],
    ids=["few", "all", "newest"],
)
def test_kernels_compile_as_designed(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    reports = compile_all(version, root, clean_environ, tmp_path, names)
    kernels = Counter(report["kernel"] for report in reports)
    prologues = len(names) - 1 if names else 11
    assert kernels == Counter({"_rope_prologue_kernel": prologues, "_quantize_query_kernel": 1}), kernels
    assert [line for report in reports for line in complaints(report)] == []
