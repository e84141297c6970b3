"""Triton kernels of the attention prologue; they run on any GPU and, interpreted, on a CPU.

One program handles tiles of TB tokens x HB heads of one role:

    a, b = x[pairs]                                                     fp32
    r    = 1/sqrt(sum(x^2)/D + eps)                                     before or after the rotation, or 1
    a, b = a*(c*wa) - b*(s*wb), b*(c*wb) + a*(s*wa)                     cos and sin of the token's position, weights
    bf16 = (a, b) * r       or   scale = max(1e-6, max|a, b| * r)/upper,  code = e4m3((a, b) * (r * (1/scale)))

A program of many heads loads and multiplies angles and weights once a token; each tile is loaded a tile ahead.

Codes and scales equal those of the reference bit for bit: the kernel is launched without fusing a*b+c
(`enable_fp_fusion=False`) but where it says so, divisions and square roots are correctly rounded, and squares are added
by eight neighbours in fp32, then in float64, where no order shows.

Every global load follows `pdl_wait`. In decode the next kernel may start right behind it, since only the newest tokens'
rows are written; in prefill it may not, because it reads rows that this kernel writes as old ones.
"""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait
from hpc.rope.kernels_head import (
    _amax,
    _dynamic_scale,
    _eight_a_thread,
    _encoded,
    _fp32,
    _inverse,
    _larger,
    _load_angles,
    _load_head,
    _project,
    _store_head,
    _store_or_zero,
)  # fmt: skip


@triton.jit
def _request(guess, some, q_index_ptr, lens_ptr):
    """(first row, end, length) of request `guess`."""
    start = tl.load(q_index_ptr + guess, mask=some, other=0)
    end = tl.load(q_index_ptr + guess + 1, mask=some, other=0)
    return start, end, tl.load(lens_ptr + guess, mask=some, other=0)


@triton.jit
def _find(token, q_index_ptr, lens_ptr, num_req, requests_per_token):
    """(request, its first row, position, owned) of `token` [TB]; `owned` by a request.

    Where all requests bring as many tokens, as in decode, the request is the first guess: one load instead of a search.
    """
    guess = tl.minimum((token.to(tl.float32) * requests_per_token).to(tl.int32), num_req - 1)
    start, end, length = _request(guess, guess >= 0, q_index_ptr, lens_ptr)
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
        start, end, length = _request(guess, (guess >= 0) & (guess < num_req), q_index_ptr, lens_ptr)
    owned = (token >= start) & (token < end)
    return guess, start, tl.where(owned, length, 0) - (end - token), owned


@triton.jit
def _page_rows(request, position, valid, table_ptr, stride_table, max_pages, num_pages, PAGE: tl.constexpr):
    """(page, row in it, valid) of each token: a place outside the page table or the cache is no place."""
    column = position // PAGE
    valid = valid & (column < max_pages)
    page = tl.load(table_ptr + request.to(tl.int64) * stride_table + column, mask=valid, other=-1)
    return page.to(tl.int64), (position % PAGE).to(tl.int64), valid & (page >= 0) & (page < num_pages)


