"""Compile the SM90 prefill kernels for sm_90a and run them on the CPU's PTX machine; a JSON object a case.

Run in a process of its own, without TRITON_INTERPRET: `python run_prefill.py [name ...]`, names of `CASES`. Every load
and store of global memory has to lie in a tensor of the call.
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import workers

CTAS = 3  # fewer than tiles: a CTA takes several

# Name -> (fields of the inputs, fields of the plan, whether each CTA places its own tile). With `splits` in the plan a
# second kernel joins.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "fp8": ({"lens": ((20, 150), (3, 40)), "heads": (4, 1)}, {}, False),
    "bf16": ({"lens": ((70, 200), (128, 128), (130, 140)), "heads": (2, 1), "dtype": "bf16"}, {}, False),
    "bf16 no overlap": ({"lens": ((70, 200), (3, 40)), "heads": (2, 1), "dtype": "bf16"}, {"overlap": False}, False),
    "fp8 window, page 16": ({"lens": ((40, 300), (9, 9)), "heads": (4, 1), "window": 100, "page_size": 16}, {}, False),
    "fp8 window, cap, sinks, page 32": (
        {"lens": ((40, 300), (9, 9)), "heads": (4, 2), "window": 150, "page_size": 32, "logit_cap": 5.0, "sinks": True},
        {}, False),
    "bf16 no overlap, window, page 16": (
        {"lens": ((40, 300), (9, 9)), "heads": (4, 1), "dtype": "bf16", "window": 100, "page_size": 16},
        {"overlap": False}, False),
    "fp8 short": ({"lens": ((9, 140), (0, 5)), "heads": (4, 1), "extra_rows": 3}, {}, True),
    "fp8 three stages": ({"lens": ((20, 300), (9, 9)), "heads": (4, 1)}, {"stages": 3}, False),
    "bf16 window, cap, sinks, page 16": (
        {"lens": ((40, 300), (9, 9)), "heads": (4, 1), "dtype": "bf16", "window": 100, "page_size": 16,
         "logit_cap": 5.0, "sinks": True},
        {"pack": 4}, False),
    "bf16 d64": ({"lens": ((70, 400), (3, 40)), "heads": (2, 1), "dtype": "bf16", "head_dim": 64}, {}, False),
    "bf16 one block a tile": ({"lens": ((9, 9), (5, 70)), "heads": (4, 1), "dtype": "bf16"}, {}, False),
    "bf16 short": ({"lens": ((20, 150), (0, 5), (3, 0)), "heads": (4, 1), "dtype": "bf16", "extra_rows": 3}, {}, True),
    "bf16 split": (
        {"lens": ((20, 700), (1, 640), (0, 5), (3, 0)), "heads": (4, 1), "dtype": "bf16", "extra_rows": 3},
        {"splits": 4}, True),
    "fp8 split, table": ({"lens": ((20, 700), (1, 640), (3, 0)), "heads": (4, 1), "extra_rows": 3}, {"splits": 3},
                         False),
    "fp8 split": ({"lens": ((20, 700), (1, 640), (0, 5), (3, 0)), "heads": (4, 1), "extra_rows": 3},
                  {"splits": 4}, True),
    "bf16 split, window, sinks, page 16": (
        {"lens": ((40, 600), (9, 6)), "heads": (4, 2), "dtype": "bf16", "window": 420, "page_size": 16, "sinks": True},
        {"splits": 3}, True),
    "fp8 split, window, cap, sinks, page 32": (
        {"lens": ((40, 600), (9, 6)), "heads": (4, 2), "window": 420, "page_size": 32, "logit_cap": 5.0, "sinks": True},
        {"splits": 3}, True),
    "bf16 split, d256": (
        {"lens": ((9, 400), (1, 20)), "heads": (2, 1), "dtype": "bf16", "head_dim": 256}, {"splits": 2}, True),
}  # fmt: skip


def main(names: list[str]) -> None:
    workers.print_each(run_case, names)


def run_case(name: str) -> dict[str, Any]:
    """One call against float64."""
    import torch
    import triton

    from hpc.attention.prefill import cases, plan
    from hpc.attention.prefill.case_lists import PrefillCase

    torch.set_num_threads(1)
    fields, plan_fields, short = CASES[name]
    fields = {"dtype": "fp8", **fields}
    params = PrefillCase(fields.pop("lens"), *fields.pop("heads"), **fields)
    inputs = cases.make_tensors(params, "cpu", 1)
    out, lse = attend(inputs, plan_fields, short)
    expected, expected_lse = cases.reference(inputs)
    error, live = out.double() - expected, expected_lse.isfinite()
    tolerance = cases.tolerance(params, plan.sm90(cases.key_of(params, True)))
    return {
        "name": name, "triton": triton.__version__, "nan": int(out.isnan().sum()),
        "rms": float(error.norm() / expected.norm()), "max": float(error.abs().max() / expected.abs().max()),
        "lse": float((lse.double() - expected_lse)[live].abs().max()),
        "dead": bool((lse == expected_lse)[~live].all() and (out[~live] == 0).all()),
        "rms_limit": tolerance.rms, "max_limit": tolerance.max,
    }  # fmt: skip


def attend(inputs: Any, plan_fields: dict[str, Any], short: bool) -> tuple[Any, Any]:
    """(output, lse) of one call, both NaN before."""
    import torch

    from hpc.attention.prefill import cases, launch, plan
    from hpc.attention.prefill.validate import Layout

    p = inputs.params
    key = replace(cases.key_of(p, True), return_lse=True, sms=256 if short else CTAS)
    chosen = replace(plan.sm90(key), **plan_fields)
    out = torch.full((*inputs.q.shape[:2], p.head_dim), math.nan, dtype=torch.bfloat16)
    layout = Layout(
        inputs.q.stride()[:2], inputs.k.stride()[:3], inputs.v.stride()[:3], out.stride()[:2], (0, 0, 0), 1,
        inputs.k.shape[0],
    )  # fmt: skip
    call = launch.Call(key, chosen, 0, layout, p.window)
    parts = max(chosen.splits, 1)
    tile_tokens = chosen.short_tokens if short else chosen.tile_tokens
    if parts > 1:
        tile_tokens = chosen.split_tokens
    table, tiles = table_of(inputs, tile_tokens, chosen.block_n)
    if short:
        table.fill_(-(2**31))
    lse = torch.full(out.shape[:2], math.nan)
    scales = (inputs.qscale, inputs.kscale, inputs.vscale)
    tensors = (inputs.q, inputs.k, inputs.v, out, lse, table, inputs.block_ids, *scales, inputs.sinks)
    given = (
        tensors,
        inputs.cu_seqlens,
        inputs.seq_lens,
        tiles,
        call.default_scale,
        p.logit_cap or 1.0,
        short and parts == 1,
        parts,
    )
    with mock.patch.object(plan, "PLACED_REQUESTS", 16 if short else 0):
        return run(call, given)


def table_of(inputs: Any, tile_tokens: int, block_n: int) -> tuple[Any, int]:
    """The tile table and the tiles that it has room for."""
    import torch

    from hpc.attention.prefill import plan

    p = inputs.params
    tiles = plan.bound(p.rows, len(p.lens), tile_tokens)
    words = torch.zeros(plan.HEADER_WORDS + tiles * plan.ENTRY_WORDS, dtype=torch.int32)
    n, keys = ([pair[i] for pair in p.lens] for i in (0, 1))
    entries = plan.tile_table(n, keys, p.rows, tile_tokens, block_n, p.causal, p.window)
    words[0] = len(entries)
    for i, entry in enumerate(entries):
        first = plan.HEADER_WORDS + i * plan.ENTRY_WORDS
        words[first : first + 6] = torch.tensor(entry, dtype=torch.int32)
    return words, tiles


def run(call: Any, given: tuple[Any, ...]) -> tuple[Any, Any]:
    import torch
    from ptx_machine import Program
    from ptx_prefill import PrefillBlock, unfolded
    from run_moe import Memory

    tensors, cu, lens = given[:3]
    memory = Memory()
    at = {id(t): (memory.put(t), t) for t in (*tensors[3:], cu, lens) if t is not None}
    launches = recorded(call, given)
    for _, _, arguments in launches:
        for t in arguments:  # what parts give is the call's own
            if isinstance(t, torch.Tensor) and id(t) not in at:
                at[id(t)] = memory.put(t.fill_(math.nan)), t
    spans = [(first, first + t.numel() * t.element_size()) for first, t in at.values()]
    for text, grid, arguments in launches:
        program = Program(unfolded(text))
        parameters, maps = bind(text, arguments, at, memory)
        for x in range(grid[0]):
            block = PrefillBlock(program, parameters, memory.bytes, (x, 0, 0), grid, maps)
            block.spans = spans
            block.run()
    return tuple(memory.get(at[id(t)][0], t) for t in tensors[3:5])  # type: ignore[return-value]


def no_launch(*args: Any) -> None:
    """In the place of the schedule."""


def recorded(call: Any, given: tuple[Any, ...]) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """(PTX, grid, arguments) of each launch of an attention kernel; the table is there already."""
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
        mock.patch.object(call, "_schedule_kernel", lambda *args: no_launch),
        mock.patch.object(call, "_schedule", no_launch),
    ):
        call.launch(0, *given)
    return [(text, *launched) for text, launched in zip(texts, launches, strict=True)]


def bind(
    text: str, given: tuple[Any, ...], at: dict[int, Any], memory: Any
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Numbers of the kernel's parameters -> values, and of its tensor maps -> (bytes, box in bytes, element size)."""
    import torch

    declared = re.findall(r"\.param (.*?) \S*_param_(\d+)(\[128\])?", text)
    parameters: dict[int, Any] = {}
    maps: dict[int, Any] = {}
    number = 0
    for value in given:
        if number == len(declared) - 2:  # compile-time facts follow, and two scratch pointers in the PTX
            break
        if hasattr(value, "block_shape"):  # a tensor descriptor: the map, its sizes, its strides
            assert declared[number][2], f"parameter {number} is no tensor map"
            maps[number] = described(value, at, memory)
            number += 1 + 2 * len(value.block_shape)
        elif isinstance(value, torch.Tensor):
            parameters[number] = at[id(value)][0]
            number += 1
        elif isinstance(value, (bool, int, float)):
            assert isinstance(value, float) == (".f32" in declared[number][0]), (
                number,
                declared[number],
                value,
            )
            parameters[number] = value if isinstance(value, float) else value % 2**64
            number += 1
    assert number == len(declared) - 2, (number, len(declared))
    return parameters, maps


def described(value: Any, at: dict[int, Any], memory: Any) -> tuple[Any, list[int], int]:
    """A descriptor's tensor as bytes; one that lies in the machine's memory is written there."""
    import torch

    size = value.base.element_size()
    box = [*value.block_shape[:-1], value.block_shape[-1] * size]
    if id(value.base) in at:
        first = at[id(value.base)][0]
        shape = [*value.base.shape[:-1], value.base.shape[-1] * size]
        return memory.bytes[first : first + math.prod(shape)].reshape(shape), box, size
    return value.base.view(torch.uint8).numpy(), box, size


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or [*CASES])
