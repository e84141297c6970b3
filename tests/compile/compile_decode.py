"""Compile decode attention for sm_90a through its own launch code and print what came out, a JSON object a kernel.

Run in a process of its own, without TRITON_INTERPRET: `python compile_decode.py [name ...]`. The names are those of
`CASES` and "assign"; all of them by default.
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

HEADS_AND_SHAPES: dict[str, dict[str, Any]] = {
    "8/1 d128": {},
    "64/8 d128": {"q_heads": 64, "kv_heads": 8},
    "16/1 d128": {"q_heads": 16},
    "8/1 d128 4 new tokens": {"num_new_tokens": 4, "kernel": "tokens"},
    "8/1 d64": {"head_dim": 64, "v_dim": 64},
    "8/1 d256": {"head_dim": 256, "v_dim": 256},
    "8/1 d128 page 16": {"page_size": 16},
    "8/1 d128 static": {"dynamic": False},
    "8/1 d128 window cap sinks lse": {"window": True, "logit_cap": True, "sinks": True, "return_lse": True},
}
PORTABLE = "8/1 d128 portable"  # what a cache that TMA cannot read gets
# Name -> fields of the key that differ from the usual one. A static call also compiles the merge kernel.
CASES: dict[str, dict[str, Any]] = {
    f"{dtype} {name}": {**fields, "quant_type": quant_type}
    for dtype, quant_type in (("fp8", 1), ("bf16", -1))
    for name, fields in {**HEADS_AND_SHAPES, PORTABLE: {"tma": False}}.items()
}
# 48 rows, which no row block divides: speculative decoding of a model with 12 query heads a KV head
CASES["fp8 12/1 d128 4 new tokens"] = {
    "q_heads": 12, "num_new_tokens": 4, "quant_type": 1, "kernel": "tokens",
}  # fmt: skip
# More than 16 rows a KV head, by the kernel that is chosen for them
ROWS: dict[str, dict[str, Any]] = {
    "32": {},
    "48": {"q_heads": 12},
    "64, page 16": {"q_heads": 16, "page_size": 16},
    "128": {"q_heads": 16, "num_new_tokens": 8},
    "32 d64": {"head_dim": 64, "v_dim": 64},
    "32, 8 heads": {"q_heads": 64, "kv_heads": 8},
    "32 static": {"dynamic": False},
    "64 window cap sinks lse": {**HEADS_AND_SHAPES["8/1 d128 window cap sinks lse"], "q_heads": 16},
}
CASES |= {
    f"{dtype} rows {name}": {"num_new_tokens": 4, **fields, "quant_type": quant_type}
    for dtype, quant_type in (("fp8", 1), ("bf16", -1))
    for name, fields in ROWS.items()
}
INSTRUCTIONS = {
    "tma": r"cp\.async\.bulk\.tensor",
    "ldmatrix": r"ldmatrix(?!\S*\.trans)",
    "ldmatrix.trans": r"ldmatrix\S*\.trans",
    "mma f16": r"mma\.sync\.aligned\.m16n8k16\S*\.f32\.f16\.f16\.f32",
    "wgmma e4m3": r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3",
    "wgmma f16": r"wgmma\.mma_async\S*\.f32\.f16\.f16",
    "wgmma bf16": r"wgmma\.mma_async\S*\.f32\.bf16\.bf16",
    "setmaxnreg": r"setmaxnreg",
    "mma bf16": r"mma\.sync\.aligned\.m16n8k16\S*\.f32\.bf16\.bf16\.f32",
    "griddepcontrol.wait": r"griddepcontrol\.wait",
}


def main(names: list[str]) -> None:
    workers.print_each(compile_case, names)


def compile_case(name: str) -> list[dict[str, Any]]:
    """Compile the kernels that one call launches."""
    import torch
    import triton

    from hpc.common.offline import compiling_for

    torch.set_num_threads(1)
    reports = []

    def listener(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        (ptx,) = (Path(path) for file, path in metadata_group.items() if file.endswith(".ptx"))
        kernel = src.fn.__name__
        reports.append(
            {"name": name, "kernel": kernel, "triton": triton.__version__, **describe(ptx, metadata)}
        )

    with compiling_for("sm90"), mock.patch.object(triton.knobs.compilation, "listener", listener):
        if name == "assign":
            launch_assign()
        else:
            launch_call(CASES[name])
    return reports


def launch_call(fields: dict[str, Any]) -> None:
    import torch

    from hpc.attention.decode import choose, launch, plan

    usual: dict[str, Any] = {
        "sms": SMS, "batch": 64, "q_heads": 8, "kv_heads": 1, "head_dim": 128, "v_dim": 128, "page_size": 64,
        "max_pages": 64, "num_new_tokens": 1, "quant_type": 1,
    }  # fmt: skip
    fields = {**usual, **fields}
    tokens = fields.pop("kernel", "") == "tokens"
    key = choose.Key(sm90=True, **fields)
    dtype = torch.float8_e4m3fn if key.fp8 else torch.bfloat16
    q = torch.empty((key.batch * key.num_new_tokens, key.q_heads, key.head_dim), dtype=dtype)
    k = torch.empty((2, key.page_size, key.kv_heads, key.head_dim), dtype=dtype)
    v = torch.empty((2, key.page_size, key.kv_heads, key.v_dim), dtype=dtype)
    out = torch.empty((*q.shape[:2], key.v_dim), dtype=torch.bfloat16)
    block_ids = torch.zeros((key.batch, key.max_pages), dtype=torch.int32)
    seq_lens = torch.ones(key.batch, dtype=torch.int32)
    layout = launch.Layout(
        q.stride()[:2], k.stride()[:3], v.stride()[:3], out.stride()[:2], key.max_pages, (key.q_heads, 1), (0, 0, 0),
        1, k.shape[0],
    )  # fmt: skip
    chosen = choose.tokens_plan(key) if tokens else choose.choose(key)
    call = launch.Call(key, chosen, 0, layout, 1024 if key.window else None)
    scratch = torch.empty(max(call.words, 1))
    task_map = torch.zeros(4 * plan.workspace_words(SMS, key.kv_heads), dtype=torch.int8)
    scales = (torch.ones(q.shape[:2]), torch.ones(1), torch.ones(1)) if key.fp8 else (scratch,) * 3
    sinks = torch.zeros(key.q_heads)
    lse = torch.empty(q.shape[:2])
    tensors = (
        q,
        k,
        v,
        block_ids,
        seq_lens,
        task_map if key.dynamic else scratch,
        *scales,
        sinks,
        out,
        lse,
        scratch,
    )
    call.launch(0, tensors, call.default_scale, 30.0)


def launch_assign() -> None:
    import torch

    from hpc.attention.decode import assign, plan

    lens = torch.ones(64, dtype=torch.int32)
    task_map = torch.zeros(4 * plan.workspace_words(SMS, 1), dtype=torch.int8)
    with (
        mock.patch.object(assign.arch, "sm_count", lambda device: SMS),
        mock.patch.object(assign, "raw_stream", lambda index: 0),
        mock.patch.object(torch.cuda, "current_device", lambda: lens.device.index),
    ):
        assign.on_device(lens, task_map, 1, 1, True, 0, None)


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
        "warnings": sorted(set(re.findall(r"C75\d\d", log))),  # wgmma serialised
        "spill": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        "shared": metadata["shared"],
        "instructions": {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()},
        "freed after": freed_after(text),
    }


def freed_after(ptx: str) -> list[str]:
    """The instructions, of those that load, use or convert a stage, in front of those that free one."""
    *pieces, _ = ptx.split("mbarrier.arrive.shared::cta.b64 _,")
    before, found = "", set()
    for piece in pieces:
        before += piece
        used = re.findall(
            r"ldmatrix|mma\.sync|wgmma\.mma_async|wgmma\.wait_group|(?:ld|st)\.shared\S*\.v4", before
        )
        found.add(used[-1].replace("::cta", "") if used else "nothing")
    return sorted(found)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or [*CASES, "assign"])
