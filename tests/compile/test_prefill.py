"""Prefill attention compiled for sm_90a: the instructions it is built on are there, and no loop of it spills."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from processes import INSTALLED, SHARED_MEMORY, few_or_all, reports

BF16, FP8 = "_prefill_sm90_bf16_kernel", "_prefill_sm90_fp8_kernel"
# Bytes of spill stores and loads together that are allowed, by kernel: measured, + 16. They are what a tile keeps for
# its end (query scales, places of the output) and the page ids of a producer with pages of 16; loops over whole blocks
# have none in the cases without a window.
SPILLS = {BF16: 0, FP8: 280 + 16, "_prefill_schedule_kernel": 0, "_prefill_attention_kernel": 16}
SPILLS_BY_NAME = {
    "bf16 5/1 d128 page 16": 128 + 16, "fp8 5/1 d128 page 16": 424 + 16,
    "bf16 64/8 d128 window cap sinks lse": 140 + 16,
}  # fmt: skip

FEW = [
    "bf16 64/8 d128",
    "bf16 64/8 d256",
    "fp8 64/8 d128",
    "bf16 64/8 d128 portable",
    "fp8 64/8 d128 per token",
]

pytestmark = pytest.mark.compile


def complaints(report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    name, kernel, counts = report["name"], report["kernel"], report["instructions"]
    found = [f"ptxas warns {code}" for code in report["warnings"]]  # C7510 and on: wgmma serialised
    found += report["lost"]
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
        if "d256" not in name:  # no room for the output in shared memory there
            needed = (*needed, "tma store")
    elif kernel == FP8:
        needed = (*needed, "tma load", "tma store", "wgmma e4m3", "setmaxnreg", "ldmatrix.trans", "stmatrix")
    elif kernel == "_prefill_attention_kernel":
        needed = (*needed, "wgmma f16" if name.startswith("fp8") else "wgmma bf16")
    found += [f"no {what}" for what in needed if not counts[what]]
    return [f"{name}, {kernel}: {complaint}" for complaint in found]


@few_or_all(FEW)
def test_kernels_compile_as_designed(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    found = reports(version, root, clean_environ, tmp_path, "compile_prefill.py", names)
    kernels = Counter(report["kernel"] for report in found)
    assert kernels >= Counter({BF16: 2, FP8: 1, "_prefill_attention_kernel": 2}), kernels
    if not names:
        counts = [kernels[name] for name in (BF16, FP8, "_prefill_attention_kernel")]
        assert counts == [7, 3, 6], kernels
    assert [line for report in found for line in complaints(report)] == []
