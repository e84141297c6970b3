"""Public functions of the router: the BF16 x FP32 product, the split of a weight, product and expert choice."""

from __future__ import annotations

import torch

from hpc.common import arch, checks
from hpc.common.errors import InvalidDtype, fail
from hpc.gemm.router import entry, ops, validate
from hpc.gemm.router import weight as weights_module
from hpc.gemm.router.plan import Plan
from hpc.gemm.router.weight import DEFAULT_SCALE, RouterWeight


def get_gemm_bf16xfp32_workspace(
    max_weight_hidden_size: int, max_tokens: int = 131072, *, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """The flag buffer that callers of `gemm_bf16xfp32` pass as `split_flag`. This library neither reads nor writes it.

    Args:
        max_weight_hidden_size: largest n of the weights, at least 1.
        max_tokens: largest m.
        device: default the current CUDA device, or the CPU where there is none.

    Returns:
        int32 zeros [ceil(max_tokens / 16), ceil(max_weight_hidden_size / 64)].

    Raises:
        InvalidArgument: a size below 1.

    Source: sizes as in the interface that SGLang calls.
    """
    function = "get_gemm_bf16xfp32_workspace"
    rows = checks.int_range(function, "max_tokens", max_tokens, 1)
    columns = checks.int_range(function, "max_weight_hidden_size", max_weight_hidden_size, 1)
    if device is None:
        device = "cuda" if arch.gpu_available() else "cpu"
    return torch.zeros((-(-rows // 16), -(-columns // 64)), dtype=torch.int32, device=device)


def gemm_bf16xfp32(
    x: torch.Tensor,
    w_high: torch.Tensor,
    w_low: torch.Tensor,
    scale: float,
    use_fp32_output: bool = False,
    use_splitk: bool = True,
    split_flag: torch.Tensor | None = None,
    *,
    w_third: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """x @ w^T for an FP32 weight given as BF16 parts.

    The result is x @ w_high^T + scale * (x @ w_low^T), with a third part + scale^2 * (x @ w_third^T).

    All products accumulate in FP32 and meet there; a BF16 output is rounded once. Equal shapes and values give equal
    bits. Runs on the current stream, synchronises nothing, and can be captured in a CUDA graph. No state is shared
    between calls or streams. Off a GPU it computes the reference.

    Weights are read before the preceding kernel of the stream has ended. A weight that is new or was written by torch
    since its last use is waited for; one written by other means right before the call is not.

    Args:
        x: BF16 [m, k], any m (0 gives an empty result) and k, inner dim packed, rows any stride apart.
        w_high, w_low: BF16 [n, k], any n, likewise; see `split_router_weight`.
        scale: factor of the low part, a number or a CPU tensor of one element.
        use_fp32_output: float32 result instead of BF16.
        use_splitk: accepted for compatibility; the plan decides.
        split_flag: accepted for compatibility, int32; neither read nor written.
        w_third: BF16 [n, k], a third part with the factor scale^2.
        output: [m, n] of the result's dtype, inner dim packed; written in place and returned.
        plan: run this plan instead of the measured or analytic choice.

    Returns:
        float32 or BF16 [m, n].

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: split-precision products on matrix units (Markidis et al., 2018; Ootomo and Yokota, 2022).
    """
    if torch.compiler.is_compiling():
        parts = (w_high, w_low, w_third)
        return ops.traced_gemm(x, parts, scale, use_fp32_output, use_splitk, split_flag, output)
    given = (w_high, w_low) if w_third is None else (w_high, w_low, w_third)
    return entry.gemm(
        "gemm_bf16xfp32", x, given, scale, use_fp32_output, use_splitk, split_flag, output, plan
    )


def split_router_weight(
    weight: torch.Tensor, *, terms: int = 2, scale: float = DEFAULT_SCALE
) -> RouterWeight:
    """BF16 parts of an FP32 weight, made once and kept with the weight.

    weight = high + scale * low (+ scale^2 * third), each part the rest of the ones before, rounded to nearest. Two
    parts leave at most 2^-17 of a normal weight, three restore it; weights beyond BF16's range stay finite. Writing to
    the weight, replacing or moving its storage makes new parts at the next call; one that changed cannot be split
    during a CUDA-graph capture.

    Args:
        weight: float32 [n, k], any strides.
        terms: 2 or 3 parts.
        scale: factor between parts, a power of two for exact parts.

    Returns:
        `RouterWeight` with BF16 contiguous high, low, third (or None) and scale.

    Raises:
        InvalidArgument, InvalidDtype: naming argument, expected and got.

    Source: as `gemm_bf16xfp32`.
    """
    validate.weight("split_router_weight", weight, terms, scale)
    return weights_module.cached_split("split_router_weight", weight, terms, scale)


def router_topk(
    x: torch.Tensor,
    weight: RouterWeight | torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    routed_scaling: float = 1.0,
    num_zero_experts: int = 0,
    terms: int = 2,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, ...]:
    """Router logits and the choice of experts, in two launches: product, then scores, groups, top-k, weights.

    scores = softmax or sigmoid of x @ weight^T. With a bias, experts are chosen by score + bias and groups by the sum
    of their best two; without, by logit and the group's best one. Weights are the scores without bias, optionally
    divided by their sum, times routed_scaling. Of equals the lower id comes first. Rules for streams, graphs and
    weights as in `gemm_bf16xfp32`.

    Args:
        x: BF16 [m, k], inner dim packed.
        weight: float32 [num_experts, k], split and kept by `split_router_weight`, or its result; under torch.compile
            only the latter.
        top_k: experts a token, up to 64.
        scoring: "softmax" or "sigmoid".
        bias: float32 or BF16 [num_experts], a correction for the choice only.
        num_groups, top_groups: experts come from the best `top_groups` of `num_groups` groups of neighbours.
        renormalize: divide a token's weights by their sum.
        routed_scaling: factor of all weights.
        num_zero_experts: how many of the last experts pass their input through; chosen ones get id -1 and weight 0.
        terms: parts that a float32 weight is split into, 2 or 3.
        plan: run the product by this plan.

    Returns:
        (weights float32 [m, top_k], ids int32 [m, top_k]), best first; with zero experts also the sum of the weights of
        the chosen ones, float32 [m], with which x enters the layer's result.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: DeepSeek-V2 and V3 (2024), Qwen3 (2025) and LongCat-Flash (2025) technical reports.
    """
    if isinstance(weight, torch.Tensor):
        if torch.compiler.is_compiling():
            fail(
                "router_topk", "weight", expected="a RouterWeight while torch.compile traces", got="a tensor",
                remedy="Call hpc.split_router_weight(weight) once, outside of the traced function.",
            )  # fmt: skip
        validate.weight("router_topk", weight, terms, DEFAULT_SCALE)
        weight = weights_module.cached_split("router_topk", weight, terms, DEFAULT_SCALE)
    if not isinstance(weight, RouterWeight):
        fail(
            "router_topk", "weight", expected="a float32 tensor or a RouterWeight", got=type(weight).__name__,
            kind=InvalidDtype,
        )  # fmt: skip
    if torch.compiler.is_compiling():
        result = torch.ops.hpc.router_topk(
            x, weight.high, weight.low, weight.third, weight.scale, top_k, scoring, bias, num_groups, top_groups,
            renormalize, routed_scaling, num_zero_experts,
        )  # fmt: skip
        return tuple(result) if num_zero_experts else tuple(result[:2])
    return entry.topk(
        "router_topk", x, weight.parts, weight.scale, top_k, scoring, bias, num_groups, top_groups, renormalize,
        routed_scaling, num_zero_experts, plan,
    )  # fmt: skip
