"""Paged decode attention in plain PyTorch: the oracle of this operator.

One request at a time, no tiles, no online softmax, no rounding but that of ``dtype``. Runs on any device. Gathers only
the keys that some query can see, so a dead page, a dead page-table entry and a dead row are never part of a product.
"""

from __future__ import annotations

import math

import torch


def decode_reference(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    block_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_new_tokens: int,
    new_kv_included: bool,
    qscale: torch.Tensor | None = None,
    kscale: torch.Tensor | None = None,
    vscale: torch.Tensor | None = None,
    quant_type: int | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last ``num_new_tokens`` (S) tokens of each request over its paged cache.

    Shapes: ``q [B*S, Hq, D]``, ``kcache [pages, P, Hkv, D]``, ``vcache [pages, P, Hkv, DV]`` (any strides),
    ``block_ids [B, max_pages]``, ``seq_lens [B]``. Total length ``L = seq_lens (+ S if not new_kv_included)``, clamped
    to what the page table can hold. New token i sees keys j with ``L-S+1+i-window <= j < L-S+1+i``; with none of them
    the output is 0 and the lse is -inf. A live page id outside ``[0, pages)`` stands for a page of zeros.

    ``quant_type`` 1: ``kscale [1]``, ``vscale [1]``. 0: one fp32 scale per token and KV head,
    ``kscale [pages, rows, Hkv, F]`` fp32 or its bytes as fp8 ``[..., 4F]``: token t of a page lies at
    ``[t // F, :, t % F]``; ``vscale [Hkv]``. Both: ``qscale [B*S, Hq]``. All scales multiply the stored value.
    ``sinks [Hq]``: one more logit per head without a value. ``logit_cap`` c: ``c * tanh(score / c)``.

    Returns ``out [B*S, Hq, DV]`` and ``lse [B*S, Hq]`` (natural logarithm, sink included), both of ``dtype``.
    """
    num_q_heads, head_dim = q.shape[1:]
    num_pages, page_size, num_kv_heads, _ = kcache.shape
    group, s = num_q_heads // num_kv_heads, num_new_tokens
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(*q.shape[:2], vcache.shape[3], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
    k_scales = _token_scales(kscale, page_size) if quant_type == 0 and kscale is not None else None

    for b, stored in enumerate(seq_lens.tolist()):
        length = min(max(stored + (0 if new_kv_included else s), 0), block_ids.shape[1] * page_size)
        first = 0 if window is None else max(0, length - s + 1 - window)
        if length == 0:
            continue
        keys = torch.arange(first, length, device=q.device)
        pages, offsets = block_ids[b, keys // page_size].long(), keys % page_size
        real = (pages >= 0) & (pages < num_pages)
        pages = pages.where(real, 0)
        k = _gather(kcache, pages, offsets, real, dtype)  # [keys, Hkv, D]
        v = _gather(vcache, pages, offsets, real, dtype)
        queries = q[b * s : (b + 1) * s].to(dtype)
        if quant_type is not None:
            assert qscale is not None and kscale is not None and vscale is not None
            queries = queries * qscale[b * s : (b + 1) * s, :, None].to(dtype)
            if k_scales is None:
                k = k * kscale.to(dtype)
            else:
                k = k * k_scales[pages, offsets].masked_fill(~real[:, None], 0).to(dtype)[..., None]
            v = v * vscale.reshape(-1, 1).to(dtype)

        grouped = queries.reshape(s, num_kv_heads, group, head_dim)
        scores = torch.einsum("shgd,khd->shgk", grouped, k).reshape(s, num_q_heads, -1) * scale
        if logit_cap is not None:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        end = length - s + 1 + torch.arange(s, device=q.device)[:, None]
        seen = (keys < end) if window is None else (keys < end) & (keys >= end - window)
        scores = scores.masked_fill(~seen[:, None, :], -math.inf)
        some = seen.any(-1)  # rows with a visible key
        total = scores.logsumexp(-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.to(dtype))
        weights = torch.exp(scores[some] - total[some][..., None]).reshape(-1, num_kv_heads, group, len(keys))
        out[b * s : (b + 1) * s][some] = torch.einsum("shgk,khd->shgd", weights, v).flatten(1, 2)
        lse[b * s : (b + 1) * s][some] = total[some]
    return out, lse


def _gather(
    cache: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor, real: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Rows ``[keys, Hkv, D]`` of a paged cache as ``dtype``; zeros where the page does not exist."""
    if (
        cache.dtype == torch.float8_e4m3fn
    ):  # indexing fp8 is not implemented on every device; bytes always are
        rows = cache.view(torch.uint8)[pages, offsets].view(torch.float8_e4m3fn).to(dtype)
    else:
        rows = cache[pages, offsets].to(dtype)
    return rows.masked_fill(~real[:, None, None], 0)


def _token_scales(kscale: torch.Tensor, page_size: int) -> torch.Tensor:
    """Per-token K scales as ``[pages, P, Hkv]`` fp32 from their page layout (see ``decode_reference``)."""
    scales = kscale if kscale.dtype == torch.float32 else kscale.view(torch.float32)
    pages, rows, heads, per_row = scales.shape
    return scales.permute(0, 1, 3, 2).reshape(pages, rows * per_row, heads)[:, :page_size]
