"""Fused MoE in plain PyTorch: the oracle. float64 between the points where the operator rounds."""

from __future__ import annotations

import torch

FP8_MAX = 448.0
BLOCK = 128


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 value, saturated at 448, in the dtype of `values`; NaN stays NaN."""
    return values.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(values.dtype)


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Nearest bf16 value in the dtype of `values`."""
    return values.to(torch.bfloat16).to(values.dtype)


def expand_blocks(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """[R/128, >= C/128] block scales to one scale an element, [rows, cols]; pad columns are dropped."""
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]


def _floats(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(torch.float32).to(dtype)


def activation(
    gate: torch.Tensor, up: torch.Tensor, bf16_mul: bool, kind: str = "silu", limit: float | None = None,
    alpha: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """act(gate) * up, rounded to bf16 after the activation and after the product when `bf16_mul`.

    `limit`: gate is cut at it from above, up on both sides. `alpha`: gate * sigmoid(alpha * gate) * (up + 1).
    """
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if kind == "gelu":
        act = 0.5 * gate * (1.0 + torch.erf(gate * 0.5**0.5))
    else:
        act = gate / (1.0 + torch.exp(-gate * (1.0 if alpha is None else alpha)))
    if alpha is not None:
        up = up + 1.0
    return to_bf16(to_bf16(act) * up) if bf16_mul else act * up


def requantise(
    values: torch.Tensor, act_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(e4m3 values, dequantisation scale of every element or None).

    Per tensor: fp8(v * act_scale). Block scales: s = max|v| / 448 over 128 columns of a row, fp8(v / (s + 1e-8)).
    """
    if act_scale is not None:
        return to_fp8(values * act_scale.to(values.dtype)), None
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values, (0, -cols % BLOCK)).view(rows, -1, BLOCK)
    scale = padded.abs().amax(-1, keepdim=True).float().to(values.dtype) / FP8_MAX
    quantised = to_fp8(padded / (scale + 1e-8)).view(rows, -1)[:, :cols]
    return quantised, scale.expand_as(padded).reshape(rows, -1)[:, :cols]


def quantise_input(
    x: torch.Tensor, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """BF16 x as (e4m3, scales [T, ceil(H / 128)]), or (e4m3, None) by one scale."""
    if input_scale is not None:
        return (x.float() * (1.0 / input_scale)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), None
    tokens, hidden = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -hidden % BLOCK)).view(tokens, -(-hidden // BLOCK), BLOCK)
    scale = padded.abs().amax(-1).clamp_min(1e-10) / FP8_MAX
    values = (padded / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(1)[:, :hidden]
    return values.to(torch.float8_e4m3fn), scale


def _weight(weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """One expert's matrix [R, C], dequantised by one scale, by block scales, or as it is."""
    values = _floats(weight, dtype)
    if scale is None:
        return values
    return values * (expand_blocks(scale.to(dtype), *weight.shape) if scale.dim() == 2 else scale.to(dtype))


def with_shared_experts(
    topk_ids: torch.Tensor,
    topk_scale: torch.Tensor,
    rank_ep: int,
    num_experts: int,
    shared: int,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(local ids or -1, weights) [T, K + shared]: the last `shared` of a rank's experts with the weight 1 / factor."""
    routed, tokens = num_experts - shared, topk_ids.shape[0]
    local = topk_ids.long() - rank_ep * routed
    local = local.where((local >= 0) & (local < routed), -1)
    more = torch.arange(routed, num_experts, device=local.device).expand(tokens, shared)
    weights = torch.full((tokens, shared), 1 / factor, device=local.device)
    return torch.cat([local, more], 1), torch.cat([topk_scale, weights], 1)


def moe_reference(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scale: torch.Tensor,
    *,
    rank_ep: int = 0,
    x_scale: torch.Tensor | None = None,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    act_scale: torch.Tensor | None = None,
    use_bf16_mul: bool = True,
    shared_output: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    input_scale: torch.Tensor | None = None,
    gate: tuple[str, float | None, float | None] = ("silu", None, None),
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    no_combine: bool = False,
    weight_on_input: bool = False,
    shared_experts: int = 0,
    requantised: bool = True,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Output ``[T, H]``, or y ``[T, K, H]`` with `no_combine`, in ``dtype``; arguments as the public functions'.

    Weights have a scale an expert (`w13_scale`, `w2_scale` are ``[E]``), 128x128 block scales, or none: BF16, and
    nothing is quantised. With scales BF16 `x` becomes e4m3 first, by `input_scale` or in groups of 128 columns.

        h = bf16(v x w13^T * s13 + b13);  a = quantise(silu(gate) * up);  y = bf16(a w2^T * s2 + b2)
        out = sum_k w * y + shared                          w the router's weight and v = 1, or the other way round

    out is unrounded. `requantised` False leaves the rounding in quantise out.
    """
    quantised, block = w13_scale is not None, w13_scale is not None and w13_scale.dim() == 3
    if x.dtype == torch.bfloat16 and quantised:
        x, x_scale = quantise_input(x, input_scale)
    num_tokens, hidden = x.shape
    num_experts, inter = w13.shape[0], w13.shape[1] // 2
    if shared_experts:
        given = (topk_ids, topk_scale, rank_ep, num_experts, shared_experts, routed_scaling_factor)
        (topk_ids, topk_scale), rank_ep = with_shared_experts(*given), 0
    local = topk_ids.long() - rank_ep * num_experts
    y = torch.zeros(*topk_ids.shape, hidden, dtype=dtype, device=x.device) if no_combine else None
    out = torch.zeros(num_tokens, hidden, dtype=dtype, device=x.device)
    tokens = _floats(x, dtype)
    if x_scale is not None:
        tokens = tokens * x_scale.to(dtype).repeat_interleave(BLOCK, 1)[:, :hidden]
    bf16_mul = use_bf16_mul and quantised and not block
    present = local[(local >= 0) & (local < num_experts)].unique().tolist()
    for e in present:
        token, slot = (local == e).nonzero(as_tuple=True)
        weight = topk_scale[token, slot].to(dtype)[:, None]
        gate_up = tokens[token] @ _weight(w13[e], None if w13_scale is None else w13_scale[e], dtype).T
        gate_up = gate_up * weight if weight_on_input else gate_up
        gate_up = to_bf16(gate_up if w13_bias is None else gate_up + w13_bias[e].to(dtype))
        h = activation(gate_up[:, :inter], gate_up[:, inter:], bf16_mul, *gate)
        if not quantised:
            h = to_bf16(h)
        elif requantised:
            codes, a_scale = requantise(h, act_scale)
            h = codes if a_scale is None else codes * a_scale
        elif act_scale is not None:
            h = h * act_scale.to(dtype)
        each = h @ _weight(w2[e], None if w2_scale is None else w2_scale[e], dtype).T
        each = to_bf16(each if w2_bias is None else each + w2_bias[e].to(dtype))
        if y is not None:
            y[token, slot] = each
        else:
            out.index_add_(0, token, each if weight_on_input else each * weight)
    if y is not None:
        return y
    out = out * routed_scaling_factor
    return out if shared_output is None else out + shared_output.to(dtype)
