"""Decode attention compiled for sm_90a: the instructions it is built on are there, and nothing spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import INSTALLED, NEWEST, SHARED_MEMORY, reports

GLUON = "_decode_sm90_kernel"
ROWS = "_decode_rows_sm90_kernel"
# Bytes of spill stores and loads together that are allowed, by kernel.
SPILLS = {GLUON: 0, ROWS: 0, "_merge_kernel": 0, "_assign_kernel": 0, "_decode_attention_kernel": 16}
# What spills there is set up once a CTA and read once a request, nothing inside a loop over steps.
SPILLS_BY_NAME = {"fp8 rows 128": 20 + 16, "bf16 rows 128": 60 + 16, "bf16 rows 48": 40 + 16}
# Triton 3.8.0 spills in kernels that 3.6.0, which ships with torch 2.11, compiles without spills: measured, + 16.
SPILLS_OF_NEWEST = {
    "bf16 8/1 d128 4 new tokens": 208 + 16, "fp8 12/1 d128 4 new tokens": 32 + 16, "assign": 24 + 16,
    "fp8 rows 128": 76 + 16, "bf16 rows 128": 100 + 16, "bf16 rows 48": 68 + 16, "bf16 rows 64, page 16": 24 + 16,
    "bf16 rows 64 window cap sinks lse": 48 + 16,
}  # fmt: skip

pytestmark = pytest.mark.compile


def complaints(report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    found = []
    kernel, counts = report["kernel"], report["instructions"]
    allowed = SPILLS_BY_NAME.get(report["name"], SPILLS[kernel])
    if report["triton"] == NEWEST:
        allowed = SPILLS_OF_NEWEST.get(report["name"], allowed)
    if report["spill"] > allowed:
        found.append(f"{report['spill']} bytes of spills, {allowed} allowed")
    if report["shared"] > SHARED_MEMORY:
        found.append(f"{report['shared']} bytes of shared memory")
    if kernel == GLUON:
        mma = "mma f16" if report["name"].startswith("fp8 ") else "mma bf16"
        needed = ("tma", "ldmatrix", "ldmatrix.trans", mma, "griddepcontrol.wait")
        found += [f"no {name}" for name in needed if not counts[name]]
        # A barrier does not wait for loads under way in other warps; a product waits for those that it uses.
        if report["freed after"] != ["mma.sync"]:
            found.append(f"a stage is freed after {report['freed after']}")
    if kernel == ROWS:
        fp8 = report["name"].startswith("fp8 ")
        needed = ("tma", "setmaxnreg", "griddepcontrol.wait", *(FP8_WGMMA if fp8 else ("wgmma bf16",)))
        found += [f"no {name}" for name in needed if not counts[name]]
        found += [f"ptxas warns {code}" for code in report["warnings"]]
        # A product under way reads its operands until it is waited for; the converter's stores used what it loaded.
        if not {*report["freed after"]} <= {"wgmma.wait_group", "st.shared.v4"}:
            found.append(f"a stage is freed after {report['freed after']}")
    return [f"{report['name']}, {kernel}: {complaint}" for complaint in found]


FP8_WGMMA = ("wgmma e4m3", "wgmma f16")
# Every kernel with the installed Triton, each once with the newest; all cases when slow tests run.
FEW = [
    "fp8 8/1 d128", "bf16 64/8 d128", "bf16 8/1 d256", "fp8 8/1 d128 static", "fp8 8/1 d128 4 new tokens",
    "bf16 8/1 d128 portable", "fp8 rows 32", "bf16 rows 128", "assign",
]  # fmt: skip
ONCE = ["fp8 8/1 d128 static", "fp8 rows 32", "bf16 8/1 d128 portable", "assign"]
ALL = {GLUON: 19, ROWS: 16, "_decode_attention_kernel": 2, "_merge_kernel": 6, "_assign_kernel": 1}


@pytest.mark.parametrize(
    ("version", "names"),
    [
        (INSTALLED, FEW),
        (NEWEST, ONCE),
        *(pytest.param(each, [], marks=pytest.mark.slow) for each in (INSTALLED, NEWEST)),
    ],
    ids=["few", "newest once", "all", "newest"],
)
def test_kernels_compile_as_designed(
    version: str, names: list[str], root: Path, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    found = reports(version, root, clean_environ, tmp_path, "compile_decode.py", names)
    kernels = [report["kernel"] for report in found]
    assert set(kernels) == set(ALL)
    if not names:
        assert {kernel: kernels.count(kernel) for kernel in set(kernels)} == ALL
    assert [line for report in found for line in complaints(report)] == []
