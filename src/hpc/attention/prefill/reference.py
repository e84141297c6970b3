"""Prefill attention in plain PyTorch: the oracle of this operator.

One request at a time, no online softmax, no rounding but that of ``dtype``. Runs on any device. Gathers only the keys
of the request, so a dead page, a dead page-table entry and a dead row are never part of a product.
"""

from __future__ import annotations

import itertools
import math

import torch

_MOST_SCORES = 1 << 26  # scores held at a time: query rows are taken in pieces


def prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    block_ids: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    qscale: torch.Tensor | None = None,
    kscale: torch.Tensor | None = None,
    vscale: torch.Tensor | None = None,
    quant_type: int | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the new tokens ``q [total, Hq, D]`` of each request to its keys.

    Paged: ``k [pages, P, Hkv, D]``, ``v [pages, P, Hkv, DV]`` (any strides), ``block_ids [B, max_pages]``; request b
    has ``L = seq_lens[b]`` keys, its new tokens included, at most what the page table can hold. A live page id outside
    ``[0, pages)`` stands for a page of zeros. Ragged (``block_ids`` None): ``k [total, Hkv, D]``, L is the request's
    number of query tokens.

    Token i of n new tokens stands at ``p = L - n + i`` and sees keys j with ``p - window < j <= p`` (``j < L`` if not
    ``causal``); with none of them, and in rows from ``cu_seqlens_q[B]`` on, the output is 0 and the lse is -inf.

    ``quant_type`` 1: ``kscale [1]``, ``vscale [1]``. 0: one fp32 scale per token and KV head, ``kscale [pages, rows,
    Hkv, F]`` fp32 or its bytes as fp8 ``[..., 4F]``, token t of a page at ``[t // F, :, t % F]``; ``vscale [Hkv]``.
    Both: ``qscale [B, Hq, Lpad]``. All scales multiply the stored value. ``sinks [Hq]``: one more logit per head
    without a value. ``logit_cap`` c: ``c * tanh(score / c)``.

    Returns ``out [total, Hq, DV]`` and ``lse [total, Hq]`` (natural logarithm, sink included), both of ``dtype``.
    """
    num_kv_heads, head_dim = k.shape[-2:]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
    cu = cu_seqlens_q.tolist()
    for b, (first, last) in enumerate(itertools.pairwise(cu)):
        n = last - first
        keys, values = _request(
            k, v, b, slice(first, last), block_ids, seq_lens, kscale, vscale, quant_type, dtype
        )
        length = len(keys)
        if n == 0 or length == 0:
            continue
        step = max(1, _MOST_SCORES // (length * q.shape[1]))
        for row in range(first, last, step):
            rows = slice(row, min(row + step, last))
            queries = q[rows].to(dtype)
            if quant_type is not None:
                assert qscale is not None
                queries = queries * qscale[b, :, rows.start - first : rows.stop - first].T[..., None].to(
                    dtype
                )
            grouped = queries.unflatten(1, (num_kv_heads, -1))
            scores = torch.einsum("shgd,khd->shgk", grouped, keys).flatten(1, 2) * scale
            if logit_cap is not None:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            position = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + (length - last)
            key = torch.arange(length, device=q.device)
            seen = (key <= position) if causal else (key >= 0).expand(len(queries), -1)
            if window is not None:
                seen = seen & (key > position - window)
            scores = scores.masked_fill(~seen[:, None], -math.inf)
            total = scores.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.to(dtype))
            some = seen.any(-1)[:, None]  # rows with a visible key
            weights = torch.exp(scores - total[..., None]).unflatten(1, (num_kv_heads, -1))
            result = torch.einsum("shgk,khd->shgd", weights, values).flatten(1, 2)
            out[rows] = result.where(some[..., None], 0.0)
            lse[rows] = total.where(some, -math.inf)
    return out, lse


def _request(
    k: torch.Tensor, v: torch.Tensor, b: int, rows: slice, block_ids: torch.Tensor | None,
    seq_lens: torch.Tensor | None, kscale: torch.Tensor | None, vscale: torch.Tensor | None, quant_type: int | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys ``[L, Hkv, D]`` and values ``[L, Hkv, DV]`` of one request, dequantised."""
    if block_ids is None or seq_lens is None:
        return k[rows].to(dtype), v[rows].to(dtype)
    num_pages, page_size = k.shape[:2]
    length = min(max(int(seq_lens[b]), 0), block_ids.shape[1] * page_size)
    token = torch.arange(length, device=k.device)
    pages, offsets = block_ids[b, token // page_size].long(), token % page_size
    real = (pages >= 0) & (pages < num_pages)
    pages = pages.where(real, 0)
    keys, values = (_gather(cache, pages, offsets, real, dtype) for cache in (k, v))
    if quant_type is not None:
        assert kscale is not None and vscale is not None
        if quant_type == 0:
            scales = (kscale if kscale.dtype == torch.float32 else kscale.view(torch.float32)).transpose(2, 3)
            per_token = scales.reshape(scales.shape[0], -1, scales.shape[3])[pages, offsets]
            keys = keys * per_token.masked_fill(~real[:, None], 0).to(dtype)[..., None]
        else:
            keys = keys * kscale.to(dtype)
        values = values * vscale.reshape(-1, 1).to(dtype)
    return keys, values


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
