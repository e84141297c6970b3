"""Public functions of the fused FP8 MoE."""

from __future__ import annotations

import torch

from hpc.moe import entry, ops
from hpc.moe.plan import Plan
from hpc.moe.validate import Arguments


def fuse_moe(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
    act_and_mul_scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_scale: torch.Tensor,
    rank_ep: int,
    num_expert_total: int,
    use_bf16_mul: bool = True,
    shared_output: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    *,
    input_scale: torch.Tensor | None = None,
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
    """Gated MoE on FP8 with one scale an expert: gate and up product, SiLU, down product, weighted sum over top-k.

    For token t and its k-th expert e = topk_ids[t, k] - rank_ep * E, if 0 <= e < E (any other id, -1 included,
    contributes nothing, whatever its weight; an id may repeat; so may a weight of exactly 0 be skipped):

        [g | u] = bf16(x[t] . gate_up_weight[e]^T * gate_up_scale[e] * v + gate_up_bias[e])
        a       = e4m3(silu(g) * u * act_and_mul_scale)         product of bf16(silu(g)) and u rounded to bf16 first,
                                                                if use_bf16_mul
        y[t, k] = bf16(a . down_weight[e]^T * down_scale[e] + down_bias[e])
        out[t]  = bf16(routed_scaling_factor * sum_k w * y[t, k] + shared_output[t])

    w = topk_scale[t, k] and v = 1; with apply_router_weight_on_input w = 1 and v = topk_scale[t, k].

    Sums are fp32 and in a fixed order: equal inputs give equal bits. Runs on the current stream, synchronises nothing,
    and can be captured in a CUDA graph and replayed with other ids. Off a GPU it computes the reference.

    Args:
        x: float8_e4m3fn [T, H], contiguous; H a multiple of 64. T may be 0. Or BF16, quantised inside.
        gate_up_weight: float8_e4m3fn [E, 2 I, H], contiguous, gate rows first; I a multiple of 16, E experts of this
            rank.
        down_weight: float8_e4m3fn [E, H, I], contiguous.
        gate_up_scale, down_scale: float32 [E], multiply the accumulator: weight scale times input scale.
        act_and_mul_scale: float32, one value, multiplies before the cast to e4m3 (1 / scale of the down input). Or
            None: as in `fuse_moe_blockwise`, a scale s for each 128 columns of a row; down_scale then is the weight's.
        topk_ids: int32 [T, K], global expert ids; K up to 128.
        topk_scale: float32 [T, K], the router's weights.
        rank_ep: expert-parallel rank; its experts are [rank_ep * E, (rank_ep + 1) * E).
        num_expert_total: experts of all ranks; decides tile sizes only. 0: those of this rank.
        use_bf16_mul: round SiLU and product to bf16, as a model in bf16 does.
        shared_output: BF16 [T, H], contiguous; added once.
        output: BF16 [T, H], inner dim packed; written in place and returned. With no_combine [T, K, H], contiguous.
        input_scale: float32, one value, for BF16 x only: x becomes e4m3(x / input_scale). None with BF16 x and no
            act_and_mul_scale: a scale for each 128 columns of a row, as in `fuse_moe_blockwise`; gate_up_scale then is
            the weight's.
        routed_scaling_factor: factor of the weighted sum, before shared_output is added.
        activation: "silu" or "gelu" (by the error function), of g.
        swiglu_limit: cuts g at it from above and u on both sides, before the activation.
        swiglu_alpha: the product becomes g * sigmoid(alpha * g) * (u + 1).
        gate_up_bias, down_bias: BF16 or float32 [E, 2 I] and [E, H], contiguous.
        apply_router_weight_on_input: the router's weight multiplies x, not y, for any K.
        no_combine: return y, zeros where the expert is not local. topk_scale is not read, unless it is on the input.
        num_fused_shared_experts: S; every token takes the last S of the E experts too, with weight 1. Ids do not name
            them: those of this rank begin at rank_ep * (E - S). y of no_combine is [T, K + S, H].
        plan: run this plan instead of the measured or the analytic one.

    Returns:
        BF16 [T, H], or [T, K, H] with no_combine: `output`, or a fresh tensor.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: Shazeer et al., "Outrageously large neural networks" (2017); SwiGLU by Shazeer (2020); grouped products over
    sorted tokens as in MegaBlocks (Gale et al., 2022).
    """
    args = Arguments(x, gate_up_weight, down_weight, gate_up_scale, down_scale, topk_ids, topk_scale, None,
                     act_and_mul_scale, shared_output, output, input_scale, gate_up_bias, down_bias)  # fmt: skip
    run = ops.traced if torch.compiler.is_compiling() else entry.fused
    more = {} if plan is None else {"chosen": plan}
    return run(
        "fuse_moe", args, rank_ep, num_expert_total, use_bf16_mul, routed_scaling_factor=routed_scaling_factor,
        activation=activation, swiglu_limit=swiglu_limit, swiglu_alpha=swiglu_alpha, no_combine=no_combine,
        apply_router_weight_on_input=apply_router_weight_on_input, num_fused_shared_experts=num_fused_shared_experts,
        **more,
    )  # fmt: skip


def fuse_moe_pertensor_fp8(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
    act_and_mul_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scale: torch.Tensor,
    rank_ep: int,
    num_expert_total: int,
    use_bf16_mul: bool = True,
    shared_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fuse_moe` without an output argument.

    Args:
        x, gate_up_weight, down_weight, gate_up_scale, down_scale, act_and_mul_scale: as in `fuse_moe`.
        topk_ids, topk_scale, rank_ep, num_expert_total, use_bf16_mul, shared_output: likewise.

    Returns:
        BF16 [T, H], fresh.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: as `fuse_moe`.

    Source: as `fuse_moe`.
    """
    args = Arguments(x, gate_up_weight, down_weight, gate_up_scale, down_scale, topk_ids, topk_scale, None,
                     act_and_mul_scale, shared_output, None)  # fmt: skip
    name = "fuse_moe_pertensor_fp8"
    if torch.compiler.is_compiling():
        return ops.traced(name, args, rank_ep, num_expert_total, use_bf16_mul)
    return entry.fused(name, args, rank_ep, num_expert_total, use_bf16_mul)


def fuse_moe_blockwise(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    gate_up_weight: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_weight_scale: torch.Tensor,
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
    """`fuse_moe` with one scale for each 128x128 block of the weights and each 128 columns of a row of activations.

    With kb over blocks of 128 columns, nb the block of a weight's row, ws and s2 the weights' scales:

        [g | u] = bf16(sum_kb (x . gate_up_weight[e]^T over block kb) * x_scale[t, kb] * ws[e, nb, kb] * v + bias)
        a       = e4m3(v / (s + 1e-8)),  v = silu(g) * u in fp32,  s = max |v| / 448 over 128 columns of the row
        y       = bf16(sum_kb (a . down_weight[e]^T over block kb) * s[kb] * s2[e, nb, kb] + down_bias)

    Sizes need not be multiples of 128: the last block of a row or column is then a partial one. Rows of gate_up_weight
    are blocked as one matrix of 2 I rows.

    Args:
        x: float8_e4m3fn [T, H]. Or BF16 [T, H] with x_scale None: each 128 columns of a row are quantised inside, by
            s = max(max |x|, 1e-10) / 448.
        x_scale: float32 [T, ceil(H / 128)], contiguous.
        gate_up_weight: float8_e4m3fn [E, 2 I, H].
        gate_up_weight_scale: float32 [E, ceil(2 I / 128), ceil(H / 128)], the last dim also padded to a multiple of 4;
            what padding holds is never read.
        down_weight: float8_e4m3fn [E, H, I]; down_weight_scale: float32 [E, ceil(H / 128), ceil(I / 128)], padded
            alike.
        topk_ids, topk_scale, rank_ep, num_expert_total: as in `fuse_moe`.
        shared_output, output, routed_scaling_factor, activation, swiglu_limit, swiglu_alpha, plan: likewise.
        gate_up_bias, down_bias, apply_router_weight_on_input, no_combine, num_fused_shared_experts: likewise.

    Returns:
        BF16 [T, H], or [T, K, H] with no_combine: `output`, or a fresh tensor.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: as `fuse_moe`; block scales by DeepSeek-V3 (2024).
    """
    args = Arguments(x, gate_up_weight, down_weight, gate_up_weight_scale, down_weight_scale, topk_ids, topk_scale,
                     x_scale, None, shared_output, output, None, gate_up_bias, down_bias, "block")  # fmt: skip
    run = ops.traced if torch.compiler.is_compiling() else entry.fused
    more = {} if plan is None else {"chosen": plan}
    return run(
        "fuse_moe_blockwise", args, rank_ep, num_expert_total, True, routed_scaling_factor=routed_scaling_factor,
        activation=activation, swiglu_limit=swiglu_limit, swiglu_alpha=swiglu_alpha, no_combine=no_combine,
        apply_router_weight_on_input=apply_router_weight_on_input, num_fused_shared_experts=num_fused_shared_experts,
        **more,
    )  # fmt: skip


def fuse_moe_blockwise_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_weight_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_weight_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scale: torch.Tensor,
    rank_ep: int,
    num_expert_total: int,
    shared_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fuse_moe_blockwise` without an output argument.

    Args:
        x, x_scale, gate_up_weight, gate_up_weight_scale, down_weight, down_weight_scale: as in `fuse_moe_blockwise`.
        topk_ids, topk_scale, rank_ep, num_expert_total, shared_output: likewise.

    Returns:
        BF16 [T, H], fresh.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: as `fuse_moe_blockwise`.

    Source: as `fuse_moe_blockwise`.
    """
    args = Arguments(x, gate_up_weight, down_weight, gate_up_weight_scale, down_weight_scale, topk_ids, topk_scale,
                     x_scale, None, shared_output, None, kind="block")  # fmt: skip
    if torch.compiler.is_compiling():
        return ops.traced("fuse_moe_blockwise_fp8", args, rank_ep, num_expert_total, True)
    return entry.fused("fuse_moe_blockwise_fp8", args, rank_ep, num_expert_total)