@triton.jit
def _finish_query(
    a, b, rest, norm, head, inside, valid, owned, place, scale_row, factor, out_row, stride_qh, q_scale_ptr, scale_cols,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr, NEOX: tl.constexpr,
    FP8: tl.constexpr, Q_SCALE: tl.constexpr, SOFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Scale, round and store queries that lack a factor `norm` a head; `factor` is the largest code or, with Q_SCALE 3,
    a multiplier."""
    column = head[None, :].to(tl.int64)
    if Q_SCALE == 1 or Q_SCALE == 2:
        amax = _amax(_larger(tl.abs(a), tl.abs(b)), INTERPRET)
        if REST_P > 0:
            amax = _larger(amax, _amax(rest, INTERPRET))
        scale, inverse = _dynamic_scale(amax * norm, factor)
        norm = norm * inverse
        scale = tl.where(valid[:, None], scale, 0.0)
        if Q_SCALE == 1:
            tl.store(q_scale_ptr + scale_row + column, scale, mask=inside)
        else:
            room = place < scale_cols
            tl.store(
                q_scale_ptr + scale_row + column * scale_cols, scale, mask=inside & owned[:, None] & room
            )
            norm = tl.where(room, norm, float("nan"))  # a scale without a place must not go unseen
    elif Q_SCALE == 3:
        norm = norm * factor
    norm = norm[:, :, None]
    ptrs = (out_row + column * stride_qh)[:, :, None]
    _store_or_zero(
        ptrs, a * norm, b * norm, rest * norm, inside[:, :, None], valid[:, None, None], D, HALF, HALF_P, REST_P, NEOX,
        FP8, SOFT, INTERPRET,
    )  # fmt: skip


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
        request, _, position, owned = _find(token, q_index_ptr, lens_ptr, num_req, requests_per_token)
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
            v = _fp32(tl.load(v_ptrs + i, mask=inside & (i < DV)))
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
            k = _load_head(k_ptrs, inside, D, HALF, HALF_P, REST_P, NEOX)
            angles = _load_angles(cos_sin_ptr, stride_cos, position, max_pos, k_weight_ptr, HBK, D, HALF, HALF_P,
                                  REST_P, NEOX, POLICY)  # fmt: skip
            a, b, rest, norm = _project(k, angles, eps, D, HALF_P, REST_P, NEOX, POLICY, INTERPRET)
            if FP8:
                norm = norm * _inverse(k_scale_ptr, k_scale, K_IN_MEMORY)
            norm = norm[:, :, None]
            a, b, rest = a * norm, b * norm, rest * norm
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
        q = _load_head(
            (q_row + head[None, :] * D)[:, :, None], inside[:, :, None], D, HALF, HALF_P, REST_P, NEOX
        )
        request, start, position, owned = _find(token, q_index_ptr, lens_ptr, num_req, requests_per_token)
        valid = owned & (position >= 0)
        angles = _load_angles(cos_sin_ptr, stride_cos, position, max_pos, q_weight_ptr, HBQ, D, HALF, HALF_P, REST_P,
                              NEOX, POLICY)  # fmt: skip
        factor = upper
        if Q_SCALE == 3:
            factor = tl.load(q_scale_inv_ptr)
        place = (token - start)[:, None]
        scale_row = row * HQ
        if Q_SCALE == 2:
            scale_row = request[:, None].to(tl.int64) * HQ * scale_cols + place
        out_row = out_q_ptr + row * stride_qt
        for _ in tl.static_range(UNROLL - 1):
            ahead = head + HBQ
            inside2 = within & (ahead < HQ)[None, :]
            q2 = _load_head((q_row + ahead[None, :] * D)[:, :, None], inside2[:, :, None], D, HALF, HALF_P, REST_P,
                            NEOX)  # fmt: skip
            a, b, rest, norm = _project(q, angles, eps, D, HALF_P, REST_P, NEOX, POLICY, INTERPRET)
            _finish_query(
                a, b, rest, norm, head, inside, valid, owned, place, scale_row, factor, out_row, stride_qh, q_scale_ptr,
                scale_cols, D, HALF, HALF_P, REST_P, NEOX, FP8, Q_SCALE, SOFT, INTERPRET,
            )  # fmt: skip
            q, head, inside = q2, ahead, inside2
        a, b, rest, norm = _project(q, angles, eps, D, HALF_P, REST_P, NEOX, POLICY, INTERPRET)
        _finish_query(
            a, b, rest, norm, head, inside, valid, owned, place, scale_row, factor, out_row, stride_qh, q_scale_ptr,
            scale_cols, D, HALF, HALF_P, REST_P, NEOX, FP8, Q_SCALE, SOFT, INTERPRET,
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
