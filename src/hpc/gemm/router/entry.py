"""The path of one router call behind the public functions: signature, checks, plan, launch."""

from __future__ import annotations

from typing import Any

import torch

from hpc.common.errors import fail
from hpc.gemm.router import launch, plan, validate
from hpc.gemm.router.reference import gemm_reference, topk_reference

# A signature that passed its checks, with its launches. Bounded, since a serving process meets few.
_CALLS: dict[tuple[Any, ...], launch.Call] = {}
_MAX_CALLS = 4096

Parts = tuple[torch.Tensor, ...]


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the checks and the plan read of a tensor; the device as an index, which is quicker than a torch.device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _signature(x: torch.Tensor, parts: Parts) -> tuple[Any, ...]:
    """Of the operands, on a GPU; empty where something is not what it should be: the checks say what."""
    try:
        if not x.is_cuda:
            return ()
        address = x.data_ptr()
        for part in parts:
            address |= part.data_ptr()
        return (address % 16, _facts(x), *map(_facts, parts))
    except (AttributeError, TypeError):
        return ()


def _keep(signature: tuple[Any, ...], call: launch.Call) -> None:
    if len(_CALLS) >= _MAX_CALLS:
        _CALLS.clear()
    _CALLS[signature] = call


def _legal(function: str, given: plan.Plan | None, key: plan.Key) -> plan.Plan:
    if given is None:
        return plan.choose(key)
    why = plan.is_legal(given, key) if isinstance(given, plan.Plan) else f"{given!r}, which is no Plan"
    if why is not None:
        fail(function, "plan", expected="a plan that can run this call", got=why, remedy="Pass plan=None.")
    return given


def gemm(
    function: str,
    x: torch.Tensor,
    parts: Parts,
    scale: Any,
    use_fp32_output: bool,
    use_splitk: bool,
    split_flag: torch.Tensor | None,
    output: torch.Tensor | None,
    chosen: plan.Plan | None,
) -> torch.Tensor:
    """Run one product; see `hpc.gemm_bf16xfp32` for the arguments."""
    if type(scale) is not float or scale - scale != 0.0:
        scale = validate.scale_value(function, scale)
    signature = _signature(x, parts)
    if signature:
        try:
            signature += (
                use_fp32_output is True, chosen,
                None if split_flag is None else (split_flag.dtype, split_flag.get_device()),
                None if output is None else (output.data_ptr() % 16, _facts(output)),
            )  # fmt: skip
        except (AttributeError, TypeError):
            signature = ()
    known = _CALLS.get(signature)
    if known is None or type(use_fp32_output) is not bool or type(use_splitk) is not bool:
        validate.flag(function, "use_fp32_output", use_fp32_output)
        validate.flag(function, "use_splitk", use_splitk)
        dtype = torch.float32 if use_fp32_output else torch.bfloat16
        key, layout = validate.product(function, x, parts, output, dtype)
        validate.split_flag(function, split_flag, x.device)
        if not x.is_cuda or key.m == 0:
            result = gemm_reference(x, parts, scale, torch.float32).to(dtype)
            return result if output is None else output.copy_(result)
        known = launch.Call(key, _legal(function, chosen, key), x.device.index, layout, dtype)
        _keep(signature, known)
    result = known.run(x, parts, scale, output)
    return result


def topk(
    function: str,
    x: torch.Tensor,
    parts: Parts,
    scale: float,
    top_k: int,
    scoring: str,
    bias: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    routed_scaling: float,
    num_zero_experts: int,
    chosen: plan.Plan | None,
) -> tuple[torch.Tensor, ...]:
    """Product and expert choice; see `hpc.router_topk` for the arguments."""
    signature = _signature(x, parts)
    numbers = (top_k, num_groups, top_groups, num_zero_experts)
    plain = type(renormalize) is bool and all(type(number) is int for number in numbers)
    if signature and plain:
        try:
            facts = None if bias is None else (bias.data_ptr() % 16, _facts(bias))
            signature += (*numbers, scoring, renormalize, facts, chosen)
        except (AttributeError, TypeError):
            signature = ()
    if type(routed_scaling) is not float or routed_scaling - routed_scaling != 0.0:
        routed_scaling = validate.scale_value(function, routed_scaling)
    known = _CALLS.get(signature) if plain else None
    if known is None:
        key, layout = validate.product(function, x, parts, None, torch.float32, ("weight",) * 3)
        choice = validate.topk(
            function,
            key.n,
            top_k,
            scoring,
            bias,
            num_groups,
            top_groups,
            num_zero_experts,
            renormalize,
            x.device,
        )
        if not x.is_cuda or key.m == 0:
            weights, ids, zero = topk_reference(
                gemm_reference(x, parts, scale, torch.float32), choice.top_k, scoring=scoring, bias=bias,
                num_groups=choice.num_groups, top_groups=choice.top_groups, renormalize=renormalize,
                routed_scaling=routed_scaling, num_zero_experts=choice.num_zero_experts,
            )  # fmt: skip
            return (weights, ids, zero) if choice.num_zero_experts else (weights, ids)
        known = launch.Call(key, _legal(function, chosen, key), x.device.index, layout, torch.float32, choice)
        if plain:
            _keep(signature, known)
    return known.run_topk(x, parts, scale, bias, routed_scaling)
