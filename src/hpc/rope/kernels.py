"""Triton kernels of the attention prologue; they run on any GPU and, interpreted, on a CPU.

One program handles a tile of TB tokens x HB heads of one role. Each head is loaded as the two halves of its rotated
pairs, (x[i], x[i + half]) in NeoX style or (x[2i], x[2i+1]) interleaved, and the dims behind them that are not rotated:

    a, b = x[pairs]                          fp32
    a, b = a*c - b*s, b*c + a*s              cos and sin of the token's position
    x    = x * (1/sqrt(sum(x^2)/D + eps)) * w      before or after the rotation
    bf16 = x                                 or   scale = max(1e-6, max|x|)/upper,  code = e4m3(x * (1/scale))

The kernel is launched without fusing a*b+c into one rounding (`enable_fp_fusion=False`), divisions and square roots are
correctly rounded, and squares are added by eight neighbours in fp32, then in float64, where no order shows: codes and
scales equal those of the reference bit for bit.

Every global load follows `pdl_wait`. In decode the next kernel may start right behind it, since only the newest tokens'
rows are written; in prefill it may not, because it reads rows that this kernel writes as old ones.
"""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait, to_bf16, to_e4m3_bytes


@triton.jit
def _load_pairs(ptrs, mask, HALF: tl.constexpr, HALF_P: tl.constexpr, NEOX: tl.constexpr):
    """Pairs (a, b) of [TB, HB, HALF_P] fp32 from heads at `ptrs` [TB, HB, 1]; zero outside `mask` and past HALF."""
    if NEOX:
        i = tl.arange(0, HALF_P)[None, None, :]
        if HALF != HALF_P:
            mask = mask & (i < HALF)
        a = tl.load(ptrs + i, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(ptrs + (i + HALF), mask=mask, other=0.0).to(tl.float32)
    else:
        i = tl.arange(0, 2 * HALF_P)[None, None, :]
        if HALF != HALF_P:
            mask = mask & (i < 2 * HALF)
        x = tl.load(ptrs + i, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], HALF_P, 2)))
    return a, b


@triton.jit
def _eight_a_thread(WIDTH: tl.constexpr):
    """Offsets of a store. A thread holds eight neighbours, as its load brought them; said to the compiler, which would
    else collect sixteen bytes a store through shared memory."""
    return tl.max_contiguous(tl.arange(0, WIDTH), 8 if WIDTH >= 8 else WIDTH)[None, None, :]


@triton.jit
def _store_pairs(ptrs, a, b, mask, HALF: tl.constexpr, HALF_P: tl.constexpr, NEOX: tl.constexpr):
    """The inverse of `_load_pairs` for values of the destination's dtype."""
    if NEOX:
        i = _eight_a_thread(HALF_P)
        if HALF != HALF_P:
            mask = mask & (i < HALF)
        tl.store(ptrs + i, a, mask=mask)
        tl.store(ptrs + (i + HALF), b, mask=mask)
    else:
        i = _eight_a_thread(2 * HALF_P)
        if HALF != HALF_P:
            mask = mask & (i < 2 * HALF)
        tl.store(ptrs + i, tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * HALF_P)), mask=mask)


@triton.jit
def _load_rest(ptrs, mask, D: tl.constexpr, HALF: tl.constexpr, REST_P: tl.constexpr):
    """The dims behind the rotated ones, [TB, HB, REST_P] fp32."""
    i = tl.arange(0, REST_P)[None, None, :] + 2 * HALF
    return tl.load(ptrs + i, mask=mask & (i < D), other=0.0).to(tl.float32)


@triton.jit
def _find(token, q_index_ptr, num_req, requests_per_token):
    """(request, its first row, its end, owned) of `token` [TB].

    Where all requests bring as many tokens, as in decode, the request is the first guess: one load instead of a search.
    """
    guess = tl.minimum((token.to(tl.float32) * requests_per_token).to(tl.int32), num_req - 1)
    some = guess >= 0
    start = tl.load(q_index_ptr + guess, mask=some, other=0)
    end = tl.load(q_index_ptr + guess + 1, mask=some, other=0)
    missed = (token < start) | (token >= end)
    if tl.max(missed.to(tl.int32), 0) > 0:
        low = tl.zeros_like(token)  # entries of q_index that are <= token: low of them for sure, high at most
        high = low + num_req + 1
        while tl.max(high - low, 0) > 0:
            middle = (low + high) // 2
            open_ = low < high
            reached = open_ & (tl.load(q_index_ptr + middle, mask=open_, other=0) <= token)
            low = tl.where(reached, middle + 1, low)
            high = tl.where(open_ & (reached == 0), middle, high)
        guess = low - 1
        some = (guess >= 0) & (guess < num_req)
        start = tl.load(q_index_ptr + guess, mask=some, other=0)
        end = tl.load(q_index_ptr + guess + 1, mask=some, other=0)
    return guess, start, end, (token >= start) & (token < end)


