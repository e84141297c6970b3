"""The prologue compiled for sm_90a: wide loads and stores, nothing fused into other roundings, nothing spilled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from processes import few_or_all, reports

# Registers a thread: 28 warps a multiprocessor at least, 20 where a program holds two tiles of queries.
MAX_REGISTERS, MAX_OF_TWO_TILES = 72, 96

FEW = ["fp8 8/1 decode", "fp8 64/8 prefill, warp", "quantise queries"]
# Fused multiply-adds that the source asks for: 16 a tile and thread in the rotation, 16 more in squares of BF16 values;
# one more would be the compiler's, and bits would differ from the reference. The SM90 kernel has some in its quotients.
FUSED = {
    "bf16 8/1 prefill, rotate then norm": 32, "fp8 32/8 interleaved, half rotated, no norm": 16,
    "bf16 64/8 prefill, two tiles": 96, "fp8 64/8 prefill, two tiles": 96, "fp8 64/8 prefill, warp": 80,
    "bf16 8/1 prefill, warp": 72, "quantise queries": 0,
}  # fmt: skip

pytestmark = pytest.mark.compile


def complaints(report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    name, counts = report["name"], report["instructions"]
    found = []
    large = "two tiles" in name or "warp" in name
    if report["spill"] or report["regs"] > (MAX_OF_TWO_TILES if large else MAX_REGISTERS):
        found.append(f"{report['regs']} registers, {report['spill']} bytes of spills")
    if counts["fused"] != FUSED.get(name, 64):
        found.append(f"{counts['fused']} fused multiply-adds, {FUSED.get(name, 64)} asked for")
    if "warp" in name and report["shared"]:
        found.append(f"{report['shared']} bytes of shared memory in a kernel of one warp")
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


@few_or_all(FEW)
def test_kernels_compile_as_designed(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    found = reports(version, root, clean_environ, tmp_path, "compile_rope.py", names)
    kernels = Counter(report["kernel"] for report in found)
    prologues, warps = (1, 1) if names else (11, 2)
    expected = {"_rope_prologue_kernel": prologues, "_rope_warp_kernel": warps, "_quantize_query_kernel": 1}
    assert kernels == Counter(expected), kernels
    assert [line for report in found for line in complaints(report)] == []
