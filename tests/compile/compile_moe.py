"""Compile the fused MoE for sm_90a through its own launch code and print what came out, a JSON object a kernel.

Run in a process of its own, without TRITON_INTERPRET: `python compile_moe.py [name ...]`. The names are those of
`CASES`; all of them by default.
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

# Name -> (tokens, experts, hidden, intermediate, block scales, alternative or None for the choice).
CASES: dict[str, tuple[int, int, int, int, bool, str | None]] = {
    "tensor tiny": (1, 192, 4096, 192, False, None),
    "block tiny": (1, 192, 4096, 192, True, None),
    "tensor tile 8": (8, 192, 4096, 192, False, None),
    "block tile 8": (8, 24, 4096, 1536, True, None),
    "tensor tile 32, index in three": (512, 192, 4096, 192, False, None),
    "block tile 32": (64, 24, 4096, 1536, True, None),
    "tensor tile 64 in turn": (128, 24, 4096, 1536, False, None),
    "tensor tile 128 in turn": (256, 24, 4096, 1536, False, None),
    "block tile 64": (1024, 24, 4096, 1536, True, "tiles"),
    "tensor pair 128": (1024, 24, 4096, 1536, False, None),
    "tensor pair 64": (1024, 128, 4096, 192, False, None),
    "block pair 64": (1024, 24, 4096, 1536, True, None),
    "block pair 128": (1024, 24, 4096, 1536, True, "pair 128"),
    "tensor tile 16, I = 80": (64, 128, 2048, 80, False, None),
    "tensor portable": (64, 128, 2048, 768, False, "portable"),
    "block portable": (1024, 128, 2048, 80, True, "portable"),
    "bf16 portable": (64, 128, 2048, 768, False, "portable"),
    "bf16 portable, many rows": (2048, 32, 2048, 768, False, "portable"),
    "tensor portable, all parts": (64, 128, 2048, 768, False, "portable"),
    "tensor no combine": (512, 192, 4096, 192, False, None),
}
# What more these calls ask for, by `MoeCase` field.
PARTS: dict[str, dict[str, Any]] = {
    "bf16 portable": {"bf16_weights": True, "bias": "bfloat16"},
    "bf16 portable, many rows": {"bf16_weights": True},
    "tensor portable, all parts": {
        "static": False, "bf16_input": True, "bias": "float32", "weight_on_input": True, "swiglu_alpha": 1.702,
    },
    "tensor no combine": {"no_combine": True, "shared_experts": 1, "static": False, "bf16_input": True},
}  # fmt: skip
INSTRUCTIONS = {
    "tma": r"cp\.async\.bulk\.tensor",
    "cp.async": r"cp\.async\.c[ag]",
    "wgmma e4m3": r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3",
    "matrix f16": r"(?:wgmma\.mma_async|mma\.sync)\S*\.f32\.(?:f16\.f16|bf16\.bf16)",
    "griddepcontrol.wait": r"griddepcontrol\.wait",
}


def main(names: list[str]) -> None:
    workers.print_each(compile_case, names)


def compile_case(name: str) -> list[dict[str, Any]]:
    """Compile the kernels that one call launches."""
    import torch
    import triton

    from hpc.moe import plan, warm
    from hpc.moe.case_lists import MoeCase

    torch.set_num_threads(1)
    reports = []

    def listener(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        (ptx,) = (Path(path) for file, path in metadata_group.items() if file.endswith(".ptx"))
        kernel = src.fn.__name__
        reports.append(
            {"name": name, "kernel": kernel, "triton": triton.__version__, **describe(ptx, metadata)}
        )

    tokens, experts, hidden, inter, block, backend = CASES[name]
    params = MoeCase(tokens, experts, hidden, inter, block=block, **PARTS.get(name, {}))
    chosen = None
    if backend == "portable":
        tile = 64 if "many rows" in name else 32 if block else 16
        chosen = plan.Plan(backend, tile, 128, tokens * 8 <= plan.FUSED_PAIRS)
    elif backend is not None:
        chosen = plan.alternatives(warm.key_of(params, "sm90"))[backend]
    with mock.patch.object(triton.knobs.compilation, "listener", listener):
        warm.compile_shape(params, "sm90", chosen)
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
        "serialised": log.count("serialized"),
        "shared": metadata["shared"],
        "instructions": {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()},
    }


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or list(CASES))
