"""Public functions of prefill attention."""

from __future__ import annotations

import torch

from hpc.attention.prefill import entry, ops, validate
from hpc.attention.prefill.plan import Plan
from hpc.common.quant import QuantType

_QT1 = QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR


def attention_with_kvcache_prefill_bf16(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    block_ids: torch.Tensor,
    seqlens_kvcache: torch.Tensor,
    max_seqlens_q: int | torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
    plan: Plan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's new tokens over its paged BF16 cache.

    Request b has n = cu_seqlens_q[b+1] - cu_seqlens_q[b] new tokens and L = seqlens_kvcache[b] keys, the new ones
    included and in the cache already. Its token i stands at p = L - n + i and sees the keys j with p - window < j <= p:
    whole prompts, chunks and prefix hits are one case. A row that sees no key is zero, and so is every row from
    cu_seqlens_q[B] on. Runs on the current stream, synchronises nothing, and can be captured in a CUDA graph and
    replayed with other lengths. For inference: no gradient flows. Off a GPU it computes the reference.

    Args:
        q: BF16 [total, num_q_heads, head_dim], requests one after the other; inner dim packed; head_dim 8 to 256.
        kcache: BF16 [num_pages, page_size, num_kv_heads, head_dim]; dims 0-2 may have any strides (NHD, HND, slices);
            page_size a power of two up to 256; num_q_heads / num_kv_heads an integer from 1 to 64.
        vcache: BF16 [num_pages, page_size, num_kv_heads, v_dim], as kcache.
        cu_seqlens_q: int32 [B + 1], starts at 0 and does not fall; a request may have no new token.
        block_ids: int32 [B, max_pages]; entry i is the page of tokens [i * page_size, (i + 1) * page_size). Entries
            past the live range are not read.
        seqlens_kvcache: int32 [B], keys of a request with the new ones; what exceeds max_pages * page_size is not seen.
        max_seqlens_q: new tokens of a request at most; accepted for compatibility, every token is computed whatever it
            says. A tensor is not read.
        output: BF16 [total, num_q_heads, v_dim], inner dim packed; written in place and returned.
        softmax_scale: factor of the scores, default head_dim ** -0.5.
        window: keys that a token sees, itself included; None for all.
        logit_cap: c in c * tanh(score / c).
        sinks: float32 [num_q_heads], a logit that takes part in the softmax and has no value.
        causal: False lets a token also see the keys after it.
        return_lse: also return the natural log-sum-exp of the scores, float32 [total, num_q_heads], -inf without keys.
        plan: run this plan instead of the analytic choice.

    Returns:
        BF16 [total, num_q_heads, v_dim], or (that, lse).

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: FlashAttention's online softmax (Dao et al., 2022) over pages, with the roles of warps of FlashAttention-3.
    """
    if torch.compiler.is_compiling():
        args = (q, kcache, vcache, cu_seqlens_q, block_ids, seqlens_kvcache, max_seqlens_q, softmax_scale, window,
                logit_cap, sinks, causal, return_lse, plan)  # fmt: skip
        return ops.traced("attention_with_kvcache_prefill_bf16", args, output, return_lse)
    return entry.prefill(
        "attention_with_kvcache_prefill_bf16", q, kcache, vcache, cu_seqlens_q, block_ids, seqlens_kvcache,
        max_seqlens_q, (None, None, None), -1, output, softmax_scale, window, logit_cap, sinks, causal, return_lse,
        plan,
    )  # fmt: skip


def attention_with_kvcache_prefill_fp8(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    qscale: torch.Tensor,
    kscale: torch.Tensor,
    vscale: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    block_ids: torch.Tensor,
    seqlens_kvcache: torch.Tensor,
    max_seqlens_q: int | torch.Tensor,
    quant_type: QuantType | int = _QT1,
    output: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
    plan: Plan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention_with_kvcache_prefill_bf16` for e4m3 queries and caches; the output is BF16.

    Args:
        q: float8_e4m3fn [total, num_q_heads, head_dim].
        kcache, vcache: float8_e4m3fn [num_pages, page_size, num_kv_heads, head_dim or v_dim].
        qscale: float32 [B, num_q_heads, Lpad], Lpad >= max_seqlens_q: the scale of the i-th new token of request b is
            qscale[b, head, i]; a token beyond Lpad has the scale 0. All scales multiply the stored value.
        kscale: quant_type 1: float32 [1]. quant_type 0: one scale a token and KV head, float32
            [num_pages, rows, num_kv_heads, n] (or its bytes as float8): token t of a page at [t // n, head, t % n].
        vscale: float32 [1] for quant_type 1, [num_kv_heads] for 0.
        cu_seqlens_q, block_ids, seqlens_kvcache: as in `attention_with_kvcache_prefill_bf16`.
        max_seqlens_q, output, softmax_scale, window: likewise.
        quant_type: `QuantType` or its value, 0 or 1.
        logit_cap, sinks, causal, return_lse, plan: as in `attention_with_kvcache_prefill_bf16`.

    Returns:
        BF16 [total, num_q_heads, v_dim], or (that, float32 lse [total, num_q_heads]).

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: as `attention_with_kvcache_prefill_bf16`; e4m3 by Micikevicius et al., "FP8 formats for deep learning"
        (2022).
    """
    quant = 1 if quant_type is _QT1 else validate.quant_type("attention_with_kvcache_prefill_fp8", quant_type)
    if torch.compiler.is_compiling():
        args = (q, kcache, vcache, qscale, kscale, vscale, cu_seqlens_q, block_ids, seqlens_kvcache, max_seqlens_q,
                quant, softmax_scale, window, logit_cap, sinks, causal, return_lse, plan)  # fmt: skip
        return ops.traced("attention_with_kvcache_prefill_fp8", args, output, return_lse)
    return entry.prefill(
        "attention_with_kvcache_prefill_fp8", q, kcache, vcache, cu_seqlens_q, block_ids, seqlens_kvcache,
        max_seqlens_q, (qscale, kscale, vscale), quant, output, softmax_scale, window, logit_cap, sinks, causal,
        return_lse, plan,
    )  # fmt: skip


def attention_prefill_bf16(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqlens_q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlens_q: int | torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
    plan: Plan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Self attention of ragged prompts, without a cache: token i of a request sees its tokens i - window < j <= i.

    Args:
        q: BF16 [total, num_q_heads, head_dim], requests one after the other; inner dim packed, so that slices of a
            fused qkv are fine.
        k, v: BF16 [total, num_kv_heads, head_dim or v_dim], as q.
        seqlens_q: int32 [B]; accepted for compatibility, cu_seqlens_q decides.
        cu_seqlens_q: int32 [B + 1], starts at 0 and does not fall. Rows from cu_seqlens_q[B] on become zeros.
        max_seqlens_q, output, softmax_scale, window: as in `attention_with_kvcache_prefill_bf16`.
        logit_cap, sinks, causal, return_lse, plan: likewise.

    Returns:
        BF16 [total, num_q_heads, v_dim], or (that, float32 lse [total, num_q_heads]).

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: as `attention_with_kvcache_prefill_bf16`.
    """
    if torch.compiler.is_compiling():
        args = (q, k, v, seqlens_q, cu_seqlens_q, max_seqlens_q, softmax_scale, window, logit_cap, sinks, causal,
                return_lse, plan)  # fmt: skip
        return ops.traced("attention_prefill_bf16", args, output, return_lse)
    return entry.prefill(
        "attention_prefill_bf16", q, k, v, cu_seqlens_q, None, seqlens_q, max_seqlens_q, (None, None, None), -1,
        output, softmax_scale, window, logit_cap, sinks, causal, return_lse, plan,
    )  # fmt: skip
