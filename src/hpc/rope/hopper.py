"""The attention prologue for SM90, in Gluon: one warp a program, whole heads of whole tokens, registers only.

What `kernels.py` computes, bit for bit, where heads are 64, 128 or 256 wide and rotated over all their dims in NeoX
style. A lane holds eight neighbours of each half of a head, so a warp holds R = 512 / D heads, both members of a pair
are in one lane, and only the sum and the maximum of a head cross lanes:

    query program   TOKENS tokens, HEADS heads of each: request and angles times weights once a token, then R heads at a
                    time, the next R in flight
    KV program      STEPS times R rows (token, KV head), key and value of each
    clear program   as in `kernels.py`

Instructions bound prefill, so they are counted (a warp, R = 4 heads of 128): FP8 with a norm 187, BF16 150, and about
160 a token. Quotients and roots are the sequences that the compiler emits for operands in range, without its branch to
the general case: what is not in range here is zero, infinity and NaN, and a select restores those.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hpc.common.gluon import pdl_launch, pdl_wait


@gluon.constexpr_function
def layout(D):
    """[R heads, D/16 lanes, 8 neighbours] of one half of a head."""
    return gl.BlockedLayout([1, 1, 8], [512 // D, D // 16, 1], [1, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def word_layout(D):
    """[R heads, D/16 lanes, 4 words] of the same as loaded."""
    return gl.BlockedLayout([1, 1, 4], [512 // D, D // 16, 1], [1, 1, 1], [2, 1, 0])


@gluon.jit
def _approximate_reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", args=[x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _reciprocal_step(x, y):
    """A better 1 / x from y. A product with -1 is a sign on an operand; `-x` would be 0 - x, an instruction."""
    return gl.fma(y, gl.fma(y, x * -1.0, 1.0), y)


@gluon.jit
def _reciprocal(x):
    """1 / x, correctly rounded; 0, infinity and NaN give infinity, 0 and NaN."""
    guess = _approximate_reciprocal(x)
    found = _reciprocal_step(x, _reciprocal_step(x, guess))
    return gl.where(found == found, found, guess)


@gluon.jit
def _quotient(x, y, inverse):
    """x / y, correctly rounded, from a reciprocal of y after one step."""
    guess = x * inverse
    found = gl.fma(inverse, gl.fma(y * -1.0, guess, x), guess)
    return gl.where(found == found, found, guess)


@gluon.jit
def _root(x):
    """Square root, correctly rounded from 2^-101 on."""
    guess = gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=r,r", args=[x], dtype=gl.float32, is_pure=True, pack=1
    )
    near = x * guess
    found = gl.fma(gl.fma(near * -1.0, near, x), guess * 0.5, near)
    return gl.where(found == found, found, x)


@gluon.jit
def _fp32(x):
    """Words of two BF16 values, [.., .., 4], as fp32 [.., .., 8], an instruction a value."""
    low, high = x << 16, x & -65536
    pair = gl.join(low.to(gl.float32, bitcast=True), high.to(gl.float32, bitcast=True))
    return gl.reshape(pair, (x.shape[0], x.shape[1], 8))


@gluon.jit
def _add_square(total, x, EXACT: gl.constexpr):
    if EXACT:
        return gl.fma(x, x, total)
    else:
        return total + x * x


@gluon.jit
def _eight_squares(x, EXACT: gl.constexpr):
    """x0^2 + x1^2 + ... of the eight neighbours, in this order. EXACT: squares need no rounding."""
    even, odd = gl.split(gl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2)))
    x04, x26 = gl.split(even)
    x15, x37 = gl.split(odd)
    x0, x4 = gl.split(x04)
    x1, x5 = gl.split(x15)
    x2, x6 = gl.split(x26)
    x3, x7 = gl.split(x37)
    total = _add_square(x0 * x0, x1, EXACT)
    total = _add_square(_add_square(total, x2, EXACT), x3, EXACT)
    total = _add_square(_add_square(total, x4, EXACT), x5, EXACT)
    return _add_square(_add_square(total, x6, EXACT), x7, EXACT)


@gluon.jit
def _rms_factor(a, b, eps, D: gl.constexpr, EXACT: gl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each head, [R]."""
    LANES: gl.constexpr = gl.SliceLayout(2, layout(D))
    squares = _eight_squares(a, EXACT).to(gl.float64) + _eight_squares(b, EXACT).to(gl.float64)
    total = gl.sum(gl.convert_layout(squares, LANES), 1).to(gl.float32)
    return _reciprocal(_root(total * (1.0 / D) + eps))


