"""Merge of the partial results of requests that several CTAs shared."""

import triton
import triton.language as tl

from hpc.attention.decode import plan
from hpc.common.triton_helpers import pdl_launch, pdl_wait, to_bf16

_TILE = tl.constexpr(plan.TILE)
_MERGE = tl.constexpr(plan.MERGE_WORDS)
_M_INIT = tl.constexpr(-1.0e30)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _static_chunks(
    seq_ptr, b, extra, max_tokens, new_tokens, window, num_splits, min_chunk, WINDOW: tl.constexpr
):
    """Chunks of request b on the static path, as `plan.static_chunk_tiles` cuts it."""
    length = tl.minimum(tl.maximum(tl.minimum(tl.load(seq_ptr + b), max_tokens) + extra, 0), max_tokens)
    first = 0
    if WINDOW:
        first = tl.maximum(length - new_tokens + 1 - window, 0) // _TILE
    tiles = tl.maximum((length + _TILE - 1) // _TILE - first, 1)
    chunk = tl.maximum((tiles + num_splits - 1) // num_splits, min_chunk)
    return (tiles + chunk - 1) // chunk


@triton.jit(
    do_not_specialize=[
        "merge_offset",
        "extra",
        "max_tokens",
        "sig",
        "window",
        "num_splits",
        "min_chunk",
        "row_blocks",
    ],
    do_not_specialize_on_alignment=["seq_ptr", "task_map_ptr", "vs_ptr", "sinks_ptr", "lse_ptr"],
)
def _merge_kernel(
    ml_ptr, o_ptr, lse_ptr, seq_ptr, task_map_ptr, vs_ptr, sinks_ptr,
    merge_offset, part_offset, extra, max_tokens, sig, window, num_splits, min_chunk, row_blocks,
    stride_o_tok, stride_o_head,
    HQ: tl.constexpr, HKV: tl.constexpr, S: tl.constexpr, DV: tl.constexpr,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, DB: tl.constexpr, VSCALE: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, STATIC: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """out = sum_c 2^(m_c - m) O_c / sum_c 2^(m_c - m) l_c over the chunks c of one request, m = max_c m_c.

    Grid (merge entries, HKV * row_blocks, ceil(DV / DB)); static: (batch, the same). A program merges ROWS rows of one
    kv head. What says how many chunks there are is read before the wait for the attention kernel; after it all weights
    and the first CHUNKS partials are asked for at once, so the merge costs one memory latency. The order of the sums
    is fixed: equal inputs give equal bits.

    ml_ptr [slots, HKV, S*G, 2] fp32 is followed, part_offset words on, by the partials [slots, HKV, S*G, DV]. The task
    map's merge entries start at word merge_offset. VSCALE 0: none, 1: one, 2: one a kv head.
    """
    merge_ptr = task_map_ptr.to(tl.pointer_type(tl.int32)) + merge_offset
    part_ptr = ml_ptr + part_offset
    i = tl.program_id(0)
    h = tl.program_id(1) // row_blocks
    G: tl.constexpr = HQ // HKV
    pdl_launch(PDL)
    if STATIC:
        b = i
        n_chunks = _static_chunks(seq_ptr, b, extra, max_tokens, S, window, num_splits, min_chunk, WINDOW)
        slot0 = b * num_splits
        n_chunks = tl.where(n_chunks > 1, n_chunks, 0)
    else:
        b = tl.load(merge_ptr + i * _MERGE + 1)
        slot0 = tl.load(merge_ptr + i * _MERGE + 2) * 2
        n_chunks = tl.load(merge_ptr + i * _MERGE + 3)
        n_chunks = tl.where(tl.load(merge_ptr + i * _MERGE) == sig, n_chunks, 0)
    pdl_wait(PDL)
    if n_chunks > 0:
        rows = (tl.program_id(1) % row_blocks) * ROWS + tl.arange(0, ROWS)
        d = tl.program_id(2) * DB + tl.arange(0, DB)
        live = rows < S * G
        m = tl.full([ROWS], _M_INIT, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DB], tl.float32)
        for c0 in range(0, n_chunks, CHUNKS):
            c = c0 + tl.arange(0, CHUNKS)
            if STATIC:
                slot = slot0 + c
            else:
                slot = slot0 + 2 * c + (c == 0).to(tl.int32)
            part_row = (slot[:, None] * HKV + h) * (S * G) + rows[None, :]
            mask = (c < n_chunks)[:, None] & live[None, :]
            m_c = tl.load(ml_ptr + part_row.to(tl.int64) * 2, mask=mask, other=_M_INIT)
            l_c = tl.load(ml_ptr + part_row.to(tl.int64) * 2 + 1, mask=mask, other=0.0)
            o_c = tl.load(
                part_ptr + part_row.to(tl.int64)[:, :, None] * DV + d[None, None, :],
                mask=mask[:, :, None] & (d < DV)[None, None, :], other=0.0,
            )  # fmt: skip
            m_new = tl.maximum(m, tl.max(m_c, 0))
            keep = tl.exp2(m - m_new)
            weight = tl.exp2(m_c - m_new[None, :])
            l = l * keep + tl.sum(l_c * weight, 0)
            acc = acc * keep[:, None] + tl.sum(o_c * weight[:, :, None], 0)
            m = m_new
        head = h * G + rows % G
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=live, other=float("-inf")) * _LOG2E
            m_new = tl.where(l > 0, tl.maximum(m, sink), m)
            shrink = tl.exp2(m - m_new)
            l = tl.where(l > 0, l * shrink + tl.exp2(sink - m_new), l)
            acc *= shrink[:, None]
            m = m_new
        if LSE:
            if tl.program_id(2) == 0:
                lse = tl.where(l > 0, (m + tl.log2(tl.where(l > 0, l, 1.0))) / _LOG2E, float("-inf"))
                tl.store(lse_ptr + (b * S + rows // G) * HQ + head, lse, mask=live)
        scale = tl.where(l > 0, 1.0 / tl.where(l > 0, l, 1.0), 0.0)
        if VSCALE == 1:
            scale *= tl.load(vs_ptr)
        if VSCALE == 2:
            scale *= tl.load(vs_ptr + h)
        out = o_ptr + (b * S).to(tl.int64) * stride_o_tok
        offs = (rows // G)[:, None] * stride_o_tok + head[:, None] * stride_o_head + d[None, :]
        tl.store(out + offs, to_bf16(acc * scale[:, None], INTERPRET), mask=live[:, None] & (d < DV)[None, :])
