"""The launches of a call for few tokens: gate-up, with block scales quantisation, down with the weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpc.common.launch import Kernel
from hpc.moe import plan
from hpc.moe.validate import Arguments

Launch = Callable[..., None]
ROWS = 4  # of a program of the quantisation


def steps(name: str, key: plan.Key, few: plan.Few, layout: plan.Scratch, first_expert: int, shared: bool,
          stride_out: int, scales: tuple[tuple[int, ...], ...]) -> tuple[Launch, ...]:  # fmt: skip
    """All launches, in order."""
    down = _down(name, key, few, layout, first_expert, shared, stride_out, scales[1])
    up = _gate_up(name, key, few, layout, first_expert, scales[0])
    return (up, _quantise(name, key, layout), down) if key.block_scales else (up, down)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """e4m3 as words of four."""
    return tensor.view(torch.int32)


def _options(warps: int) -> dict[str, Any]:
    return {"num_warps": warps, "maxnreg": min(168, 65536 // (32 * warps) // 8 * 8), "launch_pdl": True}


def _gate_up(name: str, key: plan.Key, few: plan.Few, layout: plan.Scratch, first_expert: int,
             scales: tuple[int, ...]) -> Launch:  # fmt: skip
    from hpc.moe.few import FewUpConfig, _moe_few_up_kernel

    config = FewUpConfig(
        H=key.hidden, I=key.inter, TOP_K=key.top_k, PAIRS=plan.few_pairs(key), WARPS=few.up_warps, DEPTH=few.up_depth,
        BLOCK=key.block_scales, BF16_MUL=key.bf16_mul, PDL=True, ACT=key.activation, LIMIT=key.swiglu_limit or 0.0,
        ALPHA=key.swiglu_alpha or 0.0,
    )  # fmt: skip
    kernel = Kernel(_moe_few_up_kernel, name, **_options(few.up_warps))
    grid = (key.inter // 8, key.pairs, 1)
    fixed = (key.pairs, key.num_experts, first_expert, plan.ceil_div(key.hidden, 128), *scales, config)
    place = layout.parts if key.block_scales else layout.act

    def run(stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor) -> None:
        if kernel.compiled:
            base = scratch.data_ptr()
            tensors = (
                args.x, args.x_scale, args.w13, args.w13_scale, args.act_scale, args.topk_ids, args.topk_scale,
            )  # fmt: skip
            pointers: list[Any] = [base if t is None else t.data_ptr() for t in tensors]
            pointers.append(base + place)
        else:
            floats = scratch.view(torch.float32)
            act = floats[place // 4 :] if key.block_scales else scratch[place:].view(torch.float8_e4m3fn)
            pointers = [
                _words(args.x), floats if args.x_scale is None else args.x_scale, _words(args.w13), args.w13_scale,
                floats if args.act_scale is None else args.act_scale, args.topk_ids, args.topk_scale, act,
            ]  # fmt: skip
        kernel(grid, stream, (*pointers, *fixed))

    return run


def _quantise(name: str, key: plan.Key, layout: plan.Scratch) -> Launch:
    from hpc.moe.quantise import _moe_few_quantise_kernel

    kernel = Kernel(_moe_few_quantise_kernel, name, num_warps=4, launch_pdl=True)
    grid = (plan.ceil_div(key.pairs, ROWS), key.groups, 1)
    fixed = (key.pairs, key.inter, ROWS, True, True)

    def run(stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor) -> None:
        if kernel.compiled:
            base = scratch.data_ptr()
            pointers: tuple[Any, ...] = (base + layout.parts, base + layout.act, base + layout.act_scale)
        else:
            floats = scratch.view(torch.float32)
            pointers = (floats[layout.parts // 4 :], scratch[layout.act :], floats[layout.act_scale // 4 :])
        kernel(grid, stream, (*pointers, *fixed))

    return run


def _down(name: str, key: plan.Key, few: plan.Few, layout: plan.Scratch, first_expert: int, shared: bool,
          stride_out: int, scales: tuple[int, ...]) -> Launch:  # fmt: skip
    from hpc.moe.few_down import FewDownConfig, _moe_few_down_kernel

    parts, units = plan.few_down_cut(key, few)
    config = FewDownConfig(
        H=key.hidden, I=key.inter, TOP_K=key.top_k, PAIRS=plan.few_pairs(key), ROWS=few.down_rows,
        WARPS=few.down_warps, DEPTH=few.down_depth, PARTS=parts, UNITS=units, BLOCK=key.block_scales, SHARED=shared,
        PDL=True,
    )  # fmt: skip
    kernel = Kernel(_moe_few_down_kernel, name, **_options(few.down_warps))
    grid = (key.hidden // few.down_rows, 1, 1)
    sizes = (key.pairs, key.num_experts, first_expert, *scales, key.num_tokens, stride_out)
    lists = ("expert", "start", "rows", "row", "counts")

    def run(stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor) -> None:
        if kernel.compiled:
            base = scratch.data_ptr()
            other: Any = base if args.shared_output is None else args.shared_output.data_ptr()
            pointers: tuple[Any, ...] = (
                base + layout.act, base + layout.act_scale, args.w2.data_ptr(), args.w2_scale.data_ptr(),
                args.topk_ids.data_ptr(), args.topk_scale.data_ptr(), other, out.data_ptr(),
                *(base + getattr(layout, field) for field in lists), base + layout.y,
            )  # fmt: skip
        else:
            words, floats = _words(scratch), scratch.view(torch.float32)
            other = out if args.shared_output is None else args.shared_output
            pointers = (
                words[layout.act // 4 :], floats[layout.act_scale // 4 :], _words(args.w2), args.w2_scale,
                args.topk_ids, args.topk_scale, other, out,
                *(words[getattr(layout, field) // 4 :] for field in lists),
                scratch.view(torch.bfloat16)[layout.y // 2 :],
            )  # fmt: skip
        kernel(grid, stream, (*pointers, *sizes, factor, config))

    return run
