"""The path of one fused MoE call behind the public functions: signature, checks, plan, output, launch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from hpc.common.errors import fail
from hpc.moe import choose, launch, plan, validate
from hpc.moe.reference import moe_reference
from hpc.moe.scratch import chunk_tokens
from hpc.moe.validate import Arguments

# A signature that passed its checks, with its launches by pass. Bounded, since a serving process meets few.
_CALLS: dict[tuple[Any, ...], tuple[launch.Call, ...]] = {}
_MAX_CALLS = 4096
_FIELDS = tuple(field.name for field in fields(Arguments) if field.name != "kind")
_PER_TOKEN = ("x", "x_scale", "topk_ids", "topk_scale", "shared_output", "output")


def _facts(tensor: torch.Tensor | None) -> Any:
    """What the checks and the plan read of a tensor; the device as an index, which is quicker than a torch.device."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())


def fused(
    function: str,
    args: Arguments,
    rank_ep: int,
    num_expert_total: int,
    use_bf16_mul: bool = True,
    routed_scaling_factor: float = 1.0,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    chosen: plan.Plan | None = None,
    no_combine: bool = False,
    apply_router_weight_on_input: bool = False,
    num_fused_shared_experts: int = 0,
) -> torch.Tensor:
    """Run one call; see `hpc.fuse_moe` for the arguments."""
    kinds = (no_combine, apply_router_weight_on_input, num_fused_shared_experts)
    if routed_scaling_factor != 1.0:
        validate.factor(function, routed_scaling_factor, *kinds)
    known: tuple[launch.Call, ...] | None = None
    signature: tuple[Any, ...] = ()
    if isinstance(args.x, torch.Tensor) and args.x.is_cuda:
        try:
            aligned = args.x.data_ptr() | args.w13.data_ptr() | args.w2.data_ptr()
            rows = [t is None or t.data_ptr() % 16 == 0 for t in (args.shared_output, args.output)]
            signature = (
                *(_facts(getattr(args, name)) for name in _FIELDS), rank_ep, num_expert_total, use_bf16_mul, chosen,
                activation, swiglu_limit, swiglu_alpha, kinds, args.kind, aligned % 16, *rows,
            )  # fmt: skip
            known = _CALLS.get(signature)
        except (AttributeError, TypeError):
            known = None  # something is not what it should be: the checks say what
    if known is None:
        gate = (activation, swiglu_limit, swiglu_alpha)
        options = (use_bf16_mul, *gate, *kinds)
        key = validate.call(function, args, rank_ep, num_expert_total, *options)
        if not args.x.is_cuda or key.num_tokens == 0:
            return _on_cpu(args, rank_ep, routed_scaling_factor, options)
        known = _calls(function, key, chosen, args, rank_ep)
        if len(_CALLS) >= _MAX_CALLS:
            _CALLS.clear()
        _CALLS[signature] = known
    out = args.output
    if out is None:
        hidden, each = args.x.shape[1], args.topk_ids.shape[1] + num_fused_shared_experts
        shape = (args.x.shape[0], each, hidden) if no_combine else args.x.shape
        out = torch.empty(shape, dtype=torch.bfloat16, device=args.x.device)
    if len(known) == 1:
        known[0].run(args, routed_scaling_factor, out)
        return out
    first = 0
    for call in known:
        part = slice(first, first + call.key.num_tokens)
        first += call.key.num_tokens
        call.run(_rows(args, part), routed_scaling_factor, out[part])
    return out


def _calls(
    function: str, key: plan.Key, chosen: plan.Plan | None, args: Arguments, rank_ep: int
) -> tuple[launch.Call, ...]:
    """One call a pass; passes of equal length share one."""
    step = chunk_tokens(key.num_tokens, key.top_k, key.hidden, key.inter)
    lengths = [min(step, key.num_tokens - first) for first in range(0, key.num_tokens, step)]
    made: dict[int, launch.Call] = {}
    scales = scale_sizes(args.w13_scale, args.w2_scale)
    for length in set(lengths):
        part = replace(key, num_tokens=length)
        made[length] = launch.Call(
            part, _legal(function, chosen, part), args.x.device.index, rank_ep, args.shared_output is not None,
            key.hidden if args.output is None else args.output.stride(0), scales,
        )  # fmt: skip
    return tuple(made[length] for length in lengths)


def scale_sizes(*scales: torch.Tensor | None) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of each expert's block scales; (1, 1) for one scale or none."""
    return tuple((s.shape[1], s.shape[2]) if s is not None and s.dim() == 3 else (1, 1) for s in scales)


def _rows(args: Arguments, part: slice) -> Arguments:
    """The call on some of its tokens."""
    cut = {name: tensor[part] for name in _PER_TOKEN if (tensor := getattr(args, name)) is not None}
    return replace(args, **cut)


def _legal(function: str, chosen: plan.Plan | None, key: plan.Key) -> plan.Plan:
    if chosen is None:
        return choose.choose(key)
    why = plan.is_legal(chosen, key)
    if why is not None:
        fail(function, "plan", expected="a plan that can run this call", got=why, remedy="Pass plan=None.")
    return chosen


def _on_cpu(
    args: Arguments, rank_ep: int, routed_scaling_factor: float, options: tuple[Any, ...]
) -> torch.Tensor:
    """The reference, so that the library can be tried anywhere; also the empty batch."""
    use_bf16_mul, *gate, no_combine, on_input, shared_experts = options
    out = moe_reference(
        args.x, args.w13, args.w2, args.topk_ids, args.topk_scale, rank_ep=rank_ep, x_scale=args.x_scale,
        w13_scale=args.w13_scale, w2_scale=args.w2_scale, act_scale=args.act_scale, use_bf16_mul=use_bf16_mul,
        shared_output=args.shared_output, routed_scaling_factor=routed_scaling_factor, input_scale=args.input_scale,
        gate=(gate[0], gate[1], gate[2]), w13_bias=args.w13_bias, w2_bias=args.w2_bias, no_combine=no_combine,
        weight_on_input=on_input, shared_experts=shared_experts, dtype=torch.float32,
    ).to(torch.bfloat16)  # fmt: skip
    return out if args.output is None else args.output.copy_(out)