@triton.jit
def _page_rows(request, position, valid, table_ptr, stride_table, max_pages, num_pages, PAGE: tl.constexpr):
    """(page, row in it, valid) of each token: a place outside the page table or the cache is no place."""
    column = position // PAGE
    valid = valid & (column < max_pages)
    page = tl.load(table_ptr + request.to(tl.int64) * stride_table + column, mask=valid, other=-1)
    return page.to(tl.int64), (position % PAGE).to(tl.int64), valid & (page >= 0) & (page < num_pages)


@triton.jit
def _eights(x, LEVELS: tl.constexpr):
    """Sums of 2^LEVELS neighbours along the last axis, pair by pair: what a thread holds, in an order of its own."""
    for _ in tl.static_range(LEVELS):
        if x.shape[2] > 1:
            even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
            x = even + odd
    return x


@triton.jit
def _rms_scale(a, b, rest, eps, D: tl.constexpr, REST_P: tl.constexpr, NEOX: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each head, [TB, HB, 1]."""
    if NEOX:
        total = tl.sum(_eights(a * a, 3).to(tl.float64) + _eights(b * b, 3).to(tl.float64), 2)
    else:
        total = tl.sum(_eights(a * a + b * b, 2).to(tl.float64), 2)
    if REST_P > 0:
        total += tl.sum(_eights(rest * rest, 3).to(tl.float64), 2)
    total = total.to(tl.float32)
    if D & (D - 1) == 0:
        mean = total * (1.0 / D)
    else:
        mean = tl.math.div_rn(total, tl.full(total.shape, D, tl.float32))
    return tl.math.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))[:, :, None]


@triton.jit
def _load_head(ptrs, mask, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
               NEOX: tl.constexpr):  # fmt: skip
    """(a, b, rest) of the heads at `ptrs` [TB, HB, 1] in fp32; zero outside `mask`. Without a rest it is a."""
    a, b = _load_pairs(ptrs, mask, HALF, HALF_P, NEOX)
    rest = a
    if REST_P > 0:
        rest = _load_rest(ptrs, mask, D, HALF, REST_P)
    return a, b, rest


@triton.jit
def _load_weights(ptr, TB: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
                  REST_P: tl.constexpr, NEOX: tl.constexpr, POLICY: tl.constexpr):  # fmt: skip
    """Norm weights as (a, b, rest), one address a head: a tile [1, 1, HALF] would get a layout of its own, and heads
    would pass through shared memory."""
    if POLICY > 0:
        return _load_head(ptr + tl.zeros((TB, HB, 1), tl.int32), tl.full((TB, HB, 1), 1, tl.int1), D, HALF, HALF_P,
                          REST_P, NEOX)  # fmt: skip
    else:
        return 0, 0, 0


@triton.jit
def _load_angles(ptr, stride, position, max_pos, HB: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr):
    """(cos, sin) of `position` [TB], clamped to the table, as [TB, HB, HALF_P]: one address a head, as for weights."""
    i = tl.arange(0, HALF_P)[None, None, :]
    row = tl.minimum(tl.maximum(position, 0), max_pos - 1).to(tl.int64)
    ptrs = tl.broadcast_to(ptr + row[:, None, None] * stride + i, (position.shape[0], HB, HALF_P))
    if HALF == HALF_P:
        return tl.load(ptrs).to(tl.float32), tl.load(ptrs + HALF).to(tl.float32)
    else:
        cos = tl.load(ptrs, mask=i < HALF, other=0.0).to(tl.float32)
        return cos, tl.load(ptrs + HALF, mask=i < HALF, other=0.0).to(tl.float32)


@triton.jit
def _norm(a, b, rest, weights, eps, D: tl.constexpr, REST_P: tl.constexpr, NEOX: tl.constexpr):
    scale = _rms_scale(a, b, rest, eps, D, REST_P, NEOX)
    if REST_P > 0:
        rest = rest * scale * weights[2]
    return a * scale * weights[0], b * scale * weights[1], rest


@triton.jit
def _project(a, b, rest, cos, sin, weights, eps, D: tl.constexpr, REST_P: tl.constexpr, NEOX: tl.constexpr,
             POLICY: tl.constexpr):  # fmt: skip
    """Norm and rotation of loaded heads."""
    if POLICY == 2:
        a, b, rest = _norm(a, b, rest, weights, eps, D, REST_P, NEOX)
    turned = a * cos - b * sin
    b = b * cos + a * sin
    a = turned
    if POLICY == 1:
        a, b, rest = _norm(a, b, rest, weights, eps, D, REST_P, NEOX)
    return a, b, rest


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(x, INTERPRET: tl.constexpr):
    """Largest |x| along the last axis; NaN if there is one."""
    if INTERPRET:  # as integers, among which a NaN is larger than all numbers
        return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), 2, _larger)


@triton.jit
def _dynamic_scale(amax, upper):
    """(scale, 1 / scale) of heads with these largest magnitudes."""
    amax = tl.where(amax < 1e-6, 1e-6, amax)  # keeps NaN
    scale = tl.math.div_rn(amax, tl.zeros_like(amax) + upper)
    return scale, tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)


@triton.jit
def _inverse(ptr, value, IN_MEMORY: tl.constexpr):
    """1 / scale of a scale that is a tensor's element or an argument."""
    if IN_MEMORY:
        value = tl.load(ptr)
    return tl.math.div_rn(1.0, value)


@triton.jit
def _encoded(x, FP8: tl.constexpr, SOFT: tl.constexpr, INTERPRET: tl.constexpr):
    if FP8:
        return to_e4m3_bytes(x, SOFT)
    else:
        return to_bf16(x, INTERPRET)


@triton.jit
def _store_head(ptrs, a, b, rest, mask, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
                REST_P: tl.constexpr, NEOX: tl.constexpr, FP8: tl.constexpr, SOFT: tl.constexpr,
                INTERPRET: tl.constexpr):  # fmt: skip
    a, b = _encoded(a, FP8, SOFT, INTERPRET), _encoded(b, FP8, SOFT, INTERPRET)
    _store_pairs(ptrs, a, b, mask, HALF, HALF_P, NEOX)
    if REST_P > 0:
        i = _eight_a_thread(REST_P) + 2 * HALF
        tl.store(ptrs + i, _encoded(rest, FP8, SOFT, INTERPRET), mask=mask & (i < D))


@triton.jit
def _store_or_zero(ptrs, a, b, rest, inside, valid, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
                   REST_P: tl.constexpr, NEOX: tl.constexpr, FP8: tl.constexpr, SOFT: tl.constexpr,
                   INTERPRET: tl.constexpr):  # fmt: skip
    """Heads of valid tokens, zeros for the others: a second store, masked off, costs less than a select a value."""
    _store_head(ptrs, a, b, rest, inside & valid, D, HALF, HALF_P, REST_P, NEOX, FP8, SOFT, INTERPRET)
    unused = inside & (valid == 0)
    zero = tl.zeros_like(_encoded(a, FP8, SOFT, INTERPRET))
    _store_pairs(ptrs, zero, zero, unused, HALF, HALF_P, NEOX)
    if REST_P > 0:
        i = _eight_a_thread(REST_P) + 2 * HALF
        tl.store(ptrs + i, tl.zeros_like(_encoded(rest, FP8, SOFT, INTERPRET)), mask=unused & (i < D))


@triton.jit
def _finish_query(
    a, b, rest, head, inside, valid, owned, place, scale_row, factor, out_row, stride_qh, q_scale_ptr, scale_cols,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr, NEOX: tl.constexpr,
    FP8: tl.constexpr, Q_SCALE: tl.constexpr, SOFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Scale, round and store queries; `factor` is the largest code or, with Q_SCALE 3, a multiplier."""
    column = head[None, :].to(tl.int64)
    if Q_SCALE == 1 or Q_SCALE == 2:
        amax = _amax(_larger(tl.abs(a), tl.abs(b)), INTERPRET)
        if REST_P > 0:
            amax = _larger(amax, _amax(rest, INTERPRET))
        scale, inverse = _dynamic_scale(amax, factor)
        scale = tl.where(valid[:, None], scale, 0.0)
        if Q_SCALE == 1:
            tl.store(q_scale_ptr + scale_row + column, scale, mask=inside)
        else:
            room = place < scale_cols
            tl.store(
                q_scale_ptr + scale_row + column * scale_cols, scale, mask=inside & owned[:, None] & room
            )
            inverse = tl.where(room, inverse, float("nan"))  # a scale without a place must not go unseen
        inverse = inverse[:, :, None]
        a, b, rest = a * inverse, b * inverse, rest * inverse
    elif Q_SCALE == 3:
        a, b, rest = a * factor, b * factor, rest * factor
    ptrs = (out_row + column * stride_qh)[:, :, None]
    _store_or_zero(
        ptrs,
        a,
        b,
        rest,
        inside[:, :, None],
        valid[:, None, None],
        D,
        HALF,
        HALF_P,
        REST_P,
        NEOX,
        FP8,
        SOFT,
        INTERPRET,
    )


@triton.jit
def _clear_scales(b, h, HEADS_STEP: tl.constexpr, q_scale_ptr, q_index_ptr, scale_cols, HQ: tl.constexpr):
    """Zero the scales of request b that no token has, heads h, h + HEADS_STEP, ..."""
    used = tl.load(q_index_ptr + b + 1) - tl.load(q_index_ptr + b)
    for head in range(h, HQ, HEADS_STEP):
        for first in range(used // 128 * 128, scale_cols, 128):
            column = first + tl.arange(0, 128)
            ptrs = q_scale_ptr + (b.to(tl.int64) * HQ + head) * scale_cols + column
            tl.store(ptrs, tl.zeros((128,), tl.float32), mask=column >= used)


@triton.jit
def _clear_request(
    b, h, kcache_ptr, vcache_ptr, q_scale_ptr, flag_ptr, q_index_ptr, lens_ptr, table_ptr,
    stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_table, max_pages, num_pages, scale_cols,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_P: tl.constexpr, DV_P: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr, Q_SCALE: tl.constexpr,
):  # fmt: skip
    """For KV head h of request b: its split flag, the rows behind its last token, the scales that no token has."""
    if FP8:
        tl.store(flag_ptr + b.to(tl.int64) * HKV + h, 0)
    last = tl.load(lens_ptr + b) - 1
    column = last // PAGE
    live = (last >= 0) & (column < max_pages)
    page = tl.load(table_ptr + b.to(tl.int64) * stride_table + column, mask=live, other=-1).to(tl.int64)
    if (page >= 0) & (page < num_pages):
        for first in tl.static_range(0, PAGE, ROWS):
            row = first + tl.arange(0, ROWS)
            dead = ((row > last % PAGE) & (row < PAGE))[:, None]
            i, j = tl.arange(0, D_P)[None, :], tl.arange(0, DV_P)[None, :]
            row = row[:, None].to(tl.int64)
            k_ptrs = kcache_ptr + page * stride_kp + row * stride_kt + h.to(tl.int64) * stride_kh + i
            v_ptrs = vcache_ptr + page * stride_vp + row * stride_vt + h.to(tl.int64) * stride_vh + j
            tl.store(k_ptrs, tl.zeros((ROWS, D_P), kcache_ptr.dtype.element_ty), mask=dead & (i < D))
            tl.store(v_ptrs, tl.zeros((ROWS, DV_P), vcache_ptr.dtype.element_ty), mask=dead & (j < DV))
    if Q_SCALE == 2:
        _clear_scales(b, h, HKV, q_scale_ptr, q_index_ptr, scale_cols, HQ)


_SCALARS = ["num_tokens", "num_req", "max_pos", "max_pages", "num_pages", "scale_cols", "num_k", "num_v",
            "num_q", "stride_table"]  # fmt: skip
# Read one element at a time: their alignment decides nothing.
_NARROW = ["lens_ptr", "q_index_ptr", "table_ptr", "k_scale_ptr", "v_scale_ptr", "q_scale_inv_ptr", "q_scale_ptr",
           "flag_ptr"]  # fmt: skip
# Read and written in vectors; tensors that are not on 16 bytes get a kernel that assumes nothing.
_WIDE = ["qkv_ptr", "cos_sin_ptr", "q_weight_ptr", "k_weight_ptr", "kcache_ptr", "vcache_ptr", "out_q_ptr",
         "out_k_ptr", "out_v_ptr"]  # fmt: skip


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_NARROW)
def _rope_prologue_kernel(
    qkv_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr, kcache_ptr, vcache_ptr, out_q_ptr, out_k_ptr, out_v_ptr,
    q_scale_ptr, flag_ptr, lens_ptr, q_index_ptr, table_ptr, k_scale_ptr, v_scale_ptr, q_scale_inv_ptr,
    num_tokens, num_req, requests_per_token, max_pos, max_pages, num_pages, scale_cols, num_k, num_v, num_q,
    eps, upper, k_scale, v_scale,
    stride_table, stride_qkv, stride_cos, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_qt, stride_qh, stride_okt, stride_okh, stride_ovt, stride_ovh,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    HALF_P: tl.constexpr, REST_P: tl.constexpr, D_P: tl.constexpr, DV_P: tl.constexpr, UNROLL: tl.constexpr,
    TBQ: tl.constexpr, HBQ: tl.constexpr, TBK: tl.constexpr, HBK: tl.constexpr, CLEAR_ROWS: tl.constexpr,
    POLICY: tl.constexpr, NEOX: tl.constexpr, FP8: tl.constexpr, Q_SCALE: tl.constexpr, K_IN_MEMORY: tl.constexpr,
    V_IN_MEMORY: tl.constexpr, OUT_K: tl.constexpr, OUT_V: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
    SOFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid: num_k programs for keys, then num_v for values, num_q for queries, num_req * HKV to clear.

    Q_SCALE: 0 BF16 queries, 1 dynamic scales [tokens, HQ], 2 dynamic scales [requests, HQ, scale_cols], 3 a fixed
    multiplier. EARLY: the next kernel may start once this one has (decode).
    """
    pid = tl.program_id(0)
    pdl_wait(PDL)
    pdl_launch(PDL and EARLY)
    if pid < num_k + num_v:
        # --- keys and values ---
        is_v = pid >= num_k
        tile = pid - tl.where(is_v, num_k, 0)
        blocks: tl.constexpr = (HKV + HBK - 1) // HBK
        token = (tile // blocks) * TBK + tl.arange(0, TBK)
        head = (tile % blocks) * HBK + tl.arange(0, HBK)
        inside = (token < num_tokens)[:, None, None] & (head < HKV)[None, :, None]
        request, _, end, owned = _find(token, q_index_ptr, num_req, requests_per_token)
        position = tl.load(lens_ptr + request, mask=owned, other=0) - (end - token)
        valid = owned & (position >= 0)
        page, row, stored = _page_rows(
            request, position, valid, table_ptr, stride_table, max_pages, num_pages, PAGE
        )
        token, head = token[:, None, None].to(tl.int64), head[None, :, None].to(tl.int64)
        page, row = page[:, None, None], row[:, None, None]
        valid, stored = valid[:, None, None], stored[:, None, None]
        if is_v:
            v_ptrs = qkv_ptr + token * stride_qkv + (HQ + HKV) * D + head * DV
            i = _eight_a_thread(DV_P)
            v = tl.load(v_ptrs + i, mask=inside & (i < DV), other=0.0).to(tl.float32)
            if FP8:
                v = v * _inverse(v_scale_ptr, v_scale, V_IN_MEMORY)
            if OUT_V:
                ptrs = out_v_ptr + token * stride_ovt + head * stride_ovh
                written = inside
                v = tl.where(valid, v, 0.0)
            else:
                ptrs = vcache_ptr + page * stride_vp + row * stride_vt + head * stride_vh
                written = inside & stored
            tl.store(ptrs + i, _encoded(v, FP8, SOFT, INTERPRET), mask=written & (i < DV))
        else:
            k_ptrs = qkv_ptr + token * stride_qkv + HQ * D + head * D
            a, b, rest = _load_head(k_ptrs, inside, D, HALF, HALF_P, REST_P, NEOX)
            cos, sin = _load_angles(cos_sin_ptr, stride_cos, position, max_pos, HBK, HALF, HALF_P)
            weights = _load_weights(k_weight_ptr, TBK, HBK, D, HALF, HALF_P, REST_P, NEOX, POLICY)
            a, b, rest = _project(a, b, rest, cos, sin, weights, eps, D, REST_P, NEOX, POLICY)
            if FP8:
                inverse = _inverse(k_scale_ptr, k_scale, K_IN_MEMORY)
                a, b, rest = a * inverse, b * inverse, rest * inverse
            if OUT_K:
                ptrs = out_k_ptr + token * stride_okt + head * stride_okh
                _store_or_zero(
                    ptrs, a, b, rest, inside, valid, D, HALF, HALF_P, REST_P, NEOX, FP8, SOFT, INTERPRET
                )
            else:
                ptrs = kcache_ptr + page * stride_kp + row * stride_kt + head * stride_kh
                written = inside & stored
                _store_head(ptrs, a, b, rest, written, D, HALF, HALF_P, REST_P, NEOX, FP8, SOFT, INTERPRET)
    elif pid < num_k + num_v + num_q:
        # --- queries ---
        tile = pid - num_k - num_v
        blocks_q: tl.constexpr = (HQ + HBQ * UNROLL - 1) // (HBQ * UNROLL)
        token = (tile // blocks_q) * TBQ + tl.arange(0, TBQ)
        head = (tile % blocks_q) * (HBQ * UNROLL) + tl.arange(0, HBQ)
        within = (token < num_tokens)[:, None]
        row = token[:, None].to(tl.int64)
        q_row = qkv_ptr + row * stride_qkv
        inside = within & (head < HQ)[None, :]
        a, b, rest = _load_head((q_row + head[None, :] * D)[:, :, None], inside[:, :, None], D, HALF, HALF_P, REST_P,
                                NEOX)  # fmt: skip
        inside2 = within & (head + HBQ < HQ)[None, :]
        a2, b2, rest2 = a, b, rest
        if UNROLL == 2:
            a2, b2, rest2 = _load_head((q_row + (head + HBQ)[None, :] * D)[:, :, None], inside2[:, :, None], D, HALF,
                                       HALF_P, REST_P, NEOX)  # fmt: skip
        weights = _load_weights(q_weight_ptr, TBQ, HBQ, D, HALF, HALF_P, REST_P, NEOX, POLICY)
        request, start, end, owned = _find(token, q_index_ptr, num_req, requests_per_token)
        position = tl.load(lens_ptr + request, mask=owned, other=0) - (end - token)
        valid = owned & (position >= 0)
        cos, sin = _load_angles(cos_sin_ptr, stride_cos, position, max_pos, HBQ, HALF, HALF_P)
        factor = upper
        if Q_SCALE == 3:
            factor = tl.load(q_scale_inv_ptr)
        place = (token - start)[:, None]
        scale_row = row * HQ
        if Q_SCALE == 2:
            scale_row = request[:, None].to(tl.int64) * HQ * scale_cols + place
        out_row = out_q_ptr + row * stride_qt
        a, b, rest = _project(a, b, rest, cos, sin, weights, eps, D, REST_P, NEOX, POLICY)
        _finish_query(
            a, b, rest, head, inside, valid, owned, place, scale_row, factor, out_row, stride_qh, q_scale_ptr,
            scale_cols, D, HALF, HALF_P, REST_P, NEOX, FP8, Q_SCALE, SOFT, INTERPRET,
        )  # fmt: skip
        if UNROLL == 2:
            a2, b2, rest2 = _project(a2, b2, rest2, cos, sin, weights, eps, D, REST_P, NEOX, POLICY)
            _finish_query(
                a2, b2, rest2, head + HBQ, inside2, valid, owned, place, scale_row, factor, out_row, stride_qh,
                q_scale_ptr, scale_cols, D, HALF, HALF_P, REST_P, NEOX, FP8, Q_SCALE, SOFT, INTERPRET,
            )  # fmt: skip
    else:
        tile = pid - num_k - num_v - num_q
        _clear_request(
            tile // HKV, tile % HKV, kcache_ptr, vcache_ptr, q_scale_ptr, flag_ptr, q_index_ptr, lens_ptr, table_ptr,
            stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_table, max_pages, num_pages,
            scale_cols, HQ, HKV, D, DV, D_P, DV_P, PAGE, CLEAR_ROWS, FP8, Q_SCALE,
        )  # fmt: skip


_rope_prologue_unaligned_kernel = triton.jit(
    _rope_prologue_kernel.fn, do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_NARROW + _WIDE
)
