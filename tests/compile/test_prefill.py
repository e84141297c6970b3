"""Prefill attention compiled for sm_90a: the instructions it is built on are there, and no loop of it spills."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from processes import INSTALLED, SHARED_MEMORY, few_or_all, reports
from sass_uniform import Instruction, strays

BF16, FP8 = "_prefill_sm90_bf16_kernel", "_prefill_sm90_fp8_kernel"
# Bytes of spill stores and loads together that are allowed, by kernel: measured, + 16. They are what a tile keeps for
# its end (query scales, places of the output) and the page ids of a producer with pages of 16; loops over whole blocks
# have none in the cases without a window.
SPILLS = {BF16: 0, FP8: 280 + 16, "_prefill_schedule_kernel": 0, "_prefill_attention_kernel": 16,
          "_prefill_combine_kernel": 0}  # fmt: skip
SPILLS_BY_NAME = {
    "bf16 5/1 d128 page 16 no overlap": 128 + 16, "fp8 5/1 d128 page 16": 424 + 16,
    "bf16 64/8 d128 window cap sinks lse no overlap": 140 + 16, "fp8 8/1 d128 page 16 window": 432 + 16,
    "bf16 64/8 d128": 12 + 16, "bf16 5/1 d128 page 16": 12 + 16, "bf16 64/8 d128 full": 12 + 16,
    "bf16 64/8 d128 window cap sinks lse": 24 + 16,
}  # fmt: skip

FEW = [
    "bf16 64/8 d128", "fp8 64/8 d128", "fp8 64/8 d128 window cap sinks lse", "bf16 8/1 d128 split",
    "fp8 8/1 d128 split", "bf16 8/1 d128 portable split",
]  # fmt: skip

pytestmark = pytest.mark.compile


def complaints(report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    name, kernel, counts = report["name"], report["kernel"], report["instructions"]
    found = [f"ptxas warns {code}" for code in report["warnings"]]  # C7510 and on: wgmma serialised
    found += report["lost"]
    found += [f"a descriptor that may be stale: {read}" for read in report["stray"]]
    allowed = max(SPILLS[kernel], SPILLS_BY_NAME.get(name, 0)) if kernel in (BF16, FP8) else SPILLS[kernel]
    if report["spill"] > allowed and report["triton"] == INSTALLED:
        found.append(f"{report['spill']} bytes of spills, {allowed} allowed")
    if report["shared"] > SHARED_MEMORY:
        found.append(f"{report['shared']} bytes of shared memory")
    if kernel in (BF16, FP8) and report["first_role"] < 224:
        found.append(f"{report['first_role']} registers are left for the first consumer")
    needed: tuple[str, ...] = ("griddepcontrol.wait",)
    if kernel == BF16:
        needed = (*needed, "tma load", "wgmma bf16", "setmaxnreg")
        if "d256" not in name and "split" not in name:  # no room for the output in shared memory; fp32
            needed = (*needed, "tma store")
    elif kernel == FP8:
        needed = (*needed, "tma load", "wgmma e4m3", "setmaxnreg", "ldmatrix.trans", "stmatrix")
        if "split" not in name:
            needed = (*needed, "tma store")
    elif kernel == "_prefill_attention_kernel":
        needed = (*needed, "wgmma f16" if name.startswith("fp8") else "wgmma bf16")
    found += [f"no {what}" for what in needed if not counts[what]]
    return [f"{name}, {kernel}: {complaint}" for complaint in found]


def test_a_descriptor_that_only_a_skipped_loop_sets_is_seen() -> None:
    """As ptxas made it: register 4 is set at 0x30, which the branch at 0x20 jumps over, and read at 0x50."""
    lines = (
        "ULOP3.LUT UR4, UR4, 0xc00, URZ, 0xe2, !UPT", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe0", "@!P4 BRA 0x40",
        "UMOV UR4, UR6", "UIADD3 UR28, UP0, UR4, 0x2, URZ", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR28], R24", "EXIT",
    )  # fmt: skip
    code = [Instruction(16 * i, text) for i, text in enumerate(lines)]
    assert [read.partition(" ")[0] for read in strays(code)] == ["UR28"]
    assert strays([*code[:2], Instruction(0x20, "NOP"), *code[3:]]) == []


def test_a_register_that_is_kept_and_brought_back_is_not_stale() -> None:
    """Register 30 is older than the role; the loop keeps it in a vector register while it needs its place."""
    lines = (
        "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe0", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR28], R24", "MOV R33, UR30",
        "UMOV UR30, 0x4", "UIADD3 UR8, UR30, 0x8, URZ", "R2UR UR30, R33", "@P0 BRA 0x10", "EXIT",
    )  # fmt: skip
    code = [Instruction(16 * i, text) for i, text in enumerate(lines)]
    assert strays(code) == []
    lost = [*code[:5], Instruction(0x50, "R2UR UR30, R34"), *code[6:]]
    assert [read.partition(":")[0] for read in strays(lost)] == ["UR30 at 0x10"]


@few_or_all(FEW)
def test_kernels_compile_as_designed(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    found = reports(version, root, clean_environ, tmp_path, "compile_prefill.py", names)
    kernels = Counter(report["kernel"] for report in found)
    assert kernels >= Counter({BF16: 2, FP8: 3, "_prefill_attention_kernel": 1}), kernels
    if not names:
        counts = [kernels[name] for name in (BF16, FP8, "_prefill_attention_kernel")]
        assert counts == [15, 10, 7], kernels
    assert [line for report in found for line in complaints(report)] == []
