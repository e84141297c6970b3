"""Public functions of paged decode attention."""

from __future__ import annotations

import torch

from hpc.attention.decode import arguments, choose, entry, ops
from hpc.common.quant import QuantType

_QT1 = QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR


def attention_decode_bf16(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    block_ids: torch.Tensor,
    num_seq_kvcache: torch.Tensor,
    mtp: int = 0,
    new_kv_included: bool = False,
    splitk: bool = True,
    task_map: torch.Tensor | None = None,
    split_flag: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: choose.Plan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's newest tokens over its paged BF16 cache.

    Request b has L = num_seq_kvcache[b] (+ S if not new_kv_included) keys, S = mtp + 1. Its query token i sees the keys
    j with L - S + 1 + i - window <= j < L - S + 1 + i. A row that sees no key is zero. New K and V are in the cache
    already. Runs on the current stream, synchronises nothing, and can be captured in a CUDA graph and replayed with
    other lengths. For inference: no gradient flows. Off a GPU it computes the reference.

    Args:
        q: BF16 [B * S, num_q_heads, head_dim], request-major, inner dim packed; head_dim 8 to 256.
        kcache: BF16 [num_pages, page_size, num_kv_heads, head_dim]; dims 0-2 may have any strides (NHD, HND, slices);
            page_size a power of two up to 256; num_q_heads / num_kv_heads an integer from 1 to 64.
        vcache: BF16 [num_pages, page_size, num_kv_heads, v_dim], as kcache.
        block_ids: int32 [B, max_pages]; entry i is the page of tokens [i * page_size, (i + 1) * page_size). Entries
            past the live range are not read.
        num_seq_kvcache: int32 [B] KV lengths; what exceeds max_pages * page_size is not seen.
        mtp: draft tokens a request beyond the first (query tokens a request - 1), 0 to 15.
        new_kv_included: whether num_seq_kvcache counts this step's tokens.
        splitk: False runs each request in one chunk; needs task_map=None.
        task_map: int8 or int32 [words], filled by `assign_attention_decode_task` for the same lengths, heads, S, window
            and new_kv_included: work is balanced over the multiprocessors. A map made for another call gives NaN. One
            call at a time may use a map. None: a static split of each request.
        split_flag: accepted for compatibility, int32 [B, num_kv_heads]; neither read nor written.
        output: BF16 [B * S, num_q_heads, v_dim], inner dim packed; written in place and returned.
        softmax_scale: factor of the scores, default head_dim ** -0.5.
        window: keys that a token sees, itself included; None for all.
        logit_cap: c in c * tanh(score / c).
        sinks: float32 [num_q_heads], a logit that takes part in the softmax and has no value.
        return_lse: also return the natural log-sum-exp of the scores, float32 [B * S, num_q_heads], -inf without keys.
        batch_invariant: bits of a request do not depend on the batch around it; needs task_map=None.
        plan: run this plan instead of the analytic choice.

    Returns:
        BF16 [B * S, num_q_heads, v_dim], or (that, lse).

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: FlashAttention's online softmax (Dao et al., 2022), split-KV with log-sum-exp merge (Flash-Decoding, 2023).
    """
    if torch.compiler.is_compiling():
        args = (q, kcache, vcache, block_ids, num_seq_kvcache, mtp, new_kv_included, splitk, task_map, split_flag,
                softmax_scale, window, logit_cap, sinks, return_lse, batch_invariant, plan)  # fmt: skip
        return ops.traced("attention_decode_bf16", args, output, return_lse)
    return entry.decode(
        "attention_decode_bf16", q, kcache, vcache, block_ids, num_seq_kvcache, (None, None, None), -1, mtp,
        new_kv_included, splitk, task_map, split_flag, output, softmax_scale, window, logit_cap, sinks, return_lse,
        batch_invariant, plan,
    )  # fmt: skip


def attention_decode_fp8(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    block_ids: torch.Tensor,
    num_seq_kvcache: torch.Tensor,
    qscale: torch.Tensor,
    kscale: torch.Tensor,
    vscale: torch.Tensor,
    mtp: int = 0,
    new_kv_included: bool = False,
    quant_type: QuantType | int = _QT1,
    splitk: bool = True,
    task_map: torch.Tensor | None = None,
    split_flag: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: choose.Plan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention_decode_bf16` for e4m3 queries and caches; probabilities stay 16-bit, the output is BF16.

    Args:
        q: float8_e4m3fn [B * S, num_q_heads, head_dim].
        kcache, vcache: float8_e4m3fn [num_pages, page_size, num_kv_heads, head_dim or v_dim].
        qscale: float32 [B * S, num_q_heads]; all scales multiply the stored value.
        kscale: quant_type 1: float32 [1]. quant_type 0: one scale a token and KV head, float32
            [num_pages, rows, num_kv_heads, n] (or its bytes as float8): token t of a page at [t // n, head, t % n].
        vscale: float32 [1] for quant_type 1, [num_kv_heads] for 0.
        quant_type: `QuantType` or its value, 0 or 1.
        block_ids, num_seq_kvcache, mtp, new_kv_included, splitk, task_map: as in `attention_decode_bf16`.
        split_flag, output, softmax_scale, window, logit_cap, sinks: likewise.
        return_lse, batch_invariant, plan: likewise.

    Returns:
        BF16 [B * S, num_q_heads, v_dim], or (that, float32 lse [B * S, num_q_heads]).

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: as `attention_decode_bf16`; e4m3 by Micikevicius et al., "FP8 formats for deep learning" (2022).
    """
    quant = 1 if quant_type is _QT1 else arguments.quant_type("attention_decode_fp8", quant_type)
    if torch.compiler.is_compiling():
        args = (q, kcache, vcache, block_ids, num_seq_kvcache, qscale, kscale, vscale, mtp, new_kv_included, quant,
                splitk, task_map, split_flag, softmax_scale, window, logit_cap, sinks, return_lse, batch_invariant,
                plan)  # fmt: skip
        return ops.traced("attention_decode_fp8", args, output, return_lse)
    return entry.decode(
        "attention_decode_fp8", q, kcache, vcache, block_ids, num_seq_kvcache, (qscale, kscale, vscale), quant, mtp,
        new_kv_included, splitk, task_map, split_flag, output, softmax_scale, window, logit_cap, sinks, return_lse,
        batch_invariant, plan,
    )  # fmt: skip
