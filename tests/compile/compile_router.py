"""Compile the router for sm_90a through its own launch code and print what came out, a JSON object a kernel.

Run in a process of its own, without TRITON_INTERPRET: `python compile_router.py [name ...]`, names of `CASES`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import workers

SMS = 132

# Name -> (model or "", m, n, k, terms, fields of the plan); None: what is chosen for the call.
CASES: dict[str, tuple[str, int, int, int, int, dict[str, Any] | None]] = {
    "row": ("", 1, 192, 4096, 2, None),
    "row 3 terms": ("", 2, 192, 4096, 3, {"kernel": "row", "block_m": 2, "block_n": 2, "warps": 8}),
    "small 8": ("", 8, 768, 6144, 2, None),
    "small 64": (
        "", 64, 192, 4096, 2,
        {"kernel": "small", "block_m": 64, "block_n": 16, "splits": 8, "warps": 8, "chunks": 2},
    ),
    "small 3 terms": (
        "", 16, 192, 4096, 3,
        {"kernel": "small", "block_m": 16, "block_n": 16, "splits": 4, "warps": 8, "chunks": 4},
    ),
    "tile 64x32": ("", 64, 192, 4096, 2, None),
    "tile 64x64": ("", 512, 192, 4096, 2, None),
    "tile 64x96": ("", 4096, 192, 4096, 2, None),
    "tile 64x128": ("", 4096, 256, 4096, 2, None),
    "tile 128x64": ("", 1024, 192, 4096, 2, None),
    "tile 128x96": ("", 8192, 192, 4096, 2, None),
    "tile 128x128": ("", 8192, 768, 6144, 2, None),
    "tile 64x32 3 terms": (
        "", 64, 192, 4096, 3, {"kernel": "tile", "block_m": 64, "block_n": 32, "splits": 8, "stages": 6},
    ),
    "tile 64x64 3 terms": ("", 2048, 64, 4096, 3, {"kernel": "tile", "block_m": 64, "block_n": 64, "stages": 6}),
    "tile 128x64 3 terms": (
        "", 8192, 192, 4096, 3, {"kernel": "tile", "block_m": 128, "block_n": 64, "warps": 8, "stages": 5},
    ),
    "block": ("", 100, 100, 100, 2, None),
    "block 3 terms": ("", 2000, 100, 4100, 3, None),
    "topk DeepSeek-V3": ("DeepSeek-V3", 16, 256, 7168, 2, None),
    "topk Hy3": ("Hy3", 1, 192, 4096, 2, None),
    "topk Qwen3": ("Qwen3-235B", 8192, 128, 4096, 2, None),
    "topk LongCat-Flash": ("LongCat-Flash", 64, 768, 6144, 2, None),
}  # fmt: skip
INSTRUCTIONS = {
    "tma": r"cp\.async\.bulk\.tensor",
    "wgmma": r"wgmma\.mma_async\S*\.f32\.bf16\.bf16",
    "mma bf16": r"mma\.sync\.aligned\.m16n8k16\S*\.f32\.bf16\.bf16\.f32",
    "16-byte loads": r"ld\.global\S*\.v4\.b32",
    "shuffles": r"shfl\.sync",
    "redux": r"redux\.sync\.(?:min|max)\.s32",
    "griddepcontrol.wait": r"griddepcontrol\.wait",
}


def main(names: list[str]) -> None:
    workers.print_each(compile_case, names)


def compile_case(name: str) -> list[dict[str, Any]]:
    """Compile the kernels that one call launches."""
    import torch
    import triton

    from hpc.common.offline import compiling_for
    from hpc.gemm.router import plan, warm

    torch.set_num_threads(1)
    reports = []

    def listener(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        (ptx,) = (Path(path) for file, path in metadata_group.items() if file.endswith(".ptx"))
        kernel = src.fn.__name__
        reports.append(
            {"name": name, "kernel": kernel, "triton": triton.__version__, **describe(ptx, metadata)}
        )

    model, m, n, k, terms, fields = CASES[name]
    key = plan.Key(warm.TARGET_GPU, True, SMS, m, n, k, terms)
    chosen = None if fields is None else plan.Plan(**fields)
    assert chosen is None or plan.is_legal(chosen, key) is None, plan.is_legal(chosen, key)
    with compiling_for("sm90"), mock.patch.object(triton.knobs.compilation, "listener", listener):
        warm.launch_job((model, m, n, k), key, chosen)
    return reports


def describe(ptx: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Registers and spills as ptxas reports them, shared memory, and counts of instructions."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ptxas), "-arch=sm_90a", "-v", str(ptx), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    text = ptx.read_text()
    return {
        "regs": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spill": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        "serialized": "wgmma" in log.lower(),  # ptxas warns when it has to put a wait behind every wgmma
        "shared": metadata["shared"],
        "instructions": {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()},
    }


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or list(CASES))
