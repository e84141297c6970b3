"""Paged decode attention in plain Triton: runs on any GPU and, interpreted, on a CPU.

One program owns one bin of 64-token KV tiles, one KV head and ``BLOCK_R`` query rows (rows of a request: new token
times query head of the group). It walks its tiles request by request with an online softmax in base 2. A request that
lies inside one bin is finished here; one that is spread over bins leaves a partial result per bin, merged by
``merge._merge_kernel``. Bins come from the task map (dynamic) or from ``NUM_SPLITS`` (static).

Numbers: FP8 operands are widened to fp16, where every e4m3 value and its products with fp32 accumulation are exact;
probabilities are rounded to 16 bits (fp16 beside FP8 caches, bf16 beside bf16 ones), sums use the unrounded ones.

Where the device has no e4m3 conversion (SM80, the interpreter) the caller passes fp8 tensors as ``view(torch.uint8)``.
"""

import triton
import triton.language as tl

from hpc.attention.decode import plan
from hpc.common.triton_helpers import pdl_launch, pdl_wait, probability_operand, to_bf16, widen

TILE = tl.constexpr(plan.TILE)
ENTRY = tl.constexpr(plan.ENTRY_WORDS)
LONGEST = tl.constexpr(plan.LONGEST)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FIRST_MAX = tl.constexpr(
    -1e30
)  # running maximum before any key: finite, so exp2(-inf - m) is 0 and never NaN


