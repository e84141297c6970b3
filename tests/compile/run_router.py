"""Compile the router's kernels for sm_90a and run them on the CPU's PTX machine; a JSON object a case.

Run in a process of its own, without TRITON_INTERPRET: `python run_router.py [name ...]`, names of `CASES`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import workers

SCALE = 1.0 / 256.0

TILE: dict[str, Any] = {"kernel": "tile", "warps": 4, "stages": 3}
# Name -> (m, n, k, parts, plan): more steps than stages, edges in every direction, more units than CTAs.
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "row": (2, 40, 336, 2, {"kernel": "row", "block_m": 2, "block_n": 2, "warps": 4}),
    "row 3 parts": (1, 41, 336, 3, {"kernel": "row", "block_m": 1, "block_n": 1, "warps": 8}),
    "small": (20, 40, 336, 2, {"kernel": "small", "block_m": 8, "block_n": 16, "warps": 4, "chunks": 3}),
    "small 3 parts": (
        20, 40, 336, 3, {"kernel": "small", "block_m": 16, "block_n": 16, "splits": 2, "warps": 8, "chunks": 1},
    ),
    "tile 64x32": (70, 40, 832, 2, {**TILE, "block_m": 64, "block_n": 32}),
    "tile 64x32 in splits": (70, 40, 832, 2, {**TILE, "block_m": 64, "block_n": 32, "splits": 2}),
    "tile 64x96": (64, 96, 512, 2, {**TILE, "block_m": 64, "block_n": 96}),
    "tile 128x64": (150, 100, 640, 2, {**TILE, "block_m": 128, "block_n": 64, "warps": 8}),
    "tile 128x128": (130, 136, 448, 2, {**TILE, "block_m": 128, "block_n": 128, "warps": 8}),
    "tile 64x32 3 parts": (70, 40, 1344, 3, {**TILE, "block_m": 64, "block_n": 32}),
    "tile 64x64 3 parts in splits": (70, 70, 1344, 3, {**TILE, "block_m": 64, "block_n": 64, "splits": 2}),
    "tile 128x64 3 parts": (130, 70, 704, 3, {**TILE, "block_m": 128, "block_n": 64, "warps": 8}),
    "block 16x32": (20, 40, 100, 2, {"kernel": "block", "block_m": 16, "block_n": 32}),
    "block 64x64 3 parts": (
        70, 70, 100, 3, {"kernel": "block", "block_m": 64, "block_n": 64, "splits": 2, "warps": 8},
    ),
}  # fmt: skip
# Model -> splits of the product in front of the choice.
MODELS = {"DeepSeek-V3": 2, "Hy3": 1, "Qwen3-235B": 4, "LongCat-Flash": 2}
CTAS = 3  # of the tile kernel


def main(names: list[str]) -> None:
    workers.print_each(run_case, names)


class Memory:
    """Global memory of the machine: tensors at multiples of 4 KiB, the last of them the one read back."""

    def __init__(self) -> None:
        import numpy as np

        self.bytes = np.zeros(64 << 20, np.uint8)
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


def compiled(job: tuple[str, int, int, int], terms: int, plan: Any) -> dict[str, str]:
    """Kernel -> PTX of the launches of one call."""
    import triton

    from hpc.common.offline import compiling_for
    from hpc.gemm.router import plan as plans
    from hpc.gemm.router import warm

    texts: dict[str, str] = {}

    def listener(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        (ptx,) = (Path(path) for file, path in metadata_group.items() if file.endswith(".ptx"))
        texts[src.fn.__name__] = ptx.read_text()

    key = plans.Key("", True, 132, *job[1:], terms)
    assert plans.is_legal(plan, key) is None, plans.is_legal(plan, key)
    with compiling_for("sm90"), mock.patch.object(triton.knobs.compilation, "listener", listener):
        warm.launch_job(job, key, plan)
    return texts


def run_case(name: str) -> dict[str, Any]:
    """One product, or for a model's name its expert choice, on random inputs."""
    import torch
    import triton

    torch.set_num_threads(1)
    result = choose(name) if name in MODELS else multiply(name)
    return {"name": name, "triton": triton.__version__, **result}


