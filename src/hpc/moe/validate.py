"""Checks of a fused MoE call. Metadata only; a signature that passed once is not checked again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpc.common import arch, checks
from hpc.common.errors import fail
from hpc.moe import plan

FP8 = torch.float8_e4m3fn
HIDDEN_MULTIPLE, INTER_MULTIPLE = 64, 16
PAD_REMEDY = "Pad the weights by hpc.pad_moe_weights, or split experts over ranks instead of their columns."


@dataclass(slots=True)  # not frozen: that costs 2.5 us of each call
class Arguments:
    """The tensors of one call, by role.

    `kind` says what the weights are: "tensor", e4m3 with one scale an expert; "block", e4m3 with 128x128 block scales,
    then with `x_scale` unless x is BF16; "bf16", without scales.
    """

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_scale: torch.Tensor
    x_scale: torch.Tensor | None
    act_scale: torch.Tensor | None
    shared_output: torch.Tensor | None
    output: torch.Tensor | None
    input_scale: torch.Tensor | None = None  # BF16 x with one scale a tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    kind: str = "tensor"


# The names under which the public functions take the roles, for error texts.
PER_TENSOR_NAMES = {"w13_scale": "gate_up_scale", "w2_scale": "down_scale"}
BLOCK_NAMES = {"w13_scale": "gate_up_weight_scale", "w2_scale": "down_weight_scale"}


def call(
    function: str, args: Arguments, rank_ep: int, num_expert_total: int, use_bf16_mul: bool, activation: str = "silu",
    swiglu_limit: float | None = None, swiglu_alpha: float | None = None, no_combine: bool = False,
    weight_on_input: bool = False, shared_experts: int = 0,
) -> plan.Key:  # fmt: skip
    """Check every argument; the key that decides the plan."""
    block, wide = args.kind == "block", args.kind == "bf16"
    names = BLOCK_NAMES if block else PER_TENSOR_NAMES
    checks.dtype(function, "x", args.x, torch.bfloat16 if wide else (FP8, torch.bfloat16))
    checks.ndim(function, "x", args.x, 2)
    checks.contiguous(function, "x", args.x)
    for name, weight in (("gate_up_weight", args.w13), ("down_weight", args.w2)):
        remedy = "fuse_moe is for e4m3 weights." if wide else "fuse_moe_bf16 is for BF16 weights."
        checks.dtype(function, name, weight, torch.bfloat16 if wide else FP8, remedy)
    checks.ndim(function, "gate_up_weight", args.w13, 3)
    num_tokens, hidden = args.x.shape
    experts, inter = args.w13.shape[0], args.w13.shape[1] // 2
    _sizes(function, experts, args.w13.shape[1], inter)
    checks.shape(
        function, "gate_up_weight", args.w13, (experts, 2 * inter, hidden), "It is [E, 2 I, H], H that of x."
    )
    checks.shape(function, "down_weight", args.w2, (experts, hidden, inter), "It is [E, H, I].")
    if hidden % HIDDEN_MULTIPLE or hidden == 0:
        multiple = f"H a multiple of {HIDDEN_MULTIPLE}"
        fail(function, "gate_up_weight", expected=multiple, got=f"H = {hidden}", remedy=PAD_REMEDY)
    shared_experts = checks.int_range(function, "num_fused_shared_experts", shared_experts, 0, experts - 1)
    _routing(function, args, num_tokens, shared_experts)
    top_k = args.topk_ids.shape[1] + shared_experts
    if block:
        _block_scales(function, args, names, experts, hidden, inter, num_tokens)
    elif not wide:
        for role in ("w13_scale", "w2_scale"):
            _float32(function, names[role], getattr(args, role), (experts,))
        if args.act_scale is not None:
            _one_value(function, "act_and_mul_scale", args.act_scale)
        _input_scale(function, args)
    _biases(function, args, experts, hidden, inter)
    _outputs(function, args, (num_tokens, top_k, hidden) if no_combine else (num_tokens, hidden))
    _devices(function, args, names)
    checks.int_range(function, "rank_ep", rank_ep, 0, 2**31 // experts - 1)
    total = checks.int_range(function, "num_expert_total", num_expert_total, 0)
    flags = {
        "use_bf16_mul": use_bf16_mul, "no_combine": no_combine, "apply_router_weight_on_input": weight_on_input,
    }  # fmt: skip
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            fail(function, name, expected="a bool", got=repr(flag))
    _activation(function, activation, swiglu_limit, swiglu_alpha)
    if args.x.is_cuda:
        arch.require_gpu(function, args.x.device)
    capability = arch.capability(args.x.device)
    limit, alpha = (None if value is None else float(value) for value in (swiglu_limit, swiglu_alpha))
    dynamic_act = args.kind == "tensor" and args.act_scale is None
    both = dynamic_act and args.x.dtype == torch.bfloat16 and args.input_scale is None
    return plan.Key(
        num_tokens=num_tokens, top_k=top_k, num_experts=experts, experts_total=total or experts, hidden=hidden,
        inter=inter, block_scales=block or both, bf16_mul=use_bf16_mul and args.kind == "tensor",
        sms=arch.sm_count(args.x.device), sm90=capability[0] == 9, hardware_fp8=capability >= (8, 9),
        bf16_input=args.x.dtype == torch.bfloat16, activation=activation, swiglu_limit=limit, swiglu_alpha=alpha,
        bf16_weights=wide, one_scale=both,
        dynamic_act=dynamic_act and not both, up_bias=args.w13_bias is not None, down_bias=args.w2_bias is not None,
        weight_on_input=weight_on_input, combined=not no_combine, shared_experts=shared_experts,
        gpu=arch.device_name(args.x.device) if args.x.is_cuda else "",
    )  # fmt: skip


def _biases(function: str, args: Arguments, experts: int, hidden: int, inter: int) -> None:
    for name, bias, columns in (
        ("gate_up_bias", args.w13_bias, 2 * inter),
        ("down_bias", args.w2_bias, hidden),
    ):
        if bias is not None:
            checks.dtype(function, name, bias, (torch.bfloat16, torch.float32))
            checks.shape(function, name, bias, (experts, columns))
            checks.contiguous(function, name, bias)


def _outputs(function: str, args: Arguments, shape: tuple[int, ...]) -> None:
    """`shared_output` and `output`; without the sum over experts there is nothing that the first could be added to."""
    if args.shared_output is not None:
        if len(shape) == 3:
            remedy = "Add it to your own sum over top-k."
            fail(function, "shared_output", expected="None with no_combine", got="a tensor", remedy=remedy)
        checks.dtype(function, "shared_output", args.shared_output, torch.bfloat16)
        checks.shape(function, "shared_output", args.shared_output, shape)
        checks.contiguous(function, "shared_output", args.shared_output)
    if args.output is not None:
        checks.dtype(function, "output", args.output, torch.bfloat16)
        if len(shape) == 3:
            checks.shape(function, "output", args.output, shape, "With no_combine it is [T, K, H].")
            checks.contiguous(function, "output", args.output)
        else:
            checks.shape(function, "output", args.output, shape)
            checks.inner_contiguous(function, "output", args.output)


def factor(function: str, value: float, no_combine: bool, weight_on_input: bool, shared_experts: int) -> None:
    """Whether `routed_scaling_factor` fits: it is part of the sum over experts, and shared ones take its inverse."""
    if no_combine and value != 1.0:
        remedy = "Apply it in your own sum over top-k."
        fail(function, "routed_scaling_factor", expected="1.0 with no_combine", got=value, remedy=remedy)
    if shared_experts and (value == 0 or (weight_on_input and value != 1.0)):
        wanted = "1.0 with the router's weight on the input" if weight_on_input else "another than 0"
        remedy = "It would scale the fused shared experts too."
        fail(function, "routed_scaling_factor", expected=wanted, got=value, remedy=remedy)


def _one_value(function: str, name: str, tensor: torch.Tensor, remedy: str = "") -> None:
    checks.dtype(function, name, tensor, torch.float32, remedy)
    if tensor.numel() != 1:
        fail(function, name, expected="one float32 value", got=f"{tensor.numel()} values")


def _activation(function: str, activation: str, limit: float | None, alpha: float | None) -> None:
    checks.one_of(function, "activation", activation, plan.ACTIVATIONS)
    for name, value in (("swiglu_limit", limit), ("swiglu_alpha", alpha)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0
        ):
            fail(function, name, expected="a positive number or None", got=repr(value))
    if alpha is not None and activation != "silu":
        fail(
            function,
            "swiglu_alpha",
            expected="None with this activation",
            got=alpha,
            remedy="It is part of SwiGLU.",
        )


def _input_scale(function: str, args: Arguments) -> None:
    """BF16 activations may have a scale to be quantised by; e4m3 ones have theirs in gate_up_scale."""
    if args.input_scale is None:
        if args.x.dtype == torch.bfloat16 and args.act_scale is not None:
            remedy = "Pass the float32 scale that x is divided by, or no act_and_mul_scale: both scales are found then."
            fail(
                function,
                "input_scale",
                expected="a scale for BF16 x beside act_and_mul_scale",
                got=None,
                remedy=remedy,
            )
        return
    if args.x.dtype == FP8:
        remedy = "It is part of gate_up_scale; pass it for BF16 x."
        fail(function, "input_scale", expected="None for e4m3 x", got="a tensor", remedy=remedy)
    _one_value(
        function, "input_scale", args.input_scale, "Pass the float32 scale that x is divided by, or None."
    )


def _sizes(function: str, experts: int, rows: int, inter: int) -> None:
    limits = f"1 to {plan.MAX_EXPERTS} experts a rank"
    if not 1 <= experts <= plan.MAX_EXPERTS:
        fail(function, "gate_up_weight", expected=limits, got=experts)
    if rows % 2 or inter % INTER_MULTIPLE or inter == 0:
        fail(
            function, "gate_up_weight", expected=f"2 I rows with I a multiple of {INTER_MULTIPLE}", got=f"{rows} rows",
            remedy=PAD_REMEDY,
        )  # fmt: skip


def _routing(function: str, args: Arguments, num_tokens: int, shared_experts: int) -> None:
    checks.dtype(function, "topk_ids", args.topk_ids, torch.int32, "Convert with .to(torch.int32).")
    checks.shape(function, "topk_ids", args.topk_ids, (num_tokens, "K"))
    checks.contiguous(function, "topk_ids", args.topk_ids)
    top_k = args.topk_ids.shape[1]
    if not 1 <= top_k <= plan.MAX_TOP_K - shared_experts:
        fail(
            function,
            "topk_ids",
            expected=f"1 to {plan.MAX_TOP_K - shared_experts} experts a token",
            got=top_k,
        )
    _float32(function, "topk_scale", args.topk_scale, (num_tokens, top_k))


def _float32(function: str, name: str, tensor: torch.Tensor, shape: tuple[int | str, ...]) -> None:
    checks.dtype(function, name, tensor, torch.float32, "Convert with .float().")
    checks.shape(function, name, tensor, shape)
    checks.contiguous(function, name, tensor)


def _block_scales(
    function: str,
    args: Arguments,
    names: dict[str, str],
    experts: int,
    hidden: int,
    inter: int,
    num_tokens: int,
) -> None:
    columns = plan.ceil_div(hidden, 128)
    if args.x.dtype == FP8:
        _float32(function, "x_scale", args.x_scale, (num_tokens, columns))  # type: ignore[arg-type]
    elif args.x_scale is not None:
        remedy = "BF16 activations are quantised inside; pass None."
        fail(function, "x_scale", expected="None for BF16 x", got="a tensor", remedy=remedy)
    wanted = {
        "w13_scale": (plan.ceil_div(2 * inter, 128), columns),
        "w2_scale": (columns, plan.ceil_div(inter, 128)),
    }
    for role, (rows, cols) in wanted.items():
        tensor = getattr(args, role)
        _float32(function, names[role], tensor, (experts, rows, "columns"))
        if not cols <= tensor.shape[2] <= 4 * plan.ceil_div(cols, 4):
            fail(
                function, names[role], expected=f"{cols} columns, or {4 * plan.ceil_div(cols, 4)} with padding",
                got=tensor.shape[2], remedy="One scale for each 128x128 block, columns padded to a multiple of 4.",
            )  # fmt: skip


def _devices(function: str, args: Arguments, names: dict[str, str]) -> None:
    named = {
        "gate_up_weight": args.w13, "down_weight": args.w2, names["w13_scale"]: args.w13_scale,
        names["w2_scale"]: args.w2_scale, "topk_ids": args.topk_ids, "topk_scale": args.topk_scale,
        "x_scale": args.x_scale, "act_and_mul_scale": args.act_scale, "shared_output": args.shared_output,
        "output": args.output, "input_scale": args.input_scale, "gate_up_bias": args.w13_bias,
        "down_bias": args.w2_bias,
    }  # fmt: skip
    for name, tensor in named.items():
        if tensor is not None:
            checks.same_device(function, name, tensor, args.x.device)
    for name, weight in (("gate_up_weight", args.w13), ("down_weight", args.w2)):
        checks.contiguous(function, name, weight)
        if weight.data_ptr() % 16:
            fail(
                function,
                name,
                expected="a 16-byte aligned tensor",
                got=f"address {weight.data_ptr():#x}",
            )
    if args.x.data_ptr() % 16:
        fail(function, "x", expected="a 16-byte aligned tensor", got=f"address {args.x.data_ptr():#x}")
