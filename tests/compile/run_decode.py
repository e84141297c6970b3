"""Compile decode attention for sm_90a and run it on the CPU's PTX machine; a JSON object a case.

Run in a process of its own, without TRITON_INTERPRET: `python run_decode.py [name ...]`, names of `CASES`. CTAs run one
after the other in a random order, twice over one task map: so whoever comes last merges, and counters must be back at
zero.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import workers

MIXED = [700, 0, 64, 1, 129, 513]
FEW = [300, 0, 1, 65, 130]

# Name -> (multiprocessors, fields of the inputs, fields of the plan). Bins are few, so that requests are cut.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fp8": (8, {"lens": MIXED}, {}),
    "bf16": (8, {"lens": MIXED, "dtype": "bf16"}, {}),
    "bf16 two heads, group 3, page 16": (8, {"lens": [300, 70], "dtype": "bf16", "heads": (6, 2), "page": 16}, {}),
    "fp8 four new tokens": (
        4, {"lens": [300, 5], "new": 4},
        {"kernel": "tokens", "block_rows": 32, "warps_tok": 2, "warps_row": 4, "max_registers": 168},
    ),
    "bf16 window, cap, sinks": (6, {"lens": [700, 90], "dtype": "bf16", "more": True}, {}),
    "fp8 head dim 64": (4, {"lens": [400, 20], "dim": 64}, {}),
    "fp8 head dim 256": (4, {"lens": [300, 20], "dim": 256}, {}),
    "fp8 merge in two levels": (24, {"lens": [3000]}, {}),
    "bf16 static": (4, {"lens": [700, 0, 90], "dtype": "bf16", "dynamic": False}, {}),
    "rows: fp8": (6, {"lens": MIXED, "new": 4}, {}),
    "rows: bf16": (6, {"lens": MIXED, "new": 4, "dtype": "bf16"}, {}),
    "rows: fp8 64 rows, page 16": (4, {"lens": FEW, "new": 4, "heads": (16, 1), "page": 16}, {}),
    "rows: bf16 48 rows, page 128": (
        4, {"lens": FEW, "new": 4, "heads": (12, 1), "page": 128, "dtype": "bf16"}, {},
    ),
    "rows: fp8 17 rows": (3, {"lens": [200, 17], "new": 1, "heads": (17, 1)}, {}),
    "rows: fp8 8 heads": (16, {"lens": [250, 130], "new": 3, "heads": (64, 8)}, {}),
    "rows: bf16 80 rows": (3, {"lens": [200, 7], "new": 5, "heads": (16, 1), "dtype": "bf16"}, {}),
    "rows: fp8 144 rows": (2, {"lens": [300, 130], "new": 9, "heads": (16, 1)}, {}),
    "rows: fp8 window, cap, sinks": (6, {"lens": [700, 90, 3], "new": 4, "more": True}, {}),
    "rows: bf16 window, cap, sinks": (6, {"lens": [700, 90], "new": 4, "dtype": "bf16", "more": True}, {}),
    "rows: fp8 head dim 64": (4, {"lens": [400, 20], "dim": 64, "new": 4}, {}),
    "rows: bf16 head dim 64": (4, {"lens": [400, 20], "dim": 64, "new": 4, "dtype": "bf16"}, {}),
    "rows: fp8 merge in two levels": (24, {"lens": [3000], "new": 3}, {}),
    "rows: fp8 map of another call": (4, {"lens": [200, 90], "new": 4, "foreign": True}, {}),
    "rows: fp8 static": (4, {"lens": [700, 0, 90], "new": 4, "dynamic": False}, {}),
    "bf16 map of another call": (4, {"lens": [200, 90], "dtype": "bf16", "foreign": True}, {}),
}  # fmt: skip


def main(names: list[str]) -> None:
    workers.print_each(run_case, names)


def run_case(name: str) -> dict[str, Any]:
    """One call, run twice, against float64."""
    import torch
    import triton

    torch.set_num_threads(1)
    sms, fields, plan_fields = CASES[name]
    return {"name": name, "triton": triton.__version__, **decode(sms, fields, plan_fields)}


def make_inputs(fields: dict[str, Any]) -> Any:
    from hpc.attention.decode import cases
    from hpc.attention.decode.case_lists import DecodeCase

    more = {"window": 300, "logit_cap": 20.0, "sinks": True} if fields.get("more") else {}
    params = DecodeCase(
        tuple(fields["lens"]), *fields.get("heads", (8, 1)), dtype=fields.get("dtype", "fp8"),
        head_dim=fields.get("dim", 128), page_size=fields.get("page", 64), num_new_tokens=fields.get("new", 1), **more,
    )  # fmt: skip
    return cases.make_tensors(params, "cpu", seed=5)


def decode(sms: int, fields: dict[str, Any], plan_fields: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import replace

    import torch

    from hpc.attention.decode import cases, choose, launch, plan

    inputs = make_inputs(fields)
    params, cache = inputs.params, inputs.cache
    dynamic = fields.get("dynamic", True)
    key = choose.Key(
        sm90=True, sms=sms, batch=len(params.lens), q_heads=params.q_heads, kv_heads=params.kv_heads,
        head_dim=params.head_dim, v_dim=params.value_dim, page_size=params.page_size,
        max_pages=cache.block_ids.shape[1], num_new_tokens=params.num_new_tokens,
        quant_type=1 if params.dtype == "fp8" else -1, window=params.window is not None,
        logit_cap=params.logit_cap is not None, sinks=params.sinks, return_lse=True, dynamic=dynamic,
    )  # fmt: skip
    chosen = replace(choose.choose(key), **plan_fields)
    assert chosen.backend == "sm90" and choose.is_legal(chosen, key) is None
    out = torch.full((*inputs.q.shape[:2], params.value_dim), float("nan"), dtype=torch.bfloat16)
    layout = launch.Layout(
        inputs.q.stride()[:2], cache.kcache.stride()[:3], cache.vcache.stride()[:3], out.stride()[:2], key.max_pages,
        (0, 0) if inputs.qscale is None else inputs.qscale.stride()[:2], (0, 0, 0), 1, cache.kcache.shape[0],
    )  # fmt: skip
    call = launch.Call(key, chosen, 0, layout, params.window)
    signature = call.signature + bool(fields.get("foreign"))
    words = plan.build_task_map(
        params.total_lens, sms=sms, num_kv_heads=params.kv_heads, num_new_tokens=params.num_new_tokens, sig=signature,
        min_process_len=128, max_num_batch=key.batch, window=params.window,
    )  # fmt: skip
    task_map = torch.tensor(words, dtype=torch.int32) if dynamic else None
    tensors = (
        inputs.q, cache.kcache, cache.vcache, cache.block_ids, inputs.seq_lens, task_map, inputs.qscale, inputs.kscale,
        inputs.vscale, inputs.sinks, out, torch.full(out.shape[:2], float("nan")),
        torch.full((max(call.words, 1),), float("nan")),
    )  # fmt: skip
    expected, expected_lse = cases.reference(inputs)
    worst: dict[str, Any] = {"nan": 0, "rms": 0.0, "max": 0.0, "lse": 0.0, "same": True}
    first = None
    for got, lse in run(call, tensors, params.logit_cap):
        error = got.double() - expected
        live = expected_lse.isfinite()
        worst["nan"] += int(got.isnan().sum())
        worst["rms"] = max(worst["rms"], float(error.norm() / expected.norm()))
        worst["max"] = max(worst["max"], float(error.abs().max() / expected.abs().max()))
        worst["lse"] = max(worst["lse"], float((lse.double() - expected_lse)[live].abs().max()))
        worst["same"] &= first is None or bool(torch.equal(got, first))
        first = got
    tolerance = cases.tolerance(params)
    return {**worst, "rows": got.numel(), "rms_limit": tolerance.rms, "max_limit": tolerance.max}


def run(call: Any, tensors: tuple[Any, ...], cap: float | None) -> Any:
    """Compile the call's kernels and yield (output, lse) of each of two runs over the same memory."""
    import random

    import torch
    from ptx_machine import Program
    from ptx_rows import RowsBlock
    from run_router import Memory

    steps = recorded(call, tensors, cap)
    memory = Memory()
    q, k, _, *rest = tensors
    at = {id(t): memory.put(t) for t in (q, *rest) if t is not None}
    clean = memory.bytes.copy()
    out, lse, part = rest[-3:]
    kept = [t for t in (rest[2],) if t is not None]
    for turn in range(2):
        state = [memory.get(at[id(t)], t) for t in kept]
        memory.bytes[:] = clean  # outputs and partials are NaN again; the task map stays as the call left it
        for tensor, value in zip(kept, state, strict=True):
            raw = value.view(torch.uint8).numpy().reshape(-1)
            memory.bytes[at[id(tensor)] : at[id(tensor)] + raw.size] = raw
        for text, grid, given in steps:
            program = Program(text)
            parameters, maps = bind(text, given, at, part)
            order = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
            random.Random(turn).shuffle(order)
            for block in order:
                cta = RowsBlock(program, parameters, memory.bytes, block, grid, maps)
                cta.elements_per_box = min(k.shape[3], 128 // k.element_size())
                cta.run()
        yield memory.get(at[id(out)], out), memory.get(at[id(lse)], lse)


def recorded(
    call: Any, tensors: tuple[Any, ...], cap: float | None
) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """(PTX, grid, arguments) of each launch."""
    import triton

    from hpc.common.launch import Kernel
    from hpc.common.offline import compiling_for

    texts: list[str] = []
    launches: list[tuple[Any, tuple[Any, ...]]] = []
    first_call = Kernel._first_call

    def listener(*, metadata_group: dict[str, str], **_: Any) -> None:
        texts.extend(Path(path).read_text() for file, path in metadata_group.items() if file.endswith(".ptx"))

    def record(self: Any, grid: Any, args: tuple[Any, ...]) -> None:
        launches.append((grid, args))
        first_call(self, grid, args)

    with (
        compiling_for("sm90"),
        mock.patch.object(triton.knobs.compilation, "listener", listener),
        mock.patch.object(Kernel, "_first_call", record),
    ):
        call.launch(0, tensors, call.default_scale, 1.0 if cap is None else cap)
    return [(text, *launched) for text, launched in zip(texts, launches, strict=True)]


def bind(
    text: str, given: tuple[Any, ...], at: dict[int, int], part: Any
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Numbers of the kernel's parameters -> values, and of its tensor maps -> (bytes, tokens, bytes of a box row)."""
    import torch

    declared = re.findall(r"\.param (.*?) \S*_param_(\d+)(\[128\])?", text)
    parameters: dict[int, Any] = {}
    maps: dict[int, Any] = {}
    number = 0
    for value in given:
        if hasattr(value, "block_shape"):  # a tensor descriptor: the map, four sizes, four strides
            assert declared[number][2], f"parameter {number} is no tensor map"
            bytes_ = value.base.view(torch.uint8).numpy()
            box = value.block_shape
            maps[number] = (bytes_, box[1], box[3] * value.base.element_size())
            number += 9
        elif isinstance(value, torch.Tensor):
            parameters[number] = at.get(id(value), at[id(part)])
            number += 1
        elif isinstance(value, (bool, int, float)) and number < len(declared) - 2:
            if isinstance(value, float) != (".f32" in declared[number][0]):
                raise AssertionError(f"parameter {number}: {declared[number]} for {value}")
            parameters[number] = value if isinstance(value, float) else value % 2**64
            number += 1
    return parameters, maps


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or [*CASES])
