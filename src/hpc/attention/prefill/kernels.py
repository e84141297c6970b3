"""Prefill attention in plain Triton: runs on any GPU and, interpreted, on a CPU.

One program owns one tile of the table (``schedule``): up to TILE_TOKENS = BLOCK_M / PACK new tokens of one request
times PACK query heads of one KV head, row = token * PACK + head. It walks the keys in blocks of BLOCK_N with an online
softmax in base 2; only blocks that cross the diagonal, the window's edge or the end of the keys are masked.

Numbers: FP8 operands are widened to fp16, where every e4m3 value and its products with fp32 accumulation are exact;
probabilities are rounded to 16 bits (fp16 beside FP8, bf16 beside bf16), sums use the unrounded ones.

With SPLITS > 1 a tile has as many programs, each with an equal part of its key blocks: its results go to a buffer in
fp32, with their lse, and `combine` joins them. Parts follow from the lengths on the device.

Where the device has no e4m3 conversion (SM80, the interpreter) the caller passes fp8 tensors as ``view(torch.uint8)``.
"""

import triton
import triton.language as tl

from hpc.attention.prefill.schedule import ENTRY, HEADER
from hpc.common.triton_helpers import pdl_launch, pdl_wait, probability_operand, to_bf16, widen

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FIRST_MAX = tl.constexpr(
    -1e30
)  # running maximum before any key: finite, so exp2(-inf - m) is 0 and never NaN


