"""Public functions of the attention prologue."""

from __future__ import annotations

import torch

from hpc.rope import entry, ops
from hpc.rope.plan import Plan
from hpc.rope.validate import Arguments


def rope_norm_store_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    num_seqlen_per_req: torch.Tensor,
    q_index: torch.Tensor,
    kvcache_indices: torch.Tensor,
    is_prefill: bool,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None,
    out_v: torch.Tensor | None = None,
    qk_norm_policy: int = 0,
    *,
    eps: float = 1e-6,
    is_neox_style: bool = True,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Between the QKV projection and attention: QK-norm, rotary embedding, K and V into the paged cache. One launch.

    Row r of request b, q_index[b] <= r < q_index[b+1], stands at position num_seqlen_per_req[b] - (q_index[b+1] - r).
    A row of no request or before position 0 is padding: its outputs are zero and the cache is not written. `qkv` itself
    is not changed: rotated K is in the cache, or in `out_k` if that is given. Runs on the current stream, synchronises
    nothing, and can be captured in a CUDA graph and replayed with other lengths. Off a GPU it computes the reference.

    Args:
        key_cache: BF16 [num_pages, page_size, num_kv_heads, head_dim], written; dims 0-2 may have any strides (NHD,
            HND, slices); any page_size; head_dim 16 to 256, a multiple of 8.
        value_cache: BF16 [num_pages, page_size, num_kv_heads, v_dim], as key_cache.
        qkv: BF16 [tokens, q heads * head_dim + num_kv_heads * head_dim + num_kv_heads * v_dim]; rows may be strided.
        cos_sin: float32 or BF16 [max_position, rotary_dim]: rotary_dim / 2 cosines, then as many sines. The first
            rotary_dim dims of a head are rotated, up to all. Positions beyond the table take its last row.
        num_seqlen_per_req: int32 [B], KV length of each request, its new tokens included; 0 for a padded request.
        q_index: int32 [B + 1], prefix sums of the new tokens.
        kvcache_indices: int32 [B, max_pages]; entry i is the page of tokens [i * page_size, (i + 1) * page_size).
            Only entries of new tokens and of the last token are read; one outside the cache is skipped.
        is_prefill: False promises that attention treats these rows as its new tokens: then the next kernel may start
            early.
        q_norm_weight, k_norm_weight: float32 [head_dim], required with a norm.
        out_q: BF16 [tokens, q heads, head_dim], written in place and returned.
        out_k, out_v: BF16 [tokens, num_kv_heads, head_dim or v_dim]: take K or V instead of the cache.
        qk_norm_policy: 0 no norm, 1 rotate, then RMS norm, 2 RMS norm, then rotate.
        eps: added to the mean square.
        is_neox_style: rotate the pairs (i, i + rotary_dim / 2); False: (2i, 2i + 1).
        plan: run this plan instead of the analytic choice.

    In every case rows behind a request's last token in its page become zero in both caches.

    Returns:
        BF16 [tokens, q heads, head_dim]: normed and rotated queries.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: rotary embedding by Su et al. (2021), RMSNorm by Zhang and Sennrich (2019).
    """
    if torch.compiler.is_compiling():
        args = (key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices, is_prefill,
                q_norm_weight, k_norm_weight)  # fmt: skip
        return ops.traced(args, out_q, out_k, out_v, qk_norm_policy, eps, is_neox_style)
    x = Arguments(
        "rope_norm_store_kv", key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices,
        is_prefill, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, out_q=out_q, out_k=out_k, out_v=out_v,
        qk_norm_policy=qk_norm_policy, eps=eps, is_neox_style=is_neox_style,
    )  # fmt: skip
    return entry.prologue(x, plan)[0]


def rope_norm_store_kv_fp8(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    num_seqlen_per_req: torch.Tensor,
    q_index: torch.Tensor,
    kvcache_indices: torch.Tensor,
    is_prefill: bool,
    k_scale: torch.Tensor | float | None,
    v_scale: torch.Tensor | float | None,
    quant_policy: int,
    max_seqlens: int = 0,
    upper_max: float | None = None,
    q_scale_inv: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None,
    out_v: torch.Tensor | None = None,
    qk_norm_policy: int = 0,
    *,
    eps: float = 1e-6,
    is_neox_style: bool = True,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`rope_norm_store_kv` with e4m3 queries and caches. Codes round to nearest even and saturate at 448.

    K and V become e4m3(x * (1 / scale)). With quant_policy 1 each query head of a token has the scale
    max(1e-6, max|q|) / upper_max and the codes e4m3(q * (1 / scale)); a head with a NaN or an infinity has such a
    scale, and no other head changes. With quant_policy 2 codes are e4m3(q * q_scale_inv[0]).

    Args:
        key_cache, value_cache: float8_e4m3fn [num_pages, page_size, num_kv_heads, head_dim or v_dim].
        qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices: as in `rope_norm_store_kv`.
        is_prefill: layout of q_scale; and see `rope_norm_store_kv`.
        k_scale, v_scale: dequantisation scales: float32 tensor of one element, a number, or None for 1.
        quant_policy: 1 dynamic query scales, 2 fixed.
        max_seqlens: most new tokens of a request; sizes q_scale in prefill with policy 1, else ignored. Queries beyond
            it have no place for their scale and become NaN.
        upper_max: largest code of a scaled query, at most 448, the default.
        q_scale_inv: float32, element 0 multiplies queries (policy 2).
        q_norm_weight, k_norm_weight, qk_norm_policy, eps, is_neox_style, plan: as in `rope_norm_store_kv`.
        out_q, out_k, out_v: as in `rope_norm_store_kv`, float8_e4m3fn.

    Returns:
        (out_q float8_e4m3fn [tokens, q heads, head_dim], q_scale, split_k_flag int32 [B, num_kv_heads] of zeros).
        q_scale is float32 [tokens, q heads] in decode, [B, q heads, max_seqlens rounded up to 128] in prefill with
        zeros where there is no token, and None with policy 2.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: as `rope_norm_store_kv`; e4m3 by Micikevicius et al., "FP8 formats for deep learning" (2022).
    """
    if torch.compiler.is_compiling():
        args = (key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices, is_prefill,
                k_scale, v_scale, quant_policy, max_seqlens, upper_max, q_scale_inv, q_norm_weight,
                k_norm_weight)  # fmt: skip
        return ops.traced_fp8(args, out_q, out_k, out_v, qk_norm_policy, eps, is_neox_style)
    x = Arguments(
        "rope_norm_store_kv_fp8", key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices,
        is_prefill, k_scale, v_scale, quant_policy, max_seqlens, upper_max, q_scale_inv, q_norm_weight, k_norm_weight,
        out_q, out_k, out_v, qk_norm_policy, eps, is_neox_style,
    )  # fmt: skip
    queries, q_scale, split_k_flag = entry.prologue(x, plan)
    assert split_k_flag is not None
    return queries, q_scale, split_k_flag


