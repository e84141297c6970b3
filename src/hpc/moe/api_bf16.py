"""The fused MoE on BF16 weights."""

from __future__ import annotations

import torch

from hpc.moe import entry, ops
from hpc.moe.plan import Plan
from hpc.moe.validate import Arguments


def fuse_moe_bf16(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scale: torch.Tensor,
    rank_ep: int,
    num_expert_total: int,
    shared_output: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    *,
    routed_scaling_factor: float = 1.0,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    no_combine: bool = False,
    num_fused_shared_experts: int = 0,
    plan: Plan | None = None,
) -> torch.Tensor:
    """`fuse_moe` without quantisation: BF16 weights and activations, products summed in fp32.

        [g | u] = bf16(x[t] . gate_up_weight[e]^T * v + gate_up_bias[e])
        a       = bf16(silu(g) * u)                                             product in fp32
        y[t, k] = bf16(a . down_weight[e]^T + down_bias[e])
        out[t]  = bf16(routed_scaling_factor * sum_k w * y[t, k] + shared_output[t])

    w = topk_scale[t, k] and v = 1; with apply_router_weight_on_input w = 1 and v = topk_scale[t, k]. Runs in portable
    Triton kernels on every supported GPU.

    Args:
        x: BF16 [T, H], contiguous; H a multiple of 64. T may be 0.
        gate_up_weight: BF16 [E, 2 I, H], contiguous, gate rows first; I a multiple of 16, E experts of this rank.
        down_weight: BF16 [E, H, I], contiguous.
        topk_ids, topk_scale, rank_ep, num_expert_total: as in `fuse_moe`.
        shared_output, output, routed_scaling_factor, activation, swiglu_limit, swiglu_alpha, plan: likewise.
        gate_up_bias, down_bias, apply_router_weight_on_input, no_combine, num_fused_shared_experts: likewise.

    Returns:
        BF16 [T, H], or [T, K, H] with no_combine: `output`, or a fresh tensor.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: as `fuse_moe`.
    """
    args = Arguments(x, gate_up_weight, down_weight, None, None, topk_ids, topk_scale, None, None, shared_output,
                     output, None, gate_up_bias, down_bias, "bf16")  # fmt: skip
    run = ops.traced if torch.compiler.is_compiling() else entry.fused
    more = {} if plan is None else {"chosen": plan}
    return run(
        "fuse_moe_bf16", args, rank_ep, num_expert_total, True, routed_scaling_factor=routed_scaling_factor,
        activation=activation, swiglu_limit=swiglu_limit, swiglu_alpha=swiglu_alpha, no_combine=no_combine,
        apply_router_weight_on_input=apply_router_weight_on_input, num_fused_shared_experts=num_fused_shared_experts,
        **more,
    )  # fmt: skip
