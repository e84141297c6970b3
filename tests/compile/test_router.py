"""The router's kernels compiled for sm_90a: the instructions they are built on are there, and nothing spills."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from processes import INSTALLED, NEWEST, SHARED_MEMORY, few_or_all, reports, run

# Instructions that a kernel is built on.
NEEDED = {
    "_router_tile_kernel": ("tma", "wgmma"),
    "_router_small_kernel": ("mma bf16", "16-byte loads"),
    "_router_row_kernel": ("16-byte loads",),
    "_router_topk_kernel": ("redux",),
}

pytestmark = pytest.mark.compile


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


# Every kernel once.
FEW = ["row", "small 3 terms", "tile 64x32", "tile 128x96", "block 3 terms", "topk DeepSeek-V3"]


@few_or_all(FEW)
def test_kernels_compile_as_designed(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    found = reports(version, root, clean_environ, tmp_path, "compile_router.py", names)
    names = {report["kernel"] for report in found}
    assert names == {*NEEDED, "_router_block_kernel", "_router_sum_kernel"}
    assert [line for report in found for line in complaints(report)] == []


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
    said = run(version, root, clean_environ, tmp_path, ["-c", code, str(root / "tests/compile")])
    ptx = Path(next(line for line in said.splitlines() if line.startswith("@@ "))[3:]).read_text()
    lines = ptx.splitlines()
    inside = [i for i, line in enumerate(lines) if "wgmma.mma_async" in line]
    arrive = next(
        i for i in range(inside[-1], len(lines)) if re.search(r"mbarrier\.arrive\.shared::cta\.b64", lines[i])
    )
    (address,) = re.findall(r"\[(%r\d+)\]", lines[arrive])
    written = [i for i in range(inside[-1], arrive) if re.search(rf"\s{re.escape(address)},", lines[i])]
    assert written, f"{address} is not computed inside the loop"
