"""The router in plain PyTorch: the oracle of every kernel here, and what runs where there is no GPU."""

from __future__ import annotations

import torch

# bfloat16 reaches 2^128 - 2^120; fp32 weights beyond would round to infinity.
BF16_MAX = torch.finfo(torch.bfloat16).max


def split_reference(weight: torch.Tensor, scale: float, terms: int) -> tuple[torch.Tensor, ...]:
    """BF16 parts with weight = p0 + scale * p1 (+ scale^2 * p2): each the rounded rest, divided by its factor.

    Rounding to nearest leaves at most 2^-9 of a weight, so with two parts 2^-18 remains and with three nothing that
    fp32 holds. Divided by 1/256 a rest is at most 1/2 of its weight, so it overflows nowhere; the clamp keeps weights
    above BF16's largest value from becoming infinite.
    """
    rest, parts, factor = weight.double(), [], 1.0
    for _ in range(terms):
        # float64 to bfloat16 by way of fp32 would round twice: round in fp32's own grid, which the rest lies on
        part = (rest / factor).float().clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)
        parts.append(part)
        rest = rest - part.double() * factor
        factor *= scale
    return tuple(parts)


def gemm_reference(
    x: torch.Tensor, parts: tuple[torch.Tensor, ...], scale: float, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """x p0^T + scale * x p1^T (+ scale^2 * x p2^T), [m, n], computed in `dtype`."""
    out = torch.zeros(x.shape[0], parts[0].shape[0], dtype=dtype, device=x.device)
    for index, part in enumerate(parts):
        out += (x.to(dtype) @ part.to(dtype).T) * scale**index
    return out


def topk_reference(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    routed_scaling: float = 1.0,
    num_zero_experts: int = 0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weights [m, top_k], ids int32 [m, top_k], zero-expert weight [m]) from logits [m, n], best expert first.

    Without a bias experts are chosen by logit, with one by score + bias; the bias does not weigh. A group counts by its
    best expert, or, with a bias, by the sum of its best two (DeepSeek-V2, V3). Of equals the lower id comes first. NaN
    counts as the lowest logit.
    """
    logits = torch.where(logits.isnan(), torch.full_like(logits, -torch.inf), logits)
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1).nan_to_num(0.0)
    choice = logits if bias is None else scores + bias.to(scores.dtype)
    tokens, experts = choice.shape
    if num_groups > 1:
        grouped = choice.view(tokens, num_groups, -1)
        best = min(1 if bias is None else 2, grouped.shape[-1])
        rank = grouped.sort(dim=-1, descending=True, stable=True).values[..., :best].sum(-1)
        chosen = rank.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
        allowed = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, chosen, True)
        choice = choice.masked_fill(~allowed.repeat_interleave(experts // num_groups, 1), -torch.inf)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = weights * routed_scaling
    zero = ids >= experts - num_zero_experts
    zero_weight = torch.where(zero, weights, torch.zeros_like(weights)).sum(-1)
    if num_zero_experts:
        weights, ids = weights.masked_fill(zero, 0.0), ids.masked_fill(zero, -1)
    return weights, ids.to(torch.int32), zero_weight


def deepseek_v3(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3: 256 experts in 8 groups; sigmoid, bias for selection, best 4 groups, 8 experts, sum 2.5."""
    weights, ids, _ = topk_reference(
        logits,
        8,
        scoring="sigmoid",
        bias=bias,
        num_groups=8,
        top_groups=4,
        renormalize=True,
        routed_scaling=2.5,
    )
    return weights, ids


def hunyuan_v3(
    logits: torch.Tensor, bias: torch.Tensor, routed_scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hy3: 192 experts, no groups; sigmoid, bias for selection, 8 experts, renormalised and scaled."""
    weights, ids, _ = topk_reference(
        logits, 8, scoring="sigmoid", bias=bias, renormalize=True, routed_scaling=routed_scaling
    )
    return weights, ids


def qwen3(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen3-MoE: 128 experts; softmax over all, 8 experts, renormalised."""
    weights, ids, _ = topk_reference(logits, 8, renormalize=True)
    return weights, ids


def longcat_flash(
    logits: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LongCat-Flash: 512 experts and 256 zero experts; softmax over all, bias for selection, 12, scaled by 6."""
    return topk_reference(logits, 12, bias=bias, routed_scaling=6.0, num_zero_experts=256)
