"""The router's kernels compiled for sm_90a: the instructions they are built on are there, and nothing spills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc.common import env

INSTALLED = "3.6.0"  # ships with torch 2.11
NEWEST = "3.8.0"
SHARED_MEMORY = 227 * 1024  # bytes a CTA of SM90 may use
# Instructions that a kernel is built on.
NEEDED = {
    "_router_tile_kernel": ("tma", "wgmma"),
    "_router_small_kernel": ("mma bf16", "16-byte loads"),
    "_router_row_kernel": ("16-byte loads",),
}

pytestmark = pytest.mark.compile


def run(version: str, root: Path, environ: dict[str, str], script: list[str]) -> str:
    """Output of a Python process under one Triton."""
    if version != env.triton_version():
        folder = root / ".triton" / version
        if not folder.is_dir():
            pytest.skip(f"Triton {version} is neither installed nor in {folder}")
        environ["PYTHONPATH"] = os.pathsep.join([str(folder), environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, *script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def complaints(report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    kernel, counts = report["kernel"], report["instructions"]
    found = [f"no {name}" for name in ("griddepcontrol.wait", *NEEDED.get(kernel, ())) if not counts[name]]
    if report["spill"]:
        found.append(f"{report['spill']} bytes of spills")
    if report["serialized"]:
        found.append("wgmma serialized")
    if report["shared"] > SHARED_MEMORY:
        found.append(f"{report['shared']} bytes of shared memory")
    if kernel == "_router_small_kernel" and counts["shuffles"]:
        found.append("operands are shuffled between lanes")
    return [f"{report['name']}, {kernel}: {complaint}" for complaint in found]


@pytest.mark.parametrize("version", [INSTALLED, pytest.param(NEWEST, marks=pytest.mark.slow)])
def test_kernels_compile_as_designed(
    version: str, root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    environ = {**clean_environ, "TRITON_CACHE_DIR": str(tmp_path)}
    script = [str(root / "tests/compile/compile_router.py")]
    reports = [json.loads(line) for line in run(version, root, environ, script).splitlines()]
    assert {report["triton"] for report in reports} == {version}
    names = {report["kernel"] for report in reports}
    assert names == {*NEEDED, "_router_block_kernel", "_router_sum_kernel", "_router_topk_kernel"}
    assert [line for report in reports for line in complaints(report)] == []


@pytest.mark.parametrize("version", [INSTALLED, NEWEST])
def test_a_stage_is_handed_back_where_it_was_used(
    version: str, root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """A loop that kept handing back the first stage compiled well and hung with more steps than stages."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import compile_router, triton\n"
        "from unittest import mock\n"
        "def describe(ptx, metadata):\n"
        "    print('@@', ptx)\n"
        "    return {}\n"
        "compile_router.describe = describe\n"
        "compile_router.compile_case('tile 64x64')\n"
    )
    environ = {**clean_environ, "TRITON_CACHE_DIR": str(tmp_path)}
    said = run(version, root, environ, ["-c", code, str(root / "tests/compile")])
    ptx = Path(next(line for line in said.splitlines() if line.startswith("@@ "))[3:]).read_text()
    lines = ptx.splitlines()
    inside = [i for i, line in enumerate(lines) if "wgmma.mma_async" in line]
    arrive = next(
        i for i in range(inside[-1], len(lines)) if re.search(r"mbarrier\.arrive\.shared::cta\.b64", lines[i])
    )
    (address,) = re.findall(r"\[(%r\d+)\]", lines[arrive])
    written = [i for i in range(inside[-1], arrive) if re.search(rf"\s{re.escape(address)},", lines[i])]
    assert written, f"{address} is not computed inside the loop"
