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


def moe_reference(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scale: torch.Tensor,
    *,
    rank_ep: int = 0,
    x_scale: torch.Tensor | None = None,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    act_scale: torch.Tensor | None = None,
    use_bf16_mul: bool = True,
    shared_output: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    input_scale: torch.Tensor | None = None,
    gate: tuple[str, float | None, float | None] = ("silu", None, None),
    requantised: bool = True,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Output ``[T, H]`` in ``dtype``, unrounded at the end; arguments as the public functions'.

    `act_scale` given: one scale a tensor (`w13_scale`, `w2_scale` are ``[E]``); None: 128x128 block scales, with
    `x_scale` ``[T, H/128]``. BF16 `x` is quantised first, by `input_scale` or in groups of 128 columns.

        h = bf16(x w13^T * s13);  a = quantise(silu(gate) * up);  y = bf16(a w2^T * s2)
        out = sum_k weight * y + shared

    `requantised` False leaves the rounding in quantise out.
    """
    if x.dtype == torch.bfloat16:
        x, x_scale = quantise_input(x, input_scale)
    num_tokens, hidden = x.shape
    num_experts, inter = w13.shape[0], w13.shape[1] // 2
    local = topk_ids.long() - rank_ep * num_experts
    out = torch.zeros(num_tokens, hidden, dtype=dtype, device=x.device)
    tokens = _floats(x, dtype)
    if x_scale is not None:
        tokens = tokens * x_scale.to(dtype).repeat_interleave(BLOCK, 1)[:, :hidden]
    bf16_mul = use_bf16_mul and act_scale is not None
    present = local[(local >= 0) & (local < num_experts)].unique().tolist()
    for e in present:
        token, slot = (local == e).nonzero(as_tuple=True)
        up_weight, down_weight = _floats(w13[e], dtype), _floats(w2[e], dtype)
        if act_scale is None:
            up_weight = up_weight * expand_blocks(w13_scale[e].to(dtype), 2 * inter, hidden)
            down_weight = down_weight * expand_blocks(w2_scale[e].to(dtype), hidden, inter)
        gate_up = tokens[token] @ up_weight.T
        if act_scale is not None:
            gate_up = gate_up * w13_scale[e].to(dtype)
        gate_up = to_bf16(gate_up)
        h = activation(gate_up[:, :inter], gate_up[:, inter:], bf16_mul, *gate)
        if requantised:
            a, a_scale = requantise(h, act_scale)
        else:
            a, a_scale = h if act_scale is None else h * act_scale.to(dtype), None
        y = (a if a_scale is None else a * a_scale) @ down_weight.T
        y = to_bf16(y if act_scale is None else y * w2_scale[e].to(dtype))
        out.index_add_(0, token, y * topk_scale[token, slot].to(dtype)[:, None])
    out = out * routed_scaling_factor
    return out if shared_output is None else out + shared_output.to(dtype)
