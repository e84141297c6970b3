"""Compile the prologue for sm_90a through its own launch code and print what came out, a JSON object a kernel.

Run in a process of its own, without TRITON_INTERPRET: `python compile_rope.py [name ...]`.
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

QUERY = "quantise queries"
# Name -> fields of a `RopeCase`.
CASES: dict[str, dict[str, Any]] = {
    "fp8 8/1 decode": {},
    "fp8 64/8 decode": {"q_heads": 64, "kv_heads": 8},
    "fp8 64/8 prefill": {"q_heads": 64, "kv_heads": 8, "is_prefill": True},
    "bf16 64/8 decode": {"q_heads": 64, "kv_heads": 8, "dtype": "bf16"},
    "bf16 8/1 prefill, rotate then norm": {"dtype": "bf16", "is_prefill": True, "norm_policy": 1},
    "fp8 32/8 interleaved, half rotated, no norm": {
        "q_heads": 32, "kv_heads": 8, "neox": False, "rotary_dim": 64, "norm_policy": 0,
    },
    "fp8 32/8 d256": {"q_heads": 32, "kv_heads": 8, "head_dim": 256},
    "bf16 64/8 prefill, two tiles": {
        "q_heads": 64, "kv_heads": 8, "dtype": "bf16", "lens": (4096,), "new": (4096,), "is_prefill": True,
        "tiles": 2,
    },
    "fp8 64/8 prefill, two tiles": {
        "q_heads": 64, "kv_heads": 8, "lens": (4096,), "new": (4096,), "is_prefill": True, "tiles": 2,
    },
    "fp8 64/8 prefill, warp": {
        "q_heads": 64, "kv_heads": 8, "lens": (4096,), "new": (4096,), "is_prefill": True, "warp": (32, 1),
    },
    "bf16 8/1 prefill, warp": {
        "q_heads": 8, "kv_heads": 1, "dtype": "bf16", "lens": (4096,), "new": (4096,), "is_prefill": True,
        "warp": (8, 4),
    },
    "fp8 8/1 decode, sm80": {"target": "sm80"},
    "bf16 32/8 d80 HND": {"q_heads": 32, "kv_heads": 8, "head_dim": 80, "layout": "HND", "dtype": "bf16"},
}  # fmt: skip
INSTRUCTIONS = {
    "16-byte loads": r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64",
    "single loads": r"ld\.global\.b16",
    "16-byte stores": r"st\.global\S*\.v4\.b32",
    "8-byte stores": r"st\.global\S*\.v2\.b32|st\.global\S*\.b64",
    "byte stores": r"st\.global\.b8",
    "e4m3": r"cvt\.rn\.satfinite\.e4m3x2\.f32",
    "fused": r"fma\.rn\.f32",
    "griddepcontrol.wait": r"griddepcontrol\.wait",
    "griddepcontrol.launch_dependents": r"griddepcontrol\.launch_dependents",
}


def main(names: list[str]) -> None:
    workers.print_each(compile_case, names)


def compile_case(name: str) -> list[dict[str, Any]]:
    """Compile the kernel that one call launches."""
    import torch
    import triton

    torch.set_num_threads(1)
    reports = []

    def listener(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        (ptx,) = (Path(path) for file, path in metadata_group.items() if file.endswith(".ptx"))
        reports.append(
            {"name": name, "kernel": src.fn.__name__, "triton": triton.__version__, **describe(ptx, metadata)}
        )

    with mock.patch.object(triton.knobs.compilation, "listener", listener):
        launch_query() if name == QUERY else launch_prologue(CASES[name])
    return reports


def launch_prologue(fields: dict[str, Any]) -> None:
    from hpc.rope import warm
    from hpc.rope.case_lists import RopeCase
    from hpc.rope.plan import Plan

    plan, target = fields.get("plan"), fields.get("target", "sm90")
    if "tiles" in fields:
        plan = Plan(8, 2, fields["tiles"])
    if "warp" in fields:
        plan = Plan(fields["warp"][0], 1, tokens=fields["warp"][1])
    usual = {"lens": (65, 70), "new": (1, 1), "dtype": "fp8", "norm_policy": 2}
    params = {
        **usual,
        **{name: value for name, value in fields.items() if name not in ("plan", "target", "tiles", "warp")},
    }
    warm.compile_shape(RopeCase(**params), target, plan)


def launch_query() -> None:
    import torch

    from hpc.common.offline import compiling_for
    from hpc.rope import entry, launch

    q = torch.zeros((4, 8, 128), dtype=torch.bfloat16)
    out, scale = torch.zeros(q.shape, dtype=torch.float8_e4m3fn), torch.zeros(1, 8, 128)
    index = torch.tensor([0, 4], dtype=torch.int32)
    given, grid, numbers, constants, warps = entry.query_arguments(q, out, scale, index, 128, 448.0)
    constants = (*constants, True, False, False)
    kernel = launch.query_kernel_of(0, True, True, constants, warps)
    with compiling_for("sm90"):
        kernel((grid, 1, 1), 0, (*map(launch.as_bytes, given), *numbers, *constants))


def describe(ptx: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Registers and spills as ptxas reports them, shared memory, and counts of instructions."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ptxas), "-arch=sm_90a", "-fmad=false", "-v", str(ptx), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    text = ptx.read_text()
    return {
        "regs": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spill": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        "shared": metadata["shared"],
        "instructions": {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()},
    }


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or [*CASES, QUERY])
