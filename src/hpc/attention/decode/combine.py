"""Merge of the partial results of requests that several programs shared (see ``kernels.py``)."""

import triton
import triton.language as tl

from hpc.attention.decode.kernels import ENTRY, FIRST_MAX, store_result, tile_range, total_length
from hpc.common.triton_helpers import pdl_launch, pdl_wait


@triton.jit(do_not_specialize=["num_requests", "max_pages", "signature", "window"])
def _combine_kernel(
    part_ptr, ml_ptr, o_ptr, lse_ptr, seq_lens_ptr, task_map_ptr, vscale_ptr, sinks_ptr,
    num_requests, max_pages, signature, window, stride_o_tok, stride_o_head,
    HQ: tl.constexpr, HKV: tl.constexpr, S: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    QUANT_TYPE: tl.constexpr, NEW_KV_INCLUDED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    RETURN_LSE: tl.constexpr, STATIC: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (bins - 1, HKV, ceil(S*G / ROWS)); static: (num_requests, HKV, the same).

    Dynamic: program g - 1 looks at bin g and works iff that bin continues a request begun in bin g - 1, so each shared
    request has one program per row group. Tensors as in ``_decode_attention_kernel``. ``CHUNKS`` partial results
    (power of two) are loaded at a time, independently of each other, after all weights are known; the sums run in a
    fixed order, so equal inputs give equal bits.
    """
    h = tl.program_id(1)
    G: tl.constexpr = HQ // HKV
    R: tl.constexpr = S * G
    pdl_wait(PDL)
    pdl_launch(PDL)

    if STATIC:
        b = tl.program_id(0)
        capacity = (tl.minimum(max_pages.to(tl.int64) * PAGE, 2147483647 - 64)).to(tl.int32)
        length = total_length(seq_lens_ptr, b, capacity, S, NEW_KV_INCLUDED)
        t_first, t_last = tile_range(length, window, S, HAS_WINDOW)
        n_tiles = t_last - t_first
        chunk = tl.maximum((n_tiles + NUM_SPLITS - 1) // NUM_SPLITS, MIN_CHUNK)
        n_chunks = (n_tiles + chunk - 1) // chunk
        first_slot = b * NUM_SPLITS
        act = n_chunks > 1
    else:
        g = tl.program_id(0) + 1
        entry = task_map_ptr + g * ENTRY
        b = tl.load(entry + 1)
        g0 = tl.load(entry + 6)
        n_chunks = tl.load(entry + 7)
        act = (tl.load(entry) == signature) & (n_chunks > 0) & (g == g0 + 1) & (b < num_requests)
        first_slot = 2 * g0
    if act:
        rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        live = rows < R
        offs_c = tl.arange(0, CHUNKS)
        offs_d = tl.arange(0, BLOCK_DV)

        m = tl.full([ROWS], FIRST_MAX, tl.float32)
        for c0 in range(0, n_chunks, CHUNKS):
            part_rows = _part_rows(first_slot, c0 + offs_c, h, HKV, R, STATIC)[:, None] + rows[None, :]
            mask = (c0 + offs_c < n_chunks)[:, None] & live[None, :]
            m = tl.maximum(m, tl.max(tl.load(ml_ptr + part_rows * 2, mask=mask, other=FIRST_MAX), 0))

        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        for c0 in range(0, n_chunks, CHUNKS):
            part_rows = _part_rows(first_slot, c0 + offs_c, h, HKV, R, STATIC)[:, None] + rows[None, :]
            mask = (c0 + offs_c < n_chunks)[:, None] & live[None, :]
            parts = tl.load(
                part_ptr + (part_rows * DV)[:, :, None] + offs_d[None, None, :],
                mask=mask[:, :, None] & (offs_d < DV)[None, None, :], other=0.0,
            )  # fmt: skip
            weight = tl.exp2(tl.load(ml_ptr + part_rows * 2, mask=mask, other=float("-inf")) - m[None, :])
            l += tl.sum(weight * tl.load(ml_ptr + part_rows * 2 + 1, mask=mask, other=0.0), 0)
            acc += tl.sum(weight[:, :, None] * parts, 0)

        value_scale = 1.0
        if QUANT_TYPE == 1:
            value_scale = tl.load(vscale_ptr)
        if QUANT_TYPE == 0:
            value_scale = tl.load(vscale_ptr + h)
        store_result(acc, m, l, rows, h, value_scale, sinks_ptr, o_ptr, lse_ptr, stride_o_tok, stride_o_head,
                     b * S, R, G, HQ, DV, BLOCK_DV, HAS_SINKS, RETURN_LSE, INTERPRET)  # fmt: skip


@triton.jit
def _part_rows(first_slot, chunk, h, HKV: tl.constexpr, R: tl.constexpr, STATIC: tl.constexpr):
    """First row of chunks in the partial buffers. Dynamic: chunk 0 lies in the second slot of its bin, where a request
    starts, the others in the first slot of theirs, where one continues."""
    if STATIC:
        slot = first_slot + chunk
    else:
        slot = first_slot + 2 * chunk + (chunk == 0).to(tl.int32)
    return (slot.to(tl.int64) * HKV + h) * R
