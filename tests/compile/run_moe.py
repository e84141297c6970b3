"""Compile the fused MoE's products for sm_90a and run them on the CPU's PTX machine; a JSON object a case.

Run in a process of its own, without TRITON_INTERPRET: `python run_moe.py [name ...]`, names of `CASES`.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import workers

PROGRAMS = 3  # of the products: more items than programs, and items cut between them

# Name -> (tokens, experts, hidden, inter, block scales, tile, boxes, warps, producer warps, shared order).
CASES: dict[str, tuple[int, int, int, int, bool, int, int, int, int, bool]] = {
    "tensor cut": (9, 3, 512, 192, False, 8, 2, 4, 1, False),
    "block cut": (9, 3, 512, 192, True, 8, 2, 4, 1, False),
    "tensor in turn": (9, 3, 384, 128, False, 8, 1, 4, 2, True),
    "block in turn": (9, 3, 384, 128, True, 8, 1, 4, 2, True),
    "tensor I = 80, H = 192": (9, 3, 192, 80, False, 16, 2, 4, 2, False),
    "block H = 192": (9, 3, 192, 64, True, 16, 2, 4, 2, False),
    "block tile 64": (40, 2, 256, 128, True, 64, 1, 8, 4, False),
    "tensor fresh 64": (9, 3, 512, 64, False, 8, 2, 4, 1, False),
    "tensor fresh 128": (9, 3, 512, 64, False, 8, 2, 4, 1, False),
    "tensor fresh 32": (9, 3, 512, 64, False, 8, 2, 4, 1, False),
    "block fresh 32": (9, 3, 384, 128, True, 32, 2, 4, 4, False),
    "tensor tile 128": (70, 2, 256, 64, False, 128, 1, 8, 4, False),
    # 128 rows for two warpgroups, then 22 for the first alone
    "tensor pair fresh 64": (150, 2, 256, 80, False, 128, 1, 8, 4, True),
    "tensor pair fresh 128": (150, 2, 384, 192, False, 128, 1, 8, 4, True),
    "block pair fresh 64": (150, 2, 320, 192, True, 128, 1, 8, 4, True),
    "block pair fresh 128": (150, 2, 320, 128, True, 128, 1, 8, 4, True),
    "block pair, one block fresh 64": (70, 1, 64, 64, True, 128, 1, 8, 4, True),
    "tensor 3 tiles cut": (17, 4, 512, 128, False, 8, 2, 4, 1, False),
    "block 3 tiles cut": (17, 4, 512, 192, True, 8, 2, 4, 1, False),
    "tensor 3 tiles in turn": (17, 4, 384, 128, False, 8, 1, 4, 2, True),
    "block 3 tiles in turn": (17, 4, 384, 192, True, 8, 1, 4, 2, True),
    "tensor 2 tiles among many": (9, 10, 512, 128, False, 8, 2, 4, 1, False),
    "tensor pair 3 tiles fresh 128": (257, 2, 128, 192, False, 128, 1, 8, 4, True),
}
# The two kernels for a handful of tokens: (tokens, experts, hidden, inter, block scales).
TINY: dict[str, tuple[int, int, int, int, bool]] = {
    "tiny tensor": (2, 3, 256, 48, False),
    "tiny block": (2, 3, 256, 144, True),
}
# The portable products with the parts that only they have: fields of `MoeCase`.
PORTABLE: dict[str, dict[str, Any]] = {
    "portable bf16": {"bf16_weights": True, "bias": "bfloat16", "weight_on_input": True, "no_combine": True},
    "portable dynamic": {
        "static": False, "bf16_input": True, "bias": "float32", "swiglu_alpha": 1.702, "swiglu_limit": 0.7,
        "no_combine": True,
    },
}  # fmt: skip


def main(names: list[str]) -> None:
    workers.print_each(run_case, names)


class Memory:
    """Global memory of the machine: tensors at multiples of 4 KiB."""

    def __init__(self) -> None:
        import numpy as np

        self.bytes = np.zeros(16 << 20, np.uint8)
        self.end = 4096

    def put(self, tensor: Any) -> int:
        """Address of a copy."""
        import torch

        stored = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        address = self.end
        self.bytes[address : address + stored.size] = stored
        self.end = address + -(-stored.size // 4096) * 4096
        return address

    def get(self, address: int, like: Any) -> Any:
        import torch

        count = like.numel() * like.element_size()
        return (
            torch.from_numpy(self.bytes[address : address + count].copy()).view(like.dtype).view(like.shape)
        )


def compiled(params: Any, chosen: Any) -> dict[str, str]:
    """Kernel -> PTX of the launches of one call."""
    import triton

    from hpc.moe import warm

    texts: dict[str, str] = {}

    def listener(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        (ptx,) = (Path(path) for file, path in metadata_group.items() if file.endswith(".ptx"))
        texts[src.fn.__name__] = ptx.read_text()

    with mock.patch.object(triton.knobs.compilation, "listener", listener):
        warm.compile_shape(params, "sm90", chosen)
    return texts


def index_of(ids: Any, experts: int, tile: int) -> dict[str, Any]:
    """The tile list as the index build makes it."""
    import torch

    from hpc.moe import order

    flat = ids.flatten().long()
    pair = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    tiles, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        tiles += [(expert, start + first, min(tile, count - first)) for first in range(0, count, tile)]
        start += count
    columns = [torch.tensor(column, dtype=torch.int32) for column in zip(*tiles, strict=True)]
    named = dict(zip(("expert", "start", "rows"), columns, strict=True))
    live = [(expert, -(-count // tile)) for expert, count in enumerate(counts.tolist()) if count]
    words = [order.pack(expert, index, count) for expert, count in live for index in range(count)]
    named["expert"] = torch.tensor(words, dtype=torch.int32)
    number = torch.tensor([len(tiles), order.in_turn(words, len(live))], dtype=torch.int32)
    return {**named, "num_tiles": number, "pair": pair.to(torch.int32)}


def routing(name: str, ids: Any) -> Any:
    """Ids of a case whose name says how many tiles an expert has; any others are as given."""
    import torch

    if "3 tiles" in name:  # of expert 1; one each of the last two, none of the first
        ids = torch.ones_like(ids)
        if "pair" not in name:
            ids[:8, 1], ids[8:16, 1] = 2, 3
        else:
            ids[:100, 1] = 0
    elif "2 tiles" in name:  # of the first expert, one of each other
        ids = torch.stack([torch.zeros(9), torch.arange(1, 10)], 1).to(ids.dtype)
    return ids


def run_case(name: str) -> dict[str, Any]:
    """Both products on random inputs: activations and results of all pairs against float64."""
    import torch
    import triton

    from hpc.moe import cases, plan
    from hpc.moe.case_lists import MoeCase

    torch.set_num_threads(1)
    if name in PORTABLE:
        return {"name": name, "triton": triton.__version__, **portable(name)}
    if name in TINY:
        return {"name": name, "triton": triton.__version__, **tiny(name)}
    tokens, experts, hidden, inter, block, tile, boxes, warps, producers, in_turn = CASES[name]
    params = MoeCase(tokens, experts, hidden, inter, top_k=2, block=block)
    inputs = cases.make_inputs(params, "cpu", len(name))
    inputs = replace(inputs, topk_ids=routing(name, inputs.topk_ids))
    key = replace(cases.key_of(inputs), sm90=True, hardware_fp8=True)
    fresh = int(name.rsplit(" ", 1)[1]) if "fresh" in name else 128 if block else 256
    pair = "pair" in name
    up = plan.Product(128, boxes, 3, warps, producers, 1, in_turn, fresh, pair)
    box = 64 if 0 < inter % 128 <= 64 else 128
    boxes = 1 if block or box == 128 or pair else 2
    down = plan.Product(box, boxes, 2, warps, 1, 1, in_turn, pair=pair)
    chosen = plan.Plan("sm90", tile, 16, True, up, down)
    assert plan.is_legal(chosen, key) is None, plan.is_legal(chosen, key)
    texts = compiled(params, chosen)
    memory, index = Memory(), index_of(inputs.topk_ids, experts, tile)
    places = {field: memory.put(tensor) for field, tensor in index.items()}
    act, a_scale, a_codes = gate_up(texts, inputs, key, chosen, index, places, memory)
    y = down_product(texts, inputs, key, chosen, index, places, memory, a_codes, a_scale)
    return {"name": name, "triton": triton.__version__, **errors(inputs, index, act, a_scale, a_codes, y)}


def kind(product: Any) -> str:
    """Which of the kernels, as their names say it."""
    return "pair" if product.pair else "sm90"


def numbers(ptx: str, count: int) -> tuple[list[int], int]:
    """(parameters that are tensor maps, the first of the last `count` arguments)."""
    declared = re.findall(r"\.param (.*?) \S*_param_(\d+)(\[128\])?", ptx)
    return [int(number) for _, number, is_map in declared if is_map], len(
        declared
    ) - count - 2  # two scratch pointers


def gate_up(
    texts: Any, inputs: Any, key: Any, chosen: Any, index: Any, places: Any, memory: Memory
) -> tuple[Any, Any, Any]:
    """(row stride, scales, codes) of the activations, all poisoned before."""
    import torch
    from ptx_moe import launch

    ptx = texts[f"_moe_gate_up_{kind(chosen.up)}_kernel"]
    stride = -(-key.inter // 16) * 16
    codes = torch.full((key.pairs, stride), 0x7F, dtype=torch.uint8)
    scales = torch.full((key.groups, key.pairs), torch.nan)
    halves = 2 if key.block_scales else 1
    counters = memory.put(torch.zeros(4096, dtype=torch.int32))
    parts = memory.put(torch.full((2 * PROGRAMS * halves, 128 * chosen.tile), torch.nan))
    at = memory.put(codes), memory.put(scales)
    zero = torch.zeros(1)
    pointers = [
        memory.put(zero if t is None else t)
        for t in (inputs.x, inputs.x_scale, inputs.w13_scale, inputs.act_scale)
    ]
    lists = [places[name] for name in ("expert", "start", "rows", "num_tiles", "pair")]
    cols = inputs.w13_scale.shape[2] if key.block_scales else 1
    rows = inputs.w13_scale.shape[1] if key.block_scales else 1
    arguments = (
        *pointers,
        *lists,
        counters,
        parts,
        *at,
        key.pairs,
        key.top_k,
        stride,
        -(-key.hidden // 128),
        rows,
        cols,
    )
    (number,), first = numbers(ptx, len(arguments))
    view = (
        inputs.w13.view(torch.uint8)
        .view(key.num_experts, 2, key.inter // 8, 8, key.hidden)
        .permute(0, 2, 1, 3, 4)
    )
    maps = {number: (view.numpy(), (1, 16 if chosen.up.pair else 8, 2, 8, 128))}
    order = [2, 0, 1] if not chosen.up.shared_order else None  # the last to arrive is not the last by number
    boxes = launch(
        ptx, (PROGRAMS, 1, 1), {first + i: a for i, a in enumerate(arguments)}, memory.bytes, maps, order
    )
    check_boxes(boxes, number, up_boxes(key, chosen.up, index))
    return stride, memory.get(at[1], scales), memory.get(at[0], codes)


def down_product(texts: Any, inputs: Any, key: Any, chosen: Any, index: Any, places: Any, memory: Memory, codes: Any,
                 a_scale: Any) -> Any:  # fmt: skip
    """y [pairs, H], poisoned before."""
    import torch
    from ptx_moe import launch

    ptx = texts[f"_moe_down_{kind(chosen.down)}_kernel"]
    y = torch.full((key.pairs, key.hidden), torch.nan, dtype=torch.bfloat16)
    out = memory.put(y)
    lists = [places[name] for name in ("expert", "start", "rows", "num_tiles", "pair")]
    rows, cols = inputs.w2_scale.shape[1:] if key.block_scales else (1, 1)
    arguments = (memory.put(inputs.w2_scale), memory.put(a_scale), *lists, out, key.pairs, rows, cols)
    (w_number, a_number), first = numbers(ptx, len(arguments))
    box = chosen.down.box
    maps = {
        w_number: (inputs.w2.view(torch.uint8).numpy(), (1, 256 if chosen.down.pair else 128, box)),
        a_number: (codes[:, : key.inter].numpy(), (chosen.tile, box)),
    }
    boxes = launch(ptx, (PROGRAMS, 1, 1), {first + i: a for i, a in enumerate(arguments)}, memory.bytes, maps)
    check_boxes(boxes, w_number, down_boxes(key, chosen.down, index))
    return memory.get(out, y)


def check_boxes(found: Any, number: int, expected: Any) -> None:
    """The programs brought these boxes of weights, in this order."""
    for program, boxes in found.items():
        corners = [corner for of, *corner in boxes if of == number]
        assert corners == expected(program), (program, corners, expected(program))


def up_boxes(key: Any, product: Any, index: Any) -> Any:
    """Corners of a program's boxes of w13: `order` says which items it takes, wholly or in part."""
    from hpc.moe import order

    words = index["expert"].tolist()
    halves = 2 if key.block_scales and not product.pair else 1
    wide = 16 if key.block_scales or product.pair else 8
    blocks, units = -(-key.inter // (8 * wide)), -(-key.hidden // (128 * product.boxes))
    items = len(words) * blocks

    def of(program: int) -> list[list[int]]:
        runs = order.stages(program, PROGRAMS, items, units * halves, bool(index["num_tiles"][1]))
        if product.shared_order:
            runs = ((item, 0, units * halves) for item in range(program, items, PROGRAMS))
        corners = []
        for item, begin, end in runs:
            tile, block = divmod(item, blocks) if product.pair else order.place(item, blocks, words)
            for unit in range(begin, end):
                half, k = divmod(unit, units)
                corners += [[order.unpack(words[tile])[0], block * wide + half * 8, 0, 0, 128 * (k * product.boxes + j)]
                            for j in range(product.boxes)]  # fmt: skip
        return corners

    return of


def down_boxes(key: Any, product: Any, index: Any) -> Any:
    """Corners of a program's boxes of w2."""
    from hpc.moe import order

    words, columns = index["expert"].tolist(), 256 if product.pair else 128
    blocks = -(-key.hidden // columns)
    items, count = len(words) * blocks, -(-key.inter // (product.box * product.boxes)) * product.boxes

    def of(program: int) -> list[list[int]]:
        run = range(program * items // PROGRAMS, (program + 1) * items // PROGRAMS)
        if product.shared_order or index["num_tiles"][1]:
            run = range(program, items, PROGRAMS)
        places = [divmod(item, blocks) if product.pair else order.place(item, blocks, words) for item in run]
        return [
            [order.unpack(words[tile])[0], block * columns, k * product.box]
            for tile, block in places for k in range(count)
        ]  # fmt: skip

    return of


def errors(inputs: Any, index: Any, stride: int, a_scale: Any, codes: Any, y: Any) -> dict[str, Any]:
    """Codes that differ from float64's, by how many steps at most, and the error of y computed from the codes."""
    import torch

    from hpc.moe.reference import activation, expand_blocks, requantise, to_bf16

    params = inputs.params
    inter, block = params.inter, params.block
    x = inputs.x.double()
    if block:
        x = x * inputs.x_scale.double().repeat_interleave(128, 1)[:, : params.hidden]
    got_y, want_y, flips, far = [], [], 0, 0.0
    for row, pair in enumerate(index["pair"].tolist()):
        expert = int(inputs.topk_ids.view(-1)[pair])
        w13, w2 = inputs.w13[expert].double(), inputs.w2[expert].double()
        if block:
            w13 = w13 * expand_blocks(inputs.w13_scale[expert].double(), 2 * inter, params.hidden)
            w2 = w2 * expand_blocks(inputs.w2_scale[expert].double(), params.hidden, inter)
        h = x[pair // params.top_k] @ w13.T * (1.0 if block else inputs.w13_scale[expert].double())
        h = to_bf16(h)[None]
        value = activation(h[:, :inter], h[:, inter:], params.bf16_mul and not block)
        want, scale = requantise(value, inputs.act_scale)
        a = codes[row, :inter].view(torch.float8_e4m3fn).double()
        different = (a != want[0]).nonzero().flatten()
        flips += len(different)
        for i in different.tolist():
            far = max(far, float((a[i] - want[0, i]).abs() / want[0, i].abs().clamp_min(2.0**-6)))
        if scale is not None:
            kernel = a_scale[:, row].double().repeat_interleave(128)[:inter]
            far = max(far, float(((kernel - scale[0]) / scale[0]).abs().max()) * 100)
            a = a * kernel
        result = a @ w2.T * (1.0 if block else inputs.w2_scale[expert].double())
        want_y.append(result)
        got_y.append(y[pair].double())
    got, wanted = torch.stack(got_y), torch.stack(want_y)
    return {
        "flips": flips / codes[:, :inter].numel(),
        "far": far,
        "nan": int(got.isnan().sum()),
        "rms": float((got - wanted).norm() / wanted.norm()),
    }


def tiny(name: str) -> dict[str, Any]:
    """The whole layer, with an id of nobody, a weight of 0, a factor and a shared output."""
    import torch
    from ptx_moe import launch

    from hpc.moe import cases, plan
    from hpc.moe.case_lists import MoeCase

    tokens, experts, hidden, inter, block = TINY[name]
    params = MoeCase(tokens, experts, hidden, inter, top_k=4, block=block, shared=True, factor=1.5)
    inputs = cases.make_inputs(params, "cpu", len(name))
    inputs.topk_ids[0, 1], inputs.topk_ids[1, 2] = -1, 7
    inputs.topk_scale[0, 1] = torch.nan
    inputs.topk_scale[0, 2] = 0.0
    sizes = plan.Tiny(4, 128, 2, 32, 4)
    texts = compiled(params, plan.Plan("tiny", 16, 16, True, tiny=sizes))
    memory, pairs = Memory(), 4 * tokens
    zero = torch.zeros(1)
    put = {field: memory.put(zero if tensor is None else tensor) for field, tensor in vars(inputs).items()
           if isinstance(tensor, torch.Tensor) or tensor is None}  # fmt: skip
    act = memory.put(torch.full((pairs, inter), 0x7F, dtype=torch.uint8))
    if block:
        act = memory.put(torch.full((pairs, inter), torch.nan))
    out = torch.full((tokens, hidden), torch.nan, dtype=torch.bfloat16)
    at = memory.put(out)
    (rows, cols), (rows2, cols2) = (
        tuple(s.shape[1:]) if block else (1, 1) for s in (inputs.w13_scale, inputs.w2_scale)
    )
    up = (put["x"], put["x_scale"], put["w13"], put["w13_scale"], put["act_scale"], put["topk_ids"], act, experts, 0,
          -(-hidden // 128), rows, cols)  # fmt: skip
    down = (act, put["w2"], put["w2_scale"], put["topk_ids"], put["topk_scale"], put["shared_output"], at, experts, 0,
            rows2, cols2, hidden, params.factor)  # fmt: skip
    grids = ((inter // sizes.up_rows, pairs, 1), (hidden // sizes.down_cols, tokens, 1))
    for kernel, grid, arguments in zip(("up", "down"), grids, (up, down), strict=True):
        ptx = texts[f"_moe_tiny_{kernel}_kernel"]
        given = [a for a, kept in zip(arguments, kept_arguments(kernel, arguments), strict=True) if kept]
        _, first = numbers(ptx, len(given))
        assert first == 0, (kernel, first, given)
        launch(ptx, grid, dict(enumerate(given)), memory.bytes, {})
    got, want = memory.get(at, out).double(), cases.reference(inputs)
    return {
        "flips": 0.0,
        "far": 0.0,
        "nan": int(got.isnan().sum()),
        "rms": float((got - want).norm() / want.norm()),
    }


def portable(name: str) -> dict[str, Any]:
    """Both products, uncombined: y of every pair, tails along H and I."""
    import torch
    from ptx_moe import launch

    from hpc.moe import cases, plan
    from hpc.moe.case_lists import MoeCase
    from hpc.moe.reference import quantise_input
    from hpc.moe.scratch import block_sizes

    params = MoeCase(9, 3, 192, 80, top_k=2, **PORTABLE[name])
    inputs = cases.make_inputs(params, "cpu", len(name))
    key = cases.key_of(inputs)
    texts = compiled(params, plan.Plan("portable", 16, 16, True))
    x, x_scale = (inputs.x, None) if params.bf16_weights else quantise_input(inputs.x, None)
    memory, zero = Memory(), torch.zeros(1)
    index = index_of(inputs.topk_ids, params.experts, 16)
    lists = [memory.put(index[field]) for field in ("expert", "start", "rows", "num_tiles", "pair")]
    a = memory.put(torch.full((key.pairs, key.inter), torch.nan, dtype=torch.bfloat16))
    a_scale = memory.put(torch.full((key.groups, key.pairs), torch.nan))
    y = torch.full((key.pairs, key.hidden), torch.nan, dtype=torch.bfloat16)
    at = memory.put(y)

    def put(*tensors: Any) -> list[int]:
        return [memory.put(zero if tensor is None else tensor) for tensor in tensors]

    scales, blocks = (inputs.w13_scale, inputs.w2_scale), ((), ())
    if key.one_scale:  # as the launch before the products spreads them
        blocks = block_sizes(key)
        scales = tuple(
            scale.view(-1, 1, 1).expand(-1, *size).contiguous()
            for scale, size in zip(scales, blocks, strict=True)
        )
    up = (
        *put(x, x_scale, inputs.w13, scales[0], None, inputs.w13_bias),
        *(put(inputs.topk_scale) if params.weight_on_input else []), *lists, a, a_scale, key.pairs, key.top_k,
        key.hidden, key.inter, key.inter, 2, *(n for n in blocks[0] if n != 1),
    )  # fmt: skip
    down = (a, a_scale, *put(inputs.w2, scales[1], inputs.w2_bias), *lists, at, key.pairs, key.hidden, key.inter,
            key.inter, *(n for n in blocks[1] if n != 1))  # fmt: skip
    for kernel, given in (("gate_up", up), ("down", down)):
        ptx = texts[f"_moe_{kernel}_kernel"]
        _, first = numbers(ptx, len(given))
        assert first == 0, (kernel, first)  # block scales' rows and columns are 1, which Triton builds in
        launch(ptx, (PROGRAMS, 1, 1), dict(enumerate(given)), memory.bytes, {})
    got, want = memory.get(at, y).double(), cases.reference(inputs).flatten(0, 1)
    return {
        "flips": 0.0,
        "far": 0.0,
        "nan": int(got.isnan().sum()),
        "rms": float((got - want).norm() / want.norm()),
    }


def kept_arguments(kernel: str, arguments: tuple[Any, ...]) -> list[bool]:
    """Whether an argument is one of the compiled kernel: Triton builds integers of 1 in, where it may."""
    free = {"up": (7, 8), "down": (7, 8, 12)}[
        kernel
    ]  # num_experts, first_expert, factor are never specialised
    return [i in free or a != 1 or i < 7 for i, a in enumerate(arguments)]


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or [*CASES, *TINY, *PORTABLE])