@gluon.jit
def _larger(x, y):
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _amax(a, b):
    """Largest magnitude of each head, [R]; NaN if there is one."""
    return gl.reduce(gl.reduce(_larger(gl.abs(a), gl.abs(b)), 2, _larger), 1, _larger)


@gluon.jit
def _wide(x):
    """[R] as [R, 1, 1]."""
    return gl.expand_dims(gl.expand_dims(x, 1), 2)


@gluon.jit
def _places(WIDTH: gl.constexpr, D: gl.constexpr, L: gl.constexpr):
    """0, 1, ... of a first half whose lanes hold WIDTH each, [1, D/16, WIDTH]."""
    lane = gl.expand_dims(
        gl.expand_dims(gl.arange(0, D // 16, gl.SliceLayout(0, gl.SliceLayout(2, L))), 0), 2
    )
    i = gl.expand_dims(gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
    return lane * WIDTH + i


@gluon.jit
def _rows(D: gl.constexpr, L: gl.constexpr):
    """0 to R - 1, [R]."""
    return gl.arange(0, 512 // D, gl.SliceLayout(1, gl.SliceLayout(2, L)))


@gluon.jit
def _load(ptrs, D: gl.constexpr):
    """Both halves of heads."""
    return gl.load(ptrs), gl.load(ptrs + D // 4)


@gluon.jit
def _words(ptr):
    """BF16 in words of two: what a loop carries stays packed."""
    return ptr.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _load_row(source, row, end, stride, HKV: gl.constexpr, D: gl.constexpr):
    """Keys and values of rows (token, KV head) before `end`; `source` is the first key, in words."""
    ptrs = source + _wide((row // HKV).to(gl.int64) * (stride // 2) + row % HKV * (D // 2))
    mask = _wide(row < end)
    k = gl.load(ptrs, mask=mask), gl.load(ptrs + D // 4, mask=mask)
    ptrs += HKV * D // 2
    return k, (gl.load(ptrs, mask=mask), gl.load(ptrs + D // 4, mask=mask))


@gluon.jit
def _angles(ptr, stride, position, max_pos, w, places, D: gl.constexpr, POLICY: gl.constexpr):
    """(cos a, sin a, cos b, -sin b) at `position`, clamped to the table, with the weights of a norm before."""
    row = gl.minimum(gl.maximum(position, 0), max_pos - 1).to(gl.int64) * stride
    ptrs = ptr + (row + places)
    cos, sin = gl.load(ptrs).to(gl.float32), gl.load(ptrs + D // 2).to(gl.float32)
    if POLICY == 2:
        return cos * w[0], sin * w[0], cos * w[1], sin * w[1] * -1.0
    else:
        return cos, sin, cos, sin * -1.0


@gluon.jit
def _weights(ptr, places, D: gl.constexpr, POLICY: gl.constexpr):
    if POLICY > 0:
        a, b = gl.load(ptr + places), gl.load(ptr + places + D // 2)
        return a.to(gl.float32), b.to(gl.float32)
    else:
        return places, places


@gluon.jit
def _project(head, angles, w, eps, D: gl.constexpr, POLICY: gl.constexpr):
    """(a, b, factor [R]) of loaded heads: weighed, rotated; the factor of the norm still lacks."""
    a, b = _fp32(head[0]), _fp32(head[1])
    factor = gl.full([512 // D], 1.0, gl.float32, gl.SliceLayout(1, gl.SliceLayout(2, layout(D))))
    if POLICY == 2:
        factor = _rms_factor(a, b, eps, D, True)
    turned = gl.fma(a, angles[0], b * angles[3])
    b = gl.fma(b, angles[2], a * angles[1])
    a = turned
    if POLICY == 1:
        factor = _rms_factor(a, b, eps, D, False)
        a, b = a * w[0], b * w[1]
    return a, b, factor


@gluon.jit
def _encoded(x, FP8: gl.constexpr):
    if FP8:
        return x.to(gl.float8e4nv).to(gl.uint8, bitcast=True).to(gl.int8, bitcast=True)
    else:
        return x.to(gl.bfloat16)


@gluon.jit
def _store(ptrs, a, b, mask, D: gl.constexpr, FP8: gl.constexpr):
    a, b = _encoded(a, FP8), _encoded(b, FP8)
    gl.store(ptrs, a.to(ptrs.dtype.element_ty, bitcast=True), mask=mask)
    gl.store(ptrs + D // 2, b.to(ptrs.dtype.element_ty, bitcast=True), mask=mask)


@gluon.jit
def _clear_rows(ptrs, mask, D: gl.constexpr):
    zero = gl.zeros([512 // D, D // 16, 8], ptrs.dtype.element_ty, layout(D))
    gl.store(ptrs, zero, mask=mask)
    gl.store(ptrs + D // 2, zero, mask=mask)


@gluon.jit
def _find_one(token, q_index_ptr, lens_ptr, num_req, requests_per_token):
    """(request, its first row, position, owned) of one token, as `kernels._find`."""
    guess = gl.minimum((token.to(gl.float32) * requests_per_token).to(gl.int32), num_req - 1)
    some = guess >= 0
    start = gl.load(q_index_ptr + guess, mask=some, other=0)
    end = gl.load(q_index_ptr + guess + 1, mask=some, other=0)
    length = gl.load(lens_ptr + guess, mask=some, other=0)
    if (token < start) | (token >= end):
        low = token * 0
        high = low + num_req + 1
        while low < high:
            middle = (low + high) // 2
            if gl.load(q_index_ptr + middle) <= token:
                low = middle + 1
            else:
                high = middle
        guess = low - 1
        some = (guess >= 0) & (guess < num_req)
        start = gl.load(q_index_ptr + guess, mask=some, other=0)
        end = gl.load(q_index_ptr + guess + 1, mask=some, other=0)
        length = gl.load(lens_ptr + guess, mask=some, other=0)
    owned = (token >= start) & (token < end)
    return guess, start, gl.where(owned, length, 0) - (end - token), owned


@gluon.jit
def _find(token, q_index_ptr, lens_ptr, num_req, requests_per_token):
    """The same for tokens [R]: (request, position, owned)."""
    guess = gl.minimum((token.to(gl.float32) * requests_per_token).to(gl.int32), num_req - 1)
    some = guess >= 0
    start = gl.load(q_index_ptr + guess, mask=some, other=0)
    end = gl.load(q_index_ptr + guess + 1, mask=some, other=0)
    length = gl.load(lens_ptr + guess, mask=some, other=0)
    missed = (token < start) | (token >= end)
    if gl.max(missed.to(gl.int32), 0) > 0:
        low = token * 0
        high = low + num_req + 1
        while gl.max(high - low, 0) > 0:
            middle = (low + high) // 2
            open_ = low < high
            reached = open_ & (gl.load(q_index_ptr + middle, mask=open_, other=0) <= token)
            low = gl.where(reached, middle + 1, low)
            high = gl.where(open_ & (reached == 0), middle, high)
        guess = low - 1
        some = (guess >= 0) & (guess < num_req)
        start = gl.load(q_index_ptr + guess, mask=some, other=0)
        end = gl.load(q_index_ptr + guess + 1, mask=some, other=0)
        length = gl.load(lens_ptr + guess, mask=some, other=0)
    owned = (token >= start) & (token < end)
    return guess, gl.where(owned, length, 0) - (end - token), owned


@gluon.jit
def _queries(
    pid, qkv_ptr, cos_sin_ptr, weight_ptr, out_ptr, scale_ptr, lens_ptr, q_index_ptr, inv_ptr, num_tokens, num_req,
    requests_per_token, max_pos, scale_cols, eps, upper, stride_qkv, stride_cos, stride_qt, stride_qh,
    HQ: gl.constexpr, D: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, POLICY: gl.constexpr,
    FP8: gl.constexpr, Q_SCALE: gl.constexpr,
):  # fmt: skip
    """TOKENS tokens, HEADS heads of each."""
    R: gl.constexpr = 512 // D
    TILES: gl.constexpr = HEADS // R
    BLOCKS: gl.constexpr = HQ // HEADS
    head0 = pid % BLOCKS * HEADS
    places, rows = _places(8, D, layout(D)), _rows(D, layout(D))
    WORDS: gl.constexpr = word_layout(D)
    source = _words(qkv_ptr) + (_wide(head0 + _rows(D, WORDS)) * (D // 2) + _places(4, D, WORDS))
    target = out_ptr + (_wide((head0 + rows).to(gl.int64) * stride_qh) + places)
    scale_target = scale_ptr + (head0 + rows)
    if Q_SCALE == 2:
        scale_target = scale_ptr + (head0 + rows).to(gl.int64) * scale_cols
    first = pid // BLOCKS * TOKENS
    last = gl.minimum(first + TOKENS, num_tokens) - 1
    stride_qkv = stride_qkv // 2  # in words
    q = _load(source + first.to(gl.int64) * stride_qkv, D)
    inverse = upper
    if Q_SCALE == 3:
        inverse = gl.load(inv_ptr)
    elif FP8:
        inverse = _reciprocal_step(upper, _approximate_reciprocal(upper))
    for token in range(first, last + 1):
        request, start, position, owned = _find_one(token, q_index_ptr, lens_ptr, num_req, requests_per_token)
        valid = owned & (position >= 0)
        w = _weights(
            weight_ptr, places, D, POLICY
        )  # again for each token: registers are dearer than hits in the L1
        angles = _angles(cos_sin_ptr, stride_cos, position, max_pos, w, places, D, POLICY)
        place = token - start
        room = place < scale_cols
        scale_row = token.to(gl.int64) * HQ
        if Q_SCALE == 2:
            scale_row = request.to(gl.int64) * HQ * scale_cols + place
        q_row = token.to(gl.int64) * stride_qkv
        out_row = token.to(gl.int64) * stride_qt
        next_row = gl.minimum(token + 1, last).to(gl.int64) * stride_qkv
        for tile in range(TILES):
            ahead = _load(source + gl.where(tile + 1 < TILES, q_row + (tile + 1) * (R * D // 2), next_row), D)
            a, b, norm = _project(q, angles, w, eps, D, POLICY)
            if Q_SCALE == 1 or Q_SCALE == 2:
                amax = _amax(a, b) * norm
                amax = gl.where(amax < 1e-6, 1e-6, amax)  # keeps NaN
                scale = _quotient(amax, upper, inverse)
                norm = norm * _reciprocal(scale)
                if Q_SCALE == 1:
                    gl.store(scale_target + (scale_row + tile * R), gl.where(valid, scale, 0.0))
                else:
                    at = scale_target + (scale_row + (tile * R).to(gl.int64) * scale_cols)
                    gl.store(at, gl.where(valid, scale, 0.0), mask=owned & room & (rows >= 0))
                    norm = gl.where(room, norm, float("nan"))  # a scale without a place must not go unseen
            elif Q_SCALE == 3:
                norm = norm * inverse
            norm = _wide(norm)
            ptrs = target + (out_row + (tile * R).to(gl.int64) * stride_qh)
            if valid:
                _store(ptrs, a * norm, b * norm, None, D, FP8)
            else:
                _clear_rows(ptrs, None, D)
            q = ahead


@gluon.jit
def _scale(ptr, value, IN_MEMORY: gl.constexpr):
    if IN_MEMORY:
        value = gl.load(ptr)
    return gl.div_rn(1.0, value)


@gluon.jit
def _keys_and_values(
    pid, qkv_ptr, cos_sin_ptr, weight_ptr, kcache_ptr, vcache_ptr, out_k_ptr, out_v_ptr, lens_ptr, q_index_ptr,
    table_ptr, k_scale_ptr, v_scale_ptr, num_tokens, num_req, requests_per_token, max_pos, max_pages, num_pages, eps,
    k_scale, v_scale, stride_table, stride_qkv, stride_cos, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt,
    stride_vh, stride_okt, stride_okh, stride_ovt, stride_ovh,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STEPS: gl.constexpr,
    POLICY: gl.constexpr, FP8: gl.constexpr, K_IN_MEMORY: gl.constexpr, V_IN_MEMORY: gl.constexpr,
    OUT_K: gl.constexpr, OUT_V: gl.constexpr,
):  # fmt: skip
    R: gl.constexpr = 512 // D
    places = _places(8, D, layout(D))
    WORDS: gl.constexpr = word_layout(D)
    source = _words(qkv_ptr) + (HQ * D // 2 + _places(4, D, WORDS))
    end = num_tokens * HKV
    row = pid * (STEPS * R) + _rows(D, layout(D))
    ahead = pid * (STEPS * R) + _rows(D, WORDS)
    k, v = _load_row(source, ahead, end, stride_qkv, HKV, D)
    for _ in range(STEPS):
        token, head, inside = row // HKV, row % HKV, row < end
        row += R
        ahead += R
        next_k, next_v = k, v
        if STEPS > 1:
            next_k, next_v = _load_row(source, ahead, end, stride_qkv, HKV, D)
        request, position, owned = _find(token, q_index_ptr, lens_ptr, num_req, requests_per_token)
        valid = owned & (position >= 0) & inside
        w = _weights(weight_ptr, places, D, POLICY)
        angles = _angles(cos_sin_ptr, stride_cos, _wide(position), max_pos, w, places, D, POLICY)
        column = position // PAGE
        stored = valid & (column < max_pages)
        page = gl.load(table_ptr + request.to(gl.int64) * stride_table + column, mask=stored, other=-1).to(
            gl.int64
        )
        stored = stored & (page >= 0) & (page < num_pages)
        place = (position % PAGE).to(gl.int64)
        token_w, head_w = token.to(gl.int64), head.to(gl.int64)
        va, vb = _fp32(v[0]), _fp32(v[1])
        if FP8:
            inverse = _scale(v_scale_ptr, v_scale, V_IN_MEMORY)
            va, vb = va * inverse, vb * inverse
        if OUT_V:
            v_ptrs = out_v_ptr + (_wide(token_w * stride_ovt + head_w * stride_ovh) + places)
            _store(v_ptrs, va, vb, _wide(valid), D, FP8)
            _clear_rows(v_ptrs, _wide(inside & (valid == 0)), D)
        else:
            v_ptrs = vcache_ptr + (_wide(page * stride_vp + place * stride_vt + head_w * stride_vh) + places)
            _store(v_ptrs, va, vb, _wide(stored), D, FP8)
        a, b, norm = _project(k, angles, w, eps, D, POLICY)
        if FP8:
            norm = norm * _scale(k_scale_ptr, k_scale, K_IN_MEMORY)
        norm = _wide(norm)
        if OUT_K:
            k_ptrs = out_k_ptr + (_wide(token_w * stride_okt + head_w * stride_okh) + places)
            _store(k_ptrs, a * norm, b * norm, _wide(valid), D, FP8)
            _clear_rows(k_ptrs, _wide(inside & (valid == 0)), D)
        else:
            k_ptrs = kcache_ptr + (_wide(page * stride_kp + place * stride_kt + head_w * stride_kh) + places)
            _store(k_ptrs, a * norm, b * norm, _wide(stored), D, FP8)
        k, v = next_k, next_v


@gluon.jit
def _clear_request(
    b, h, kcache_ptr, vcache_ptr, q_scale_ptr, flag_ptr, q_index_ptr, lens_ptr, table_ptr, stride_kp, stride_kt,
    stride_kh, stride_vp, stride_vt, stride_vh, stride_table, max_pages, num_pages, scale_cols,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, FP8: gl.constexpr, Q_SCALE: gl.constexpr,
):  # fmt: skip
    """For KV head h of request b: its split flag, the rows behind its last token, the scales that no token has."""
    if FP8:
        gl.store(flag_ptr + b.to(gl.int64) * HKV + h, 0)
    last = gl.load(lens_ptr + b) - 1
    column = last // PAGE
    live = (last >= 0) & (column < max_pages)
    page = gl.load(table_ptr + b.to(gl.int64) * stride_table + column, mask=live, other=-1).to(gl.int64)
    if (page >= 0) & (page < num_pages):
        places, head = _places(8, D, layout(D)), h.to(gl.int64)
        for first in range((last % PAGE + 1) // (512 // D) * (512 // D), PAGE, 512 // D):
            row = first + _rows(D, layout(D))
            dead = _wide((row > last % PAGE) & (row < PAGE))
            row = row.to(gl.int64)
            _clear_rows(
                kcache_ptr + (_wide(page * stride_kp + row * stride_kt + head * stride_kh) + places), dead, D
            )
            _clear_rows(
                vcache_ptr + (_wide(page * stride_vp + row * stride_vt + head * stride_vh) + places), dead, D
            )
    if Q_SCALE == 2:
        used = gl.load(q_index_ptr + b + 1) - gl.load(q_index_ptr + b)
        for query in range(h, HQ, HKV):
            for first in range(used // 128 * 128, scale_cols, 128):
                at = first + gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
                ptrs = q_scale_ptr + ((b.to(gl.int64) * HQ + query) * scale_cols + at)
                gl.store(ptrs, gl.zeros_like(at, dtype=gl.float32), mask=at >= used)


_SCALARS = ["num_tokens", "num_req", "max_pos", "max_pages", "num_pages", "scale_cols", "num_kv", "num_v",
            "num_q", "stride_table"]  # fmt: skip
_NARROW = ["lens_ptr", "q_index_ptr", "table_ptr", "k_scale_ptr", "v_scale_ptr", "q_scale_inv_ptr", "q_scale_ptr",
           "flag_ptr"]  # fmt: skip


@gluon.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_NARROW)
def _rope_warp_kernel(
    qkv_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr, kcache_ptr, vcache_ptr, out_q_ptr, out_k_ptr, out_v_ptr,
    q_scale_ptr, flag_ptr, lens_ptr, q_index_ptr, table_ptr, k_scale_ptr, v_scale_ptr, q_scale_inv_ptr,
    num_tokens, num_req, requests_per_token, max_pos, max_pages, num_pages, scale_cols, num_kv, num_v, num_q,
    eps, upper, k_scale, v_scale,
    stride_table, stride_qkv, stride_cos, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_qt, stride_qh, stride_okt, stride_okh, stride_ovt, stride_ovh,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HEADS: gl.constexpr,
    TOKENS: gl.constexpr, STEPS: gl.constexpr, POLICY: gl.constexpr, FP8: gl.constexpr, Q_SCALE: gl.constexpr,
    K_IN_MEMORY: gl.constexpr, V_IN_MEMORY: gl.constexpr, OUT_K: gl.constexpr, OUT_V: gl.constexpr,
    EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: num_q programs for queries, num_kv for keys and values, num_req * HKV to clear; the long ones first. The
    arguments are those of `kernels._rope_prologue_kernel`; num_v is 0."""
    pid = gl.program_id(0)
    pdl_wait(PDL)
    pdl_launch(PDL and EARLY)
    if pid < num_q:
        _queries(
            pid, qkv_ptr, cos_sin_ptr, q_weight_ptr, out_q_ptr, q_scale_ptr, lens_ptr, q_index_ptr, q_scale_inv_ptr,
            num_tokens, num_req, requests_per_token, max_pos, scale_cols, eps, upper, stride_qkv, stride_cos, stride_qt,
            stride_qh, HQ, D, HEADS, TOKENS, POLICY, FP8, Q_SCALE,
        )  # fmt: skip
    elif pid < num_q + num_kv:
        _keys_and_values(
            pid - num_q, qkv_ptr, cos_sin_ptr, k_weight_ptr, kcache_ptr, vcache_ptr, out_k_ptr, out_v_ptr, lens_ptr,
            q_index_ptr, table_ptr, k_scale_ptr, v_scale_ptr, num_tokens, num_req, requests_per_token, max_pos,
            max_pages, num_pages, eps, k_scale, v_scale, stride_table, stride_qkv, stride_cos, stride_kp, stride_kt,
            stride_kh, stride_vp, stride_vt, stride_vh, stride_okt, stride_okh, stride_ovt, stride_ovh,
            HQ, HKV, D, PAGE, STEPS, POLICY, FP8, K_IN_MEMORY, V_IN_MEMORY, OUT_K, OUT_V,
        )  # fmt: skip
    else:
        pair = pid - num_q - num_kv
        _clear_request(
            pair // HKV, pair % HKV, kcache_ptr, vcache_ptr, q_scale_ptr, flag_ptr, q_index_ptr, lens_ptr, table_ptr,
            stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_table, max_pages, num_pages,
            scale_cols, HQ, HKV, D, PAGE, FP8, Q_SCALE,
        )  # fmt: skip