@triton.jit
def tile_range(length, window, S: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Tiles [first, last) of a request that hold keys some query sees; never empty, so length 0 is written too."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - S + 1 - window, 0) // TILE
    last = tl.maximum(first + 1, (length + TILE - 1) // TILE)
    return first, last


@triton.jit
def total_length(seq_lens_ptr, b, capacity, S: tl.constexpr, NEW_KV_INCLUDED: tl.constexpr):
    """KV length of request b with its new tokens, within what the page table can hold."""
    length = tl.load(seq_lens_ptr + b)
    if not NEW_KV_INCLUDED:
        length = tl.minimum(length, 2147483647 - S) + S
    return tl.minimum(tl.maximum(length, 0), capacity)


@triton.jit
def store_result(
    acc, m, l, rows, h, value_scale, sinks_ptr, o_ptr, lse_ptr, stride_o_tok, stride_o_head, first_token,
    R: tl.constexpr, G: tl.constexpr, HQ: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr, RETURN_LSE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Normalise [rows, BLOCK_DV] sums (m in log2 units, l relative to it), add the sink, write output and lse."""
    offs_d = tl.arange(0, BLOCK_DV)
    live = rows < R
    head = h * G + rows % G
    empty = l == 0.0  # no visible key: output 0, lse -inf
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2E
        m_all = tl.maximum(m, sink)
        shrink = tl.exp2(m - m_all)
        l = l * shrink + tl.exp2(sink - m_all)
        acc = acc * shrink[:, None]
        m = m_all
    l = tl.where(empty, 1.0, l)
    out = tl.where(empty[:, None], 0.0, acc * (value_scale / l)[:, None])
    token = (first_token + rows // G).to(tl.int64)
    o_row = o_ptr + token * stride_o_tok + head.to(tl.int64) * stride_o_head
    tl.store(
        o_row[:, None] + offs_d[None, :], to_bf16(out, INTERPRET), mask=live[:, None] & (offs_d < DV)[None, :]
    )
    if RETURN_LSE:
        lse = tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)
        tl.store(lse_ptr + token * HQ + head, lse, mask=live)


@triton.jit
def _attend(
    q, row_scale, row_end, first_tile, last_tile, length, h, page_ids_ptr,
    k_ptr, v_ptr, kscale_ptr, num_pages,
    stride_k_page, stride_k_tok, stride_k_head, stride_v_page, stride_v_tok, stride_v_head,
    stride_ks_page, stride_ks_row, stride_ks_head, window, logit_cap,
    S: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, FP8: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    SCALES_PER_ROW: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Online softmax of BLOCK_R rows over tiles [first_tile, last_tile) of one request: (acc, m, l)."""
    offs_n = tl.arange(0, TILE)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_DV)
    k_head = k_ptr + h.to(tl.int64) * stride_k_head
    v_head = v_ptr + h.to(tl.int64) * stride_v_head
    live_first = 0
    if HAS_WINDOW:
        live_first = tl.maximum(length - S + 1 - window, 0)
    m = tl.full([BLOCK_R], FIRST_MAX, tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        n = tile * TILE + offs_n
        live = n < length
        if HAS_WINDOW:
            live = live & (n >= live_first)
        # The page id: one per tile, or one per token where pages are smaller than a tile. Entries past the live range
        # are never read; an id that names no page reads as a page of zeros.
        if PAGE >= TILE:
            page = tl.load(page_ids_ptr + tile * TILE // PAGE, mask=tile * TILE < length, other=-1).to(
                tl.int64
            )
            real = live & (page >= 0) & (page < num_pages)
        else:
            page = tl.load(page_ids_ptr + n // PAGE, mask=live, other=-1).to(tl.int64)
            real = (page >= 0) & (page < num_pages)
        row = n % PAGE
        if WIDE:
            row = row.to(tl.int64)
        k_rows = page * stride_k_page + row * stride_k_tok
        k = tl.load(
            k_head + k_rows[:, None] + offs_d[None, :], mask=real[:, None] & (offs_d < D)[None, :], other=0.0
        )
        scores = tl.dot(q, tl.trans(widen(k, INTERPRET))) * row_scale[:, None]
        if TOKEN_SCALES:
            ks_rows = page * stride_ks_page + (row // SCALES_PER_ROW) * stride_ks_row + row % SCALES_PER_ROW
            key_scale = tl.load(kscale_ptr + h.to(tl.int64) * stride_ks_head + ks_rows, mask=real, other=0.0)
            scores = scores * key_scale[None, :]
        if HAS_CAP:
            # tanh(x) = 1 - 2/(exp(2x) + 1): finite at both ends; back to log2 units
            grown = tl.exp2(scores * (2.0 * LOG2E / logit_cap))
            scores = (logit_cap * LOG2E) * (1.0 - 2.0 / (grown + 1.0))
        seen = n[None, :] < row_end[:, None]
        if HAS_WINDOW:
            seen = seen & (n[None, :] >= row_end[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shrink = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l = l * shrink + tl.sum(p, 1)
        m = m_new
        v_rows = page * stride_v_page + row * stride_v_tok
        v = tl.load(
            v_head + v_rows[:, None] + offs_v[None, :], mask=real[:, None] & (offs_v < DV)[None, :], other=0.0
        )
        acc = tl.dot(probability_operand(p, FP8, INTERPRET), widen(v, INTERPRET), acc * shrink[:, None])
    return acc, m, l


@triton.jit
def _write_nan(
    b, num_requests, num_bins, h, rows, o_ptr, lse_ptr, stride_o_tok, stride_o_head,
    S: tl.constexpr, R: tl.constexpr, G: tl.constexpr, HQ: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, RETURN_LSE: tl.constexpr,
):  # fmt: skip
    """NaN to the rows of requests b, b + num_bins, ...: the task map was made for another call."""
    offs_d = tl.arange(0, BLOCK_DV)
    nan = float("nan")
    head = h * G + rows % G
    while b < num_requests:
        token = (b * S + rows // G).to(tl.int64)
        o_row = o_ptr + token * stride_o_tok + head.to(tl.int64) * stride_o_head
        nans = tl.full([rows.shape[0], BLOCK_DV], nan, tl.float32).to(tl.bfloat16)
        tl.store(o_row[:, None] + offs_d[None, :], nans, mask=(rows < R)[:, None] & (offs_d < DV)[None, :])
        if RETURN_LSE:
            tl.store(lse_ptr + token * HQ + head, tl.full([rows.shape[0]], nan, tl.float32), mask=rows < R)
        b += num_bins


@triton.jit(
    do_not_specialize=[
        "num_requests", "num_pages", "max_pages", "signature", "softmax_scale", "logit_cap", "window",
        "stride_ids", "stride_qs_tok", "stride_ks_page", "stride_ks_row", "stride_ks_head",
        "NUM_SPLITS", "MIN_CHUNK",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "block_ids_ptr", "seq_lens_ptr", "task_map_ptr", "qscale_ptr", "kscale_ptr", "vscale_ptr",
        "sinks_ptr",
    ],
)  # fmt: skip
def _decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, part_ptr, ml_ptr, block_ids_ptr, seq_lens_ptr, task_map_ptr,
    qscale_ptr, kscale_ptr, vscale_ptr, sinks_ptr,
    num_requests, num_pages, max_pages, signature, softmax_scale, logit_cap, window,
    stride_ids, stride_q_tok, stride_q_head, stride_qs_tok,
    stride_k_page, stride_k_tok, stride_k_head, stride_v_page, stride_v_tok, stride_v_head,
    stride_ks_page, stride_ks_row, stride_ks_head, stride_o_tok, stride_o_head,
    HQ: tl.constexpr, HKV: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUANT_TYPE: tl.constexpr, SCALES_PER_ROW: tl.constexpr, NEW_KV_INCLUDED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, RETURN_LSE: tl.constexpr,
    STATIC: tl.constexpr, NUM_SPLITS, MIN_CHUNK,
    WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (bins, HKV, row blocks); static: bins = num_requests * NUM_SPLITS.

    Tensors: q [B*S, HQ, D], k [pages, PAGE, HKV, D], v [.., DV] (fp8 or its bytes, or bf16), o [B*S, HQ, DV] bf16,
    lse [B*S, HQ] fp32 contiguous, block_ids [B, max_pages] int32, seq_lens [B] int32, task_map int32 at its variant's
    first entry, qscale [B*S, HQ] fp32, kscale [1] or [pages, rows, HKV, SCALES_PER_ROW] fp32, vscale [1] or [HKV] fp32,
    sinks [HQ] fp32, part [slots, HKV, S*G, DV] and ml [slots, HKV, S*G, 2] fp32. Any pointer a call does not use may
    be any valid tensor. QUANT_TYPE: -1 bf16, 0 or 1 fp8. WIDE: PAGE times a token stride of a cache is 2^31 or more.
    Strides in elements; the innermost one is 1 everywhere. Warps: 4; 8 if a head dim is over 128 and BLOCK_R over 16.
    """
    bin_id = tl.program_id(0)
    h = tl.program_id(1)
    G: tl.constexpr = HQ // HKV
    R: tl.constexpr = S * G
    FP8: tl.constexpr = QUANT_TYPE >= 0
    rows = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    capacity = (tl.minimum(max_pages.to(tl.int64) * PAGE, LONGEST)).to(tl.int32)
    pdl_wait(PDL)
    pdl_launch(PDL)

    if STATIC:
        b = bin_id // NUM_SPLITS
        length = total_length(seq_lens_ptr, b, capacity, S, NEW_KV_INCLUDED)
        t_first, t_last = tile_range(length, window, S, HAS_WINDOW)
        chunk = tl.maximum((t_last - t_first + NUM_SPLITS - 1) // NUM_SPLITS, MIN_CHUNK)
        t = t_first + (bin_id % NUM_SPLITS) * chunk
        b_end = b
        t_end = tl.minimum(t + chunk, t_last)  # <= t: this split has nothing to do
    else:
        entry = task_map_ptr + bin_id * ENTRY
        b = tl.load(entry + 1)
        t = tl.load(entry + 2)
        b_end = tl.minimum(tl.load(entry + 3), num_requests)
        t_end = tl.load(entry + 4)
        n_chunks = tl.load(entry + 7)
        length = tl.minimum(tl.maximum(tl.load(entry + 5), 0), capacity)
        if tl.load(entry) != signature:
            _write_nan(bin_id, num_requests, tl.num_programs(0), h, rows, o_ptr, lse_ptr, stride_o_tok, stride_o_head,
                       S, R, G, HQ, DV, BLOCK_DV, RETURN_LSE)  # fmt: skip
            b = num_requests
            b_end = num_requests
            t_end = t

    first_b = b
    scale_log2 = softmax_scale * LOG2E
    value_scale = 1.0
    if QUANT_TYPE == 1:
        scale_log2 = scale_log2 * tl.load(kscale_ptr)
        value_scale = tl.load(vscale_ptr)
    if QUANT_TYPE == 0:
        value_scale = tl.load(vscale_ptr + h)
    if HAS_CAP:
        # the cap acts on natural units; _attend returns to log2 units after it
        scale_log2 = scale_log2 / LOG2E

    while (b < b_end) | ((b == b_end) & (t < t_end)):
        t_first, t_last = tile_range(length, window, S, HAS_WINDOW)
        t_stop = t_last
        if b == b_end:
            t_stop = tl.minimum(t_last, t_end)
        token = (b * S + rows // G).to(tl.int64)
        head = h * G + rows % G
        q = tl.load(
            q_ptr + (token * stride_q_tok + head.to(tl.int64) * stride_q_head)[:, None] + offs_d[None, :],
            mask=(rows < R)[:, None] & (offs_d < D)[None, :], other=0.0,
        )  # fmt: skip
        row_scale = tl.full([BLOCK_R], 1.0, tl.float32) * scale_log2
        if FP8:
            row_scale = row_scale * tl.load(
                qscale_ptr + token * stride_qs_tok + head, mask=rows < R, other=0.0
            )
        acc, m, l = _attend(
            widen(q, INTERPRET), row_scale, length - S + 1 + rows // G, t, t_stop, length, h,
            block_ids_ptr + b.to(tl.int64) * stride_ids, k_ptr, v_ptr, kscale_ptr, num_pages,
            stride_k_page, stride_k_tok, stride_k_head, stride_v_page, stride_v_tok, stride_v_head,
            stride_ks_page, stride_ks_row, stride_ks_head, window, logit_cap,
            S, PAGE, D, DV, BLOCK_R, BLOCK_D, BLOCK_DV, FP8, QUANT_TYPE == 0, SCALES_PER_ROW, HAS_WINDOW, HAS_CAP,
            WIDE, STAGES, INTERPRET,
        )  # fmt: skip
        if STATIC:
            starts = t == t_first
            ends = t_stop == t_last
        else:  # by the schedule alone, whatever the lengths are now: the merge must agree
            starts = (b != first_b) | (n_chunks == 0)
            ends = b < b_end
        if starts & ends:
            store_result(acc, m, l, rows, h, value_scale, sinks_ptr, o_ptr, lse_ptr, stride_o_tok, stride_o_head,
                         b * S, R, G, HQ, DV, BLOCK_DV, HAS_SINKS, RETURN_LSE, INTERPRET)  # fmt: skip
        else:
            if STATIC:
                slot = bin_id
            else:
                slot = 2 * bin_id + starts.to(tl.int32)
            _store_partial(acc, m, l, (slot.to(tl.int64) * HKV + h) * R + rows, rows < R, part_ptr, ml_ptr,
                           DV, BLOCK_DV)  # fmt: skip
        b += 1
        t = 0
        if (b < b_end) | ((b == b_end) & (b < num_requests)):
            length = total_length(seq_lens_ptr, b, capacity, S, NEW_KV_INCLUDED)
            t, t_last = tile_range(length, window, S, HAS_WINDOW)


@triton.jit
def _store_partial(acc, m, l, part_rows, live, part_ptr, ml_ptr, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Unnormalised sums, their maximum (log2 units) and weight of one chunk."""
    offs_d = tl.arange(0, BLOCK_DV)
    mask = live[:, None] & (offs_d < DV)[None, :]
    tl.store(part_ptr + (part_rows * DV)[:, None] + offs_d[None, :], acc, mask=mask)
    tl.store(ml_ptr + part_rows * 2, m, mask=live)
    tl.store(ml_ptr + part_rows * 2 + 1, l, mask=live)