def quantize_query_fp8(
    q: torch.Tensor,
    q_index: torch.Tensor | None = None,
    max_seqlens: int = 0,
    upper_max: float | None = None,
    out_q: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries to e4m3 with a scale per token and head, for models whose engine norms, rotates and stores KV itself.

    scale = max(1e-6, max|q|) / upper_max over head_dim; codes are e4m3(q * (1 / scale)), nearest even. One launch.

    Args:
        q: BF16 [tokens, heads, head_dim], rows and heads may be strided; head_dim 16 to 256, a multiple of 8.
        q_index: None for the layout of decode attention; int32 [B + 1] prefix sums of the requests' tokens for that of
            prefill attention. Then rows of no request are zero.
        max_seqlens: most tokens of a request, with q_index. Queries beyond it become NaN.
        upper_max: largest code of a scaled query, at most 448, the default.
        out_q: float8_e4m3fn [tokens, heads, head_dim], written in place and returned.

    Returns:
        (float8_e4m3fn [tokens, heads, head_dim], float32 scales [tokens, heads], or with q_index
        [B, heads, max_seqlens rounded up to 128] with zeros where there is no token).

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: e4m3 by Micikevicius et al., "FP8 formats for deep learning" (2022).
    """
    if torch.compiler.is_compiling():
        return ops.traced_query(q, q_index, max_seqlens, upper_max, out_q)
    return entry.quantize("quantize_query_fp8", q, q_index, max_seqlens, upper_max, out_q)
