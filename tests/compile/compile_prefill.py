"""Compile prefill attention for sm_90a through its own launch code and print what came out, a JSON object a kernel.

Run in a process of its own, without TRITON_INTERPRET: `python compile_prefill.py [name ...]`. The names are those of
`CASES`; all of them by default.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import workers

FEATURES = {"window": True, "logit_cap": True, "sinks": True, "return_lse": True}
SHAPES: dict[str, dict[str, Any]] = {
    "64/8 d128": {},
    "5/1 d128 page 16": {"q_heads": 5, "kv_heads": 1, "page_size": 16},
    "64/8 d128 window cap sinks lse": FEATURES,
}
# Name -> fields of the key that differ from the usual one; "short": the call needs no table; "plan": its other fields.
CASES: dict[str, dict[str, Any]] = {
    f"{dtype} {name}": {**fields, "quant_type": quant_type}
    for dtype, quant_type in (("bf16", -1), ("fp8", 1))
    for name, fields in SHAPES.items()
}
CASES |= {
    "bf16 64/8 d128 full": {"causal": False, "quant_type": -1},
    "bf16 64/8 d128 no overlap": {"quant_type": -1, "plan": {"overlap": False}},
    "bf16 5/1 d128 page 16 no overlap": {
        "q_heads": 5,
        "kv_heads": 1,
        "page_size": 16,
        "quant_type": -1,
        "plan": {"overlap": False},
    },
    "bf16 64/8 d128 window cap sinks lse no overlap": {
        **FEATURES,
        "quant_type": -1,
        "plan": {"overlap": False},
    },
    "bf16 64/8 d128 short": {"quant_type": -1, "short": True},
    "fp8 8/1 d128 page 16 window": {
        "q_heads": 8,
        "kv_heads": 1,
        "page_size": 16,
        "window": True,
        "quant_type": 1,
    },
    "fp8 4/4 d128 full window": {
        "q_heads": 4,
        "kv_heads": 4,
        "causal": False,
        "window": True,
        "quant_type": 1,
    },
    "fp8 64/8 d128 three stages": {"quant_type": 1, "plan": {"stages": 3}},
    "bf16 64/8 d64": {"head_dim": 64, "v_dim": 64, "quant_type": -1},
    "bf16 64/8 d128 portable": {"tma": False, "quant_type": -1},
    "bf16 64/8 d256": {"head_dim": 256, "v_dim": 256, "quant_type": -1},
    "bf16 64/8 d256 portable": {"head_dim": 256, "v_dim": 256, "quant_type": -1, "tma": False},
    "bf16 64/8 d192/128 portable": {"head_dim": 192, "v_dim": 128, "quant_type": -1},
    "bf16 64/8 d128 ragged": {"page_size": 0, "quant_type": -1},
    "fp8 64/8 d128 per token": {"quant_type": 0},
}
ONE = {"q_heads": 8, "kv_heads": 1}
CASES |= {
    f"{name} split": {"plan": {"splits": splits}, **fields}
    for name, splits, fields in (
        ("bf16 8/1 d128", 32, {**ONE, "quant_type": -1, "return_lse": True}),
        ("fp8 8/1 d128", 8, {**ONE, "quant_type": 1, "sinks": True}),
        ("bf16 5/1 d128 page 16 window cap sinks lse", 4, {**FEATURES, "q_heads": 5, "kv_heads": 1, "page_size": 16,
                                                           "quant_type": -1}),
        ("fp8 5/1 d128 page 16 window cap sinks lse", 4, {**FEATURES, "q_heads": 5, "kv_heads": 1, "page_size": 16,
                                                          "quant_type": 1}),
        ("bf16 64/8 d128 full", 2, {"causal": False, "quant_type": -1}),
        ("fp8 64/8 d128 full", 2, {"causal": False, "quant_type": 1}),
        ("fp8 8/1 d128 window", 64, {**ONE, "window": True, "quant_type": 1}),
        ("bf16 8/1 d64", 64, {**ONE, "head_dim": 64, "v_dim": 64, "quant_type": -1}),
        ("bf16 8/1 d256", 64, {**ONE, "head_dim": 256, "v_dim": 256, "quant_type": -1, "window": True}),
        ("bf16 8/1 d128 portable", 32, {**ONE, "tma": False, "quant_type": -1, "return_lse": True}),
        ("fp8 8/1 d128 per token", 8, {**ONE, "quant_type": 0, "sinks": True}),
    )
}  # fmt: skip
INSTRUCTIONS = {
    "tma load": r"cp\.async\.bulk\.tensor\.\dd\.shared",
    "tma store": r"cp\.async\.bulk\.tensor\.\dd\.global",
    "wgmma bf16": r"wgmma\.mma_async\S*\.f32\.bf16\.bf16",
    "wgmma f16": r"wgmma\.mma_async\S*\.f32\.f16\.f16",
    "wgmma e4m3": r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3",
    "ldmatrix.trans": r"ldmatrix\S*\.trans",
    "stmatrix": r"stmatrix",
    "setmaxnreg": r"setmaxnreg",
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
    reports: list[dict[str, Any]] = []
    lost: list[str] = []

    def listener(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        (ptx,) = (Path(path) for file, path in metadata_group.items() if file.endswith(".ptx"))
        kernel = src.fn.__name__
        reports.append(
            {"name": name, "kernel": kernel, "triton": triton.__version__, "lost": sorted({*lost}),
             **describe(ptx, metadata)}
        )  # fmt: skip
        lost.clear()

    listening = mock.patch.object(triton.knobs.compilation, "listener", listener)
    with compiling_for("sm90"), listening, watching_loops(lost):
        launch_call(CASES[name])
    return reports


@contextlib.contextmanager
def watching_loops(lost: list[str]) -> Iterator[None]:
    """Note variables whose assignment in a loop Triton drops.

    Triton runs a loop's body once on trial and keeps across turns what then has another value than before the loop. A
    variable that shares its value with a second one before the loop, and takes that second one's in it, looks unchanged
    on trial although the second one changes: `old = new` before and in a loop that ends with `new = next`.
    """
    from triton.compiler.code_generator import CodeGenerator, flatten_values_to_ir

    find, verify = CodeGenerator._find_carries, CodeGenerator._verify_loop_carried_variable
    seen: list[dict[str, tuple[Any, Any]]] = []

    def verifying(self: Any, name: str, loop_value: Any, live_value: Any) -> None:
        seen[-1][name] = tuple(flatten_values_to_ir([value]) for value in (live_value, loop_value))
        verify(self, name, loop_value, live_value)

    def finding(self: Any, node: Any, *args: Any, **more: Any) -> Any:
        seen.append({})
        found = find(self, node, *args, **more)
        values = seen.pop()
        kernel = self.function_name.partition("__")[0]
        carried = [handle for name in found[0] for handle in values[name][0]]
        for name in {
            x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
        }:
            if name in values and name not in found[0] and any(x in carried for x in values[name][1]):
                lost.append(f"{kernel} loses {name} in a loop")
        return found

    with (
        mock.patch.object(CodeGenerator, "_find_carries", finding),
        mock.patch.object(CodeGenerator, "_verify_loop_carried_variable", verifying),
    ):
        yield


def launch_call(fields: dict[str, Any]) -> None:
    import torch

    from hpc.attention.prefill import launch, plan
    from hpc.attention.prefill.validate import Layout

    usual: dict[str, Any] = {
        "sms": 132, "q_heads": 64, "kv_heads": 8, "head_dim": 128, "v_dim": 128, "page_size": 64, "quant_type": 1,
    }  # fmt: skip
    fields = {**usual, **fields}
    short, plan_fields = fields.pop("short", False), fields.pop("plan", {})
    key = plan.Key(sm90=True, **fields)
    dtype = torch.float8_e4m3fn if key.fp8 else torch.bfloat16
    rows, batch = 256, 3
    q = torch.empty((rows, key.q_heads, key.head_dim), dtype=dtype)
    shape = (2, key.page_size) if key.page_size else (rows,)
    k, v = (torch.empty((*shape, key.kv_heads, dim), dtype=dtype) for dim in (key.head_dim, key.v_dim))
    out = torch.empty((rows, key.q_heads, key.v_dim), dtype=torch.bfloat16)
    cu, lens = torch.zeros(batch + 1, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
    k_strides, v_strides = ((*(() if key.page_size else (0,)), *t.stride()[:-1]) for t in (k, v))
    layout = Layout(
        q.stride()[:2],
        k_strides,
        v_strides,
        out.stride()[:2],
        (32, 32, 32),
        32,
        k.shape[0] if key.page_size else 0,
    )
    chosen = replace(plan.sm90(key), **plan_fields)
    if plan.is_legal(chosen, key) is not None:
        chosen = replace(plan.portable(key), splits=chosen.splits)
    parts = max(chosen.splits, 1)
    call = launch.Call(key, chosen, 0, layout, 1024 if key.window else None)
    tiles = plan.bound(rows, batch, chosen.tile_tokens)
    table = torch.zeros(plan.HEADER_WORDS + tiles * plan.ENTRY_WORDS, dtype=torch.int32)
    block_ids = torch.zeros((batch, 8), dtype=torch.int32) if key.page_size else None
    qscale = torch.ones((batch, key.q_heads, rows)) if key.fp8 else None
    kscale, vscale = (torch.ones(1), torch.ones(1)) if key.fp8 else (None, None)
    tensors = (
        q,
        k,
        v,
        out,
        torch.empty(q.shape[:2]),
        table,
        block_ids,
        qscale,
        kscale,
        vscale,
        torch.zeros(64),
    )
    call.launch(0, tensors, cu, lens, tiles, call.default_scale, 30.0, short, parts)


def describe(ptx: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Registers, spills and warnings as ptxas reports them, shared memory, and counts of instructions."""
    import triton
    from sass_uniform import stray_reads

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ptxas), "-arch=sm_90a", "-v", str(ptx), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        stray = stray_reads(Path(folder) / "kernel.cubin")
    text = ptx.read_text()
    if folder := os.environ.get("KEEP"):
        (Path(folder) / f"{ptx.stem}.ptx").write_text(text)
    return {
        "regs": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spill": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        "warnings": sorted(set(re.findall(r"C75\d\d", log))),
        "stray": stray,
        "shared": metadata["shared"],
        # what Triton leaves the first role, after the numbers that the others ask for
        "first_role": max(map(int, re.findall(r"setmaxnreg\.dec\S*\s+(\d+)", text)), default=0),
        "instructions": {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()},
    }


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or list(CASES))
