"""The attention prologue in plain PyTorch: the oracle of this operator, and what runs on a machine without a GPU.

With ``dtype=float32`` every operation is rounded in the order that the kernels use, so FP8 results agree bit for bit;
with ``float64`` nothing is rounded before the end.
"""

from __future__ import annotations

from typing import Any

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_AMAX = 1e-6  # an all-zero head still has a scale


def token_positions(
    seq_lens: torch.Tensor, q_index: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(request, position, place among the request's new tokens) of each row, int64 ``[num_tokens]``.

    Row r of request b, ``q_index[b] <= r < q_index[b+1]``, stands at ``seq_lens[b] - (q_index[b+1] - r)``. A row of no
    request, or at a negative position, has request -1.
    """
    rows = torch.arange(num_tokens, device=q_index.device)
    index, lens = q_index.long(), seq_lens.long()
    request = torch.searchsorted(index, rows, right=True) - 1
    owned = (request >= 0) & (request < len(lens))
    b = request.where(owned, 0)
    if len(lens) == 0:
        return torch.full_like(rows, -1), rows, rows
    position = lens[b] - (index[b + 1] - rows)
    owned &= position >= 0
    return request.where(owned, -1), position, rows - index[b]


def rms_factor(x: torch.Tensor, eps: float, parts: list[int]) -> torch.Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dimension, in x's dtype.

    Squares of eight neighbours of a part (dims that are loaded together) are added one after the other, these sums in
    float64, where their order does not show. The root is taken in float64: PyTorch's float32 one is not always the
    nearest.
    """
    total = torch.zeros_like(x[..., :1], dtype=torch.float64)
    for part in x.split(parts, -1):
        squares = torch.nn.functional.pad(part * part, (0, -part.shape[-1] % 8)).unflatten(-1, (-1, 8))
        eights = squares[..., 0]
        for i in range(1, 8):
            eights = eights + squares[..., i]
        total += eights.double().sum(-1, keepdim=True)
    mean = total.to(x.dtype) / torch.full_like(x[..., :1], x.shape[-1])
    root = (mean + eps).double().sqrt().to(x.dtype)
    return torch.ones_like(root) / root


def multiply_add(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """``x * y + z`` rounded once to x's dtype, save where float64 rounds float32's sum to a tie: one in 2^28."""
    return (x.double() * y.double() + z.double()).to(x.dtype)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x * weight`` with the first ``2 * cos.shape[-1]`` dims of ``[tokens, heads, D]`` rotated by the angles of
    ``[tokens, half]``. The weights are multiplied into the angles, which heads of a token share.

    Pairs are (i, i + half) in NeoX style, (2i, 2i + 1) interleaved.
    """

    def pairs(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values.chunk(2, -1) if is_neox_style else (values[..., ::2], values[..., 1::2])

    half, (cos, sin) = cos.shape[-1], (cos.unsqueeze(1), sin.unsqueeze(1))
    a, b = pairs(x[..., : 2 * half])
    rest = x[..., 2 * half :]
    cos_a = cos_b = cos
    sin_a = sin_b = sin
    if weight is not None:
        weight = weight.to(x.dtype)
        weight_a, weight_b = pairs(weight[: 2 * half])
        cos_a, sin_a, cos_b, sin_b = cos * weight_a, sin * weight_a, cos * weight_b, sin * weight_b
        rest = rest * weight[2 * half :]
    pair = (multiply_add(a, cos_a, -(b * sin_b)), multiply_add(b, cos_b, a * sin_a))
    turned = torch.cat(pair, -1) if is_neox_style else torch.stack(pair, -1).flatten(-2)
    return torch.cat((turned, rest), -1)


def heads_of(
    qkv: torch.Tensor, num_kv_heads: int, head_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views ``[tokens, heads, dim]`` of the q, k and v parts of ``qkv``."""
    k_width, v_width = num_kv_heads * head_dim, num_kv_heads * v_dim
    q, k, v = qkv.split((qkv.shape[1] - k_width - v_width, k_width, v_width), 1)
    return q.unflatten(1, (-1, head_dim)), k.unflatten(1, (-1, head_dim)), v.unflatten(1, (-1, v_dim))


Scaled = tuple[
    torch.Tensor, torch.Tensor | None
]  # values and a factor a head that they still lack; None: none


def project_unscaled(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    position: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    v_dim: int,
    *,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    qk_norm_policy: int = 0,
    eps: float = 1e-6,
    is_neox_style: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[Scaled, Scaled, torch.Tensor]:
    """q, k (weighed and rotated, but for the factor of the norm) and v of each token in ``dtype``; positions are
    clamped to the table."""
    angles = cos_sin[position.clamp(0, cos_sin.shape[0] - 1)].to(dtype)
    cos, sin = angles.chunk(2, -1)
    q, k, v = (part.to(dtype) for part in heads_of(qkv, num_kv_heads, head_dim, v_dim))
    half = cos.shape[-1]
    parts = [*((half, half) if is_neox_style else (2 * half,)), head_dim - 2 * half]
    done: list[Scaled] = []
    for x, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        factor = None
        if qk_norm_policy == 2:
            factor = rms_factor(x, eps, parts)
            x = rotate(x, cos, sin, is_neox_style, weight)
        else:
            x = rotate(x, cos, sin, is_neox_style)
        if qk_norm_policy == 1:
            assert weight is not None
            factor = rms_factor(x, eps, parts)
            x = x * weight.to(dtype)
        done.append((x, factor))
    return done[0], done[1], v


def project(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k (normed and rotated) and v of each token: `project_unscaled` with the factors multiplied in."""
    q, k, v = project_unscaled(*args, **options)
    return scaled(*q), scaled(*k), v


def scaled(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """``x * factor``, if there is one."""
    return x if factor is None else x * factor


def both(factor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Product of two factors, the first of which may be none."""
    return other if factor is None else factor * other


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 value, ties to even, saturating at 448; every NaN becomes the code 0x7F."""
    codes = x.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    return codes.masked_fill(x.isnan(), 0x7F).view(FP8)


def quantize_query(
    q: torch.Tensor, upper_max: float = FP8_MAX, factor: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(q8, scale)`` of q times its factor a head: ``scale = max(1e-6, max|q| * factor) / upper_max`` over the last
    dimension, ``q8 = fp8(q * (factor * (1 / scale)))``. A NaN or an infinity makes the scale of its head NaN or
    infinite."""
    amax = scaled(q.abs().amax(-1, keepdim=True), factor).clamp_min(SMALLEST_AMAX)
    scale = amax / torch.full_like(amax, upper_max)
    return to_fp8(q * both(factor, torch.ones_like(scale) / scale)), scale.squeeze(-1)


def scales_by_request(
    scale: torch.Tensor, request: torch.Tensor, place: torch.Tensor, num_requests: int, columns: int
) -> torch.Tensor:
    """``[tokens, heads]`` as ``[requests, heads, columns]``; zero where there is no token."""
    laid_out = scale.new_zeros(num_requests, scale.shape[1], columns)
    live = (request >= 0) & (place < columns)
    laid_out[request[live], :, place[live]] = scale[live]
    return laid_out


def store(
    cache: torch.Tensor,
    rows: torch.Tensor,
    block_ids: torch.Tensor,
    request: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """Write ``rows [tokens, heads, dim]`` (the cache's dtype) to their places; rows without a page are left out."""
    page_size, column = cache.shape[1], position // cache.shape[1]
    live = (request >= 0) & (column < block_ids.shape[1])
    page = block_ids.long()[request[live], column[live]]
    real = (page >= 0) & (page < cache.shape[0])
    _bytes(cache)[page[real], (position % page_size)[live][real]] = _bytes(rows)[live][real]


def clear_tails(cache: torch.Tensor, block_ids: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Zero the rows behind the last token in the page of each request that has one."""
    page_size = cache.shape[1]
    for b, length in enumerate(seq_lens.tolist()):
        last = length - 1
        if last < 0 or last // page_size >= block_ids.shape[1]:
            continue
        page = int(block_ids[b, last // page_size])
        if 0 <= page < cache.shape[0]:
            _bytes(cache)[page, last % page_size + 1 :] = 0


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as its bytes, which every device can index; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