def multiply(name: str) -> dict[str, Any]:
    import torch

    from hpc.gemm.router.plan import Plan
    from hpc.gemm.router.reference import split_reference

    m, n, k, terms, fields = CASES[name]
    plan = Plan(**fields)
    generator = torch.Generator().manual_seed(len(name))
    x = torch.randn(m, k, generator=generator).bfloat16()
    weight = torch.randn(n, k, generator=generator) * 0.02
    parts = split_reference(weight, SCALE, terms)
    texts = compiled(("", m, n, k), terms, plan)
    memory = Memory()
    out = torch.full((m, n), float("nan"))
    partial = torch.full((plan.splits, m, n), float("nan"))
    at = memory.put(partial)
    product(texts, plan, x, parts if terms == 3 else (*parts, parts[1]), n, memory, at)
    if plan.splits > 1:
        from ptx_machine import launch

        total = memory.put(out)
        count, block = m * n, 128
        parameters = dict(enumerate((at, total, m, n, plan.splits, n)))
        launch(texts["_router_sum_kernel"], (-(-count // block), 1, 1), parameters, memory.bytes)
        at = total
    got, want = memory.get(at, out).double(), x.double() @ weight.double().T
    return {
        "nan": int(got.isnan().sum()),
        "rms": float((got - want).norm() / want.norm()),
        "max": float((got - want).abs().max() / want.abs().max()),
    }


def product(texts: dict[str, str], plan: Any, x: Any, parts: Any, n: int, memory: Memory, out: int) -> None:
    """Run the product's kernel; `out` is the address of the output or of the partials."""
    import torch
    from ptx_machine import launch

    from hpc.gemm.router.plan import BLOCK_K, ceil

    m, k = x.shape
    ptx = texts[f"_router_{plan.kernel}_kernel"]
    if plan.kernel == "tile":
        words = [tensor.view(torch.uint16).numpy() for tensor in (x, *parts)]
        rows = (plan.block_m, *(plan.pieces[1] or plan.pieces[0],) * 3)
        declared = re.findall(r"\.param (.*?) \S*_param_(\d+)(\[128\])?", ptx)
        numbers = [int(number) for _, number, is_map in declared if is_map]
        units = ceil(n, plan.block_n) * ceil(m, plan.block_m) * plan.splits
        arguments = (out, units, m, n, k, plan.splits, n, SCALE)
        first = len(declared) - len(arguments) - 2  # two pointers for scratch come last
        parameters = {first + i: argument for i, argument in enumerate(arguments)}
        maps = dict(zip(numbers, zip(words, rows, strict=True), strict=True))
        launch(ptx, (min(units, CTAS), 1, 1), parameters, memory.bytes, maps)
        return
    pointers = (*(memory.put(tensor) for tensor in (x, *parts)), out)
    strides = (k, k, k, k, n)
    if plan.kernel == "row":
        grid, numbers_ = (ceil(n, plan.block_n), 1, 1), (m, n, k)
    elif plan.kernel == "small":
        grid = (ceil(n, plan.block_n) * ceil(m, plan.block_m) * plan.splits, 1, 1)
        numbers_ = (m, n, k, plan.splits)
    else:
        grid = (ceil(n, plan.block_n) * ceil(m, plan.block_m), 1, plan.splits)
        numbers_ = (m, n, k, ceil(ceil(k, BLOCK_K), plan.splits))
    launch(ptx, grid, dict(enumerate((*pointers, *numbers_, *strides, SCALE))), memory.bytes)


def choose(model: str) -> dict[str, Any]:
    import torch
    from ptx_machine import launch

    from hpc.gemm.router import cases_topk
    from hpc.gemm.router.plan import Plan
    from hpc.gemm.router.reference import topk_reference

    experts, _, top_k, options, has_bias = cases_topk.ROUTERS[model]
    tokens, rows, splits, hidden = 3, 2, MODELS[model], 128
    plan = Plan("small", 8, 16, splits, 4 // splits or 1, 1)
    text = compiled((model, tokens, experts, hidden), 2, plan)["_router_topk_kernel"]
    generator = torch.Generator().manual_seed(len(model))
    partial = torch.randn(splits, tokens, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) * 0.05 if has_bias else None
    memory = Memory()
    weights, ids = (
        torch.full((tokens, top_k), float("nan")),
        torch.full((tokens, top_k), -7, dtype=torch.int32),
    )
    zero = torch.full((tokens,), float("nan"))
    at = [memory.put(tensor) for tensor in (weights, ids, zero)]
    part = memory.put(partial)
    pointers = (part, part if bias is None else memory.put(bias), *at)
    parameters = dict(
        enumerate((*pointers, tokens, experts, splits, rows, float(options.get("routed_scaling", 1.0))))
    )
    launch(text, (-(-tokens // rows), 1, 1), parameters, memory.bytes)
    want = topk_reference(partial.sum(0).double(), top_k, bias=bias, **options)
    got = [memory.get(place, like) for place, like in zip(at, (weights, ids, zero), strict=True)]
    pairs = [(got[0], want[0]), *([(got[2], want[2])] if options.get("num_zero_experts") else [])]
    return {
        "ids": got[1].tolist() == want[1].tolist(),
        "max": max(float(((a - b).abs() / b.abs().clamp(min=1e-6)).max()) for a, b in pairs),
    }


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or [*CASES, *MODELS])