@triton.jit
def _page_ids(page_ids_ptr, j, keys, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of key block j, or of each of its keys where pages are smaller; -1 past the live range, never read."""
    if PAGE == 0:
        return 0
    elif PAGE >= BLOCK_N:
        return tl.load(page_ids_ptr + j * BLOCK_N // PAGE, mask=j * BLOCK_N < keys, other=-1)
    else:
        n = j * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(page_ids_ptr + n // PAGE, mask=n < keys, other=-1)


@triton.jit
def _attend(
    acc, m, l, q, row_scale, position, block, last_block, keys, first_row, page_ids_ptr, k_ptr, v_ptr, kscale_ptr,
    num_pages, stride_k_page, stride_k_tok, stride_v_page, stride_v_tok, stride_ks_page, stride_ks_row, window,
    logit_cap,
    PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, FP8: tl.constexpr, TOKEN_SCALES: tl.constexpr, SCALES_PER_ROW: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Online softmax over key blocks [block, last_block): (acc, m, l). PAGE 0: keys lie row by row from first_row."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_DV)
    ahead = _page_ids(page_ids_ptr, block, keys, PAGE, BLOCK_N)
    for j in tl.range(block, last_block, num_stages=STAGES):
        n = j * BLOCK_N + offs_n
        live = n < keys
        # Page ids come one block early: the copies of K and V then depend on no load of their own iteration, which the
        # pipeliner would wait for. An id that names no page reads as a page of zeros.
        page = ahead
        ahead = _page_ids(page_ids_ptr, j + 1, keys, PAGE, BLOCK_N)
        if PAGE == 0:
            real = live
            k_rows = (first_row + n).to(tl.int64) * stride_k_tok
            v_rows = (first_row + n).to(tl.int64) * stride_v_tok
        else:
            page = page.to(tl.int64)
            real = live & (page >= 0) & (page < num_pages)
            row = n % PAGE
            if WIDE:
                row = row.to(tl.int64)
            k_rows = page * stride_k_page + row * stride_k_tok
            v_rows = page * stride_v_page + row * stride_v_tok
        k = tl.load(
            k_ptr + k_rows[:, None] + offs_d[None, :], mask=real[:, None] & (offs_d < D)[None, :], other=0.0
        )
        scores = tl.dot(q, tl.trans(widen(k, INTERPRET))) * row_scale[:, None]
        if TOKEN_SCALES:
            ks_rows = page * stride_ks_page + (row // SCALES_PER_ROW) * stride_ks_row + row % SCALES_PER_ROW
            scores = scores * tl.load(kscale_ptr + ks_rows, mask=real, other=0.0)[None, :]
        if CAP:
            # tanh(x) = 1 - 2/(exp(2x) + 1): finite at both ends; back to log2 units
            grown = tl.exp2(scores * (2.0 * LOG2E / logit_cap))
            scores = (logit_cap * LOG2E) * (1.0 - 2.0 / (grown + 1.0))
        if MASKED:
            seen = live[None, :]
            if CAUSAL:
                seen = seen & (n[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (n[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shrink = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l = l * shrink + tl.sum(p, 1)
        m = m_new
        v = tl.load(
            v_ptr + v_rows[:, None] + offs_v[None, :], mask=real[:, None] & (offs_v < DV)[None, :], other=0.0
        )
        acc = tl.dot(probability_operand(p, FP8, INTERPRET), widen(v, INTERPRET), acc * shrink[:, None])
    return acc, m, l


@triton.jit
def block_ranges(start, first, tokens, keys, window, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
                 WINDOW: tl.constexpr):  # fmt: skip
    """Key blocks of a tile: [lo, a) and [b, hi) need a mask, [a, b) are seen whole by every token."""
    hi_key = keys
    whole = keys
    if CAUSAL:
        hi_key = tl.minimum(tl.maximum(start + first + tokens, 0), keys)
        whole = tl.minimum(tl.maximum(start + first + 1, 0), keys)
    lo = 0
    a = 0
    if WINDOW:
        lo = tl.maximum(start + first - window + 1, 0) // BLOCK_N
        a = (tl.maximum(start + first + tokens - window, 0) + BLOCK_N - 1) // BLOCK_N
    hi = (hi_key + BLOCK_N - 1) // BLOCK_N
    a = tl.minimum(a, hi)
    return lo, a, tl.maximum(whole // BLOCK_N, a), hi


@triton.jit
def part_of(lo, a, b, hi, part, SPLITS: tl.constexpr):
    """The `block_ranges` of one of SPLITS parts, whose sizes differ by one block at most; empty ones have lo = hi."""
    blocks = tl.maximum(hi - lo, 0)
    first = lo + blocks * part // SPLITS
    last = lo + blocks * (part + 1) // SPLITS
    return first, tl.minimum(tl.maximum(a, first), last), tl.minimum(tl.maximum(b, first), last), last


@triton.jit(
    do_not_specialize=[
        "num_pages", "softmax_scale", "logit_cap", "window", "stride_ids", "stride_qs_req", "stride_qs_head", "qs_len",
        "stride_ks_page", "stride_ks_row", "stride_ks_head",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "table_ptr", "block_ids_ptr", "qscale_ptr", "kscale_ptr", "vscale_ptr", "sinks_ptr",
    ],
)  # fmt: skip
def _prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, table_ptr, block_ids_ptr, qscale_ptr, kscale_ptr, vscale_ptr, sinks_ptr,
    num_pages, softmax_scale, logit_cap, window, stride_ids, stride_q_tok, stride_q_head,
    stride_k_page, stride_k_tok, stride_k_head, stride_v_page, stride_v_tok, stride_v_head,
    stride_o_tok, stride_o_head, stride_qs_req, stride_qs_head, qs_len,
    stride_ks_page, stride_ks_row, stride_ks_head,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUANT_TYPE: tl.constexpr, SCALES_PER_ROW: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the table at most * SPLITS * HQ / PACK), heads fastest, so that heads of the same keys run side by
    side. SPLITS > 1: o fp32 [total * SPLITS, HQ, DV] and lse [total * SPLITS, HQ], a token's parts one after the other;
    LSE must be set and SINKS not.

    Tensors: q [total, HQ, D], k [pages, PAGE, HKV, D], v [.., DV] (PAGE 0: [total, HKV, D], no page stride), fp8 or its
    bytes or bf16; o [total, HQ, DV] bf16, lse [total, HQ] fp32 contiguous, table of `schedule`, block_ids
    [B, max_pages] int32, qscale [B, HQ, qs_len] fp32, kscale [1] or [pages, rows, HKV, SCALES_PER_ROW] fp32, vscale [1]
    or [HKV] fp32, sinks [HQ] fp32. A pointer that a call does not use may be any valid tensor. QUANT_TYPE: -1 bf16,
    0 or 1 fp8. PACK divides HQ / HKV. WIDE: PAGE times a token stride is 2^31 or more. Warps: 4 or 8.
    """
    pid = tl.program_id(0)
    NH: tl.constexpr = HQ // PACK
    G: tl.constexpr = HQ // HKV
    FP8: tl.constexpr = QUANT_TYPE >= 0
    pdl_wait(PDL)
    pdl_launch(PDL)
    tile = pid // NH
    if SPLITS > 1:
        part = tile % SPLITS
        tile = tile // SPLITS
    if tile >= tl.load(table_ptr):
        return
    entry = table_ptr + HEADER + tile * ENTRY
    row0 = tl.load(entry)
    tokens = tl.load(entry + 1)
    b = tl.load(entry + 2)
    first = tl.load(entry + 3)
    start = tl.load(entry + 4)
    keys = tl.load(entry + 5)
    r = tl.arange(0, BLOCK_M)
    token = r // PACK
    head = (pid % NH) * PACK + r % PACK
    h = (pid % NH) * PACK // G
    live = token < tokens
    offs_d = tl.arange(0, BLOCK_D)
    token_row = (row0 + token).to(tl.int64)
    q_rows = token_row * stride_q_tok + head.to(tl.int64) * stride_q_head
    q = tl.load(
        q_ptr + q_rows[:, None] + offs_d[None, :], mask=live[:, None] & (offs_d < D)[None, :], other=0.0
    )

    scale_log2 = softmax_scale * LOG2E
    value_scale = 1.0
    if QUANT_TYPE == 1:
        scale_log2 = scale_log2 * tl.load(kscale_ptr)
        value_scale = tl.load(vscale_ptr)
    if QUANT_TYPE == 0:
        value_scale = tl.load(vscale_ptr + h)
    if CAP:
        scale_log2 = (
            scale_log2 / LOG2E
        )  # the cap acts on natural units; _attend returns to log2 units after it
    row_scale = tl.full([BLOCK_M], 1.0, tl.float32) * scale_log2
    if FP8:
        at = b.to(tl.int64) * stride_qs_req + head.to(tl.int64) * stride_qs_head + first + token
        row_scale = row_scale * tl.load(
            qscale_ptr + at, mask=live & (first + token < qs_len) & (keys > 0), other=0.0
        )

    lo, lo_whole, hi_whole, hi = block_ranges(start, first, tokens, keys, window, BLOCK_N, CAUSAL, WINDOW)
    if SPLITS > 1:
        lo, lo_whole, hi_whole, hi = part_of(lo, lo_whole, hi_whole, hi, part, SPLITS)
    position = start + first + token
    page_ids = block_ids_ptr + b.to(tl.int64) * stride_ids
    k_head = k_ptr + h.to(tl.int64) * stride_k_head
    v_head = v_ptr + h.to(tl.int64) * stride_v_head
    ks_head = kscale_ptr + h.to(tl.int64) * stride_ks_head
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], FIRST_MAX, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    q = widen(q, INTERPRET)
    if WINDOW:
        acc, m, l = _attend(
            acc, m, l, q, row_scale, position, lo, lo_whole, keys, row0 - first, page_ids, k_head, v_head, ks_head,
            num_pages, stride_k_page, stride_k_tok, stride_v_page, stride_v_tok, stride_ks_page, stride_ks_row, window,
            logit_cap, PAGE, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, FP8, QUANT_TYPE == 0, SCALES_PER_ROW, CAUSAL, WINDOW,
            CAP, WIDE, True, STAGES, INTERPRET)  # fmt: skip
    acc, m, l = _attend(
        acc, m, l, q, row_scale, position, lo_whole, hi_whole, keys, row0 - first, page_ids, k_head, v_head, ks_head,
        num_pages, stride_k_page, stride_k_tok, stride_v_page, stride_v_tok, stride_ks_page, stride_ks_row, window,
        logit_cap, PAGE, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, FP8, QUANT_TYPE == 0, SCALES_PER_ROW, CAUSAL, WINDOW,
        CAP, WIDE, False, STAGES, INTERPRET)  # fmt: skip
    acc, m, l = _attend(
        acc, m, l, q, row_scale, position, hi_whole, hi, keys, row0 - first, page_ids, k_head, v_head, ks_head,
        num_pages, stride_k_page, stride_k_tok, stride_v_page, stride_v_tok, stride_ks_page, stride_ks_row, window,
        logit_cap, PAGE, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, FP8, QUANT_TYPE == 0, SCALES_PER_ROW, CAUSAL, WINDOW,
        CAP, WIDE, True, STAGES, INTERPRET)  # fmt: skip

    empty = l == 0.0  # no visible key: output 0, lse -inf
    if SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2E
        m_all = tl.maximum(m, sink)
        shrink = tl.exp2(m - m_all)
        l = l * shrink + tl.exp2(sink - m_all)
        acc = acc * shrink[:, None]
        m = m_all
    l = tl.where(empty, 1.0, l)
    out = tl.where(empty[:, None], 0.0, acc * (value_scale / l)[:, None])
    offs_v = tl.arange(0, BLOCK_DV)
    if SPLITS > 1:
        token_row = token_row * SPLITS + part
    else:
        out = to_bf16(out, INTERPRET)
    o_rows = token_row * stride_o_tok + head.to(tl.int64) * stride_o_head
    mask = live[:, None] & (offs_v < DV)[None, :]
    tl.store(o_ptr + o_rows[:, None] + offs_v[None, :], out, mask=mask)
    if LSE:
        lse = tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)
        tl.store(lse_ptr + token_row * HQ + head, lse, mask=live)
