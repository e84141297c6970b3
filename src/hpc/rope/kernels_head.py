# mypy: ignore-errors
# ruff: noqa: SIM108
"""Heads in and out of a prologue kernel: loads, norm, rotation, scales, stores of tiles [tokens, heads, dims].

A tile has TB tokens x HB heads; each head is loaded as the two halves of its rotated pairs, (x[i], x[i + half]) in NeoX
style or (x[2i], x[2i+1]) interleaved, and the dims behind them that are not rotated. A thread holds eight neighbours.
"""

import triton
import triton.language as tl

from hpc.common.triton_helpers import to_bf16, to_e4m3_bytes


@triton.jit
def _fp32(x):
    """BF16 to fp32 as integers: one instruction a value, where a conversion takes two for the upper half of a word."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _fused(x, y, z, INTERPRET: tl.constexpr):
    """x * y + z in one rounding."""
    if INTERPRET:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def _load_pairs(ptrs, mask, HALF: tl.constexpr, HALF_P: tl.constexpr, NEOX: tl.constexpr):
    """Rotated dims of heads at `ptrs` [TB, HB, 1] as they lie: (first halves, second halves) or, interleaved, all of
    them twice. Zero past HALF; undefined outside `mask`."""
    if NEOX:
        i = tl.arange(0, HALF_P)[None, None, :]
        if HALF == HALF_P:
            a = tl.load(ptrs + i, mask=mask)
            b = tl.load(ptrs + (i + HALF), mask=mask)
        else:
            a = tl.load(ptrs + i, mask=mask & (i < HALF), other=0.0)
            b = tl.load(ptrs + (i + HALF), mask=mask & (i < HALF), other=0.0)
    else:
        i = tl.arange(0, 2 * HALF_P)[None, None, :]
        if HALF == HALF_P:
            a = tl.load(ptrs + i, mask=mask)
        else:
            a = tl.load(ptrs + i, mask=mask & (i < 2 * HALF), other=0.0)
        b = a
    return a, b


@triton.jit
def _pairs(a, b, HALF_P: tl.constexpr, NEOX: tl.constexpr):
    """Pairs (a, b) of what `_load_pairs` brought."""
    if NEOX == 0:
        a, b = tl.split(tl.reshape(a, (a.shape[0], a.shape[1], HALF_P, 2)))
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
    """The dims behind the rotated ones, [TB, HB, REST_P]; zero past D."""
    i = tl.arange(0, REST_P)[None, None, :] + 2 * HALF
    return tl.load(ptrs + i, mask=mask & (i < D), other=0.0)


@triton.jit
def _load_head(ptrs, mask, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
               NEOX: tl.constexpr):  # fmt: skip
    """What lies at the heads at `ptrs` [TB, HB, 1], in three parts. Without a rest that is the first."""
    a, b = _load_pairs(ptrs, mask, HALF, HALF_P, NEOX)
    rest = a
    if REST_P > 0:
        rest = _load_rest(ptrs, mask, D, HALF, REST_P)
    return a, b, rest


@triton.jit
def _opened(head, HALF_P: tl.constexpr, NEOX: tl.constexpr):
    """BF16 heads as `_load_head` brought them to fp32 (a, b, rest)."""
    a, b = _pairs(head[0], head[1], HALF_P, NEOX)
    return _fp32(a), _fp32(b), _fp32(head[2])


@triton.jit
def _load_angles(
    ptr, stride, position, max_pos, w_ptr, HB: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
    REST_P: tl.constexpr, NEOX: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Angles of `position` [TB], clamped to the table, and weights of the norm at `w_ptr`.

    (cos a, sin a, cos b, -sin b, weight a, weight b, weight rest), each [TB, HB, dims]: one address a head, since a
    tile [1, 1, dims] would get a layout of its own, and heads would pass through shared memory. With a norm before the
    rotation the angles of a and of b carry the weights of a and of b.
    """
    TB: tl.constexpr = position.shape[0]
    i = tl.arange(0, HALF_P)[None, None, :]
    row = tl.minimum(tl.maximum(position, 0), max_pos - 1).to(tl.int64)
    ptrs = tl.broadcast_to(ptr + row[:, None, None] * stride + i, (TB, HB, HALF_P))
    if HALF == HALF_P:
        cos, sin = tl.load(ptrs).to(tl.float32), tl.load(ptrs + HALF).to(tl.float32)
    else:
        cos = tl.load(ptrs, mask=i < HALF, other=0.0).to(tl.float32)
        sin = tl.load(ptrs + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    if POLICY == 0:
        return cos, sin, cos, sin * -1.0, cos, cos, cos
    else:
        w = _load_head(w_ptr + tl.zeros((TB, HB, 1), tl.int32), tl.full((TB, HB, 1), 1, tl.int1), D, HALF, HALF_P,
                       REST_P, NEOX)  # fmt: skip
        wa, wb = _pairs(w[0], w[1], HALF_P, NEOX)
        wa, wb, rest = wa.to(tl.float32), wb.to(tl.float32), w[2].to(tl.float32)
        if POLICY == 2:
            return cos * wa, sin * wa, cos * wb, sin * wb * -1.0, wa, wb, rest
        else:
            return cos, sin, cos, sin * -1.0, wa, wb, rest


@triton.jit
def _add_square(total, x, EXACT: tl.constexpr):
    """total + x^2. EXACT: x is a BF16 value, so its square needs no rounding and one instruction does both."""
    if EXACT:
        return tl.fma(x, x, total)
    else:
        return total + x * x


@triton.jit
def _halves(x):
    """(even, odd) entries along the last axis."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))


@triton.jit
def _four_squares(first, x, EXACT: tl.constexpr):
    """first + x0^2 + x1^2 + ..., in this order, for each four neighbours of the last axis (all, if fewer)."""
    if x.shape[2] >= 4:
        even, odd = _halves(x)
        x0, x2 = _halves(even)
        x1, x3 = _halves(odd)
        return _add_square(
            _add_square(_add_square(_add_square(first, x0, EXACT), x1, EXACT), x2, EXACT), x3, EXACT
        )
    elif x.shape[2] == 2:
        x0, x1 = _halves(x)
        return _add_square(_add_square(first, x0, EXACT), x1, EXACT)
    else:
        return _add_square(first, x, EXACT)


@triton.jit
def _eight_squares(x, EXACT: tl.constexpr):
    """Sums of squares of eight neighbours along the last axis, one added after the other: what a thread holds."""
    if x.shape[2] >= 8:
        fours = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 8, 2, 4))
        low, high = tl.split(tl.permute(fours, (0, 1, 2, 4, 3)))
        shape: tl.constexpr = (x.shape[0], x.shape[1], x.shape[2] // 2)
        low, high = tl.reshape(low, shape), tl.reshape(high, shape)
        return _four_squares(_four_squares(0.0, low, EXACT), high, EXACT)
    else:
        return _four_squares(0.0, x, EXACT)


@triton.jit
def _pair_squares(a, b, EXACT: tl.constexpr):
    """The same for eight dims that alternate between a and b."""
    if a.shape[2] >= 4:
        a_even, a_odd = _halves(a)
        b_even, b_odd = _halves(b)
        a0, a2 = _halves(a_even)
        b0, b2 = _halves(b_even)
        a1, a3 = _halves(a_odd)
        b1, b3 = _halves(b_odd)
        total = _add_square(
            _add_square(_add_square(_add_square(0.0, a0, EXACT), b0, EXACT), a1, EXACT), b1, EXACT
        )
        return _add_square(
            _add_square(_add_square(_add_square(total, a2, EXACT), b2, EXACT), a3, EXACT), b3, EXACT
        )
    elif a.shape[2] == 2:
        a0, a1 = _halves(a)
        b0, b1 = _halves(b)
        return _add_square(
            _add_square(_add_square(_add_square(0.0, a0, EXACT), b0, EXACT), a1, EXACT), b1, EXACT
        )
    else:
        return _add_square(_add_square(0.0, a, EXACT), b, EXACT)


@triton.jit
def _rms_factor(
    a, b, rest, eps, D: tl.constexpr, REST_P: tl.constexpr, NEOX: tl.constexpr, EXACT: tl.constexpr
):
    """1 / sqrt(mean(x^2) + eps) of each head, [TB, HB]."""
    if NEOX:
        total = tl.sum(_eight_squares(a, EXACT).to(tl.float64) + _eight_squares(b, EXACT).to(tl.float64), 2)
    else:
        total = tl.sum(_pair_squares(a, b, EXACT).to(tl.float64), 2)
    if REST_P > 0:
        total += tl.sum(_eight_squares(rest, EXACT).to(tl.float64), 2)
    total = total.to(tl.float32)
    if D & (D - 1) == 0:
        mean = total * (1.0 / D)
    else:
        mean = tl.math.div_rn(total, tl.full(total.shape, D, tl.float32))
    return tl.math.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))


@triton.jit
def _project(head, angles, eps, D: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr, NEOX: tl.constexpr,
             POLICY: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """(a, b, rest, factor [TB, HB]) of heads as loaded: weighed, rotated; the factor of the norm still lacks."""
    a, b, rest = _opened(head, HALF_P, NEOX)
    factor = tl.full((a.shape[0], a.shape[1]), 1.0, tl.float32)
    if POLICY == 2:
        factor = _rms_factor(a, b, rest, eps, D, REST_P, NEOX, True)
        rest = rest * angles[6]
    turned = _fused(a, angles[0], b * angles[3], INTERPRET)
    b = _fused(b, angles[2], a * angles[1], INTERPRET)
    a = turned
    if POLICY == 1:
        factor = _rms_factor(a, b, rest, eps, D, REST_P, NEOX, False)
        a, b, rest = a * angles[4], b * angles[5], rest * angles[6]
    return a, b, rest, factor


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(x, INTERPRET: tl.constexpr):
    """Largest |x| along the last axis; NaN if there is one. Eight neighbours first, as a thread holds them and as the
    squares are added: a norm's factor and this then have one layout."""
    if INTERPRET:  # as integers, among which a NaN is larger than all numbers
        return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)
    else:
        x = tl.abs(x)
        for _ in tl.static_range(3):
            if x.shape[2] > 1:
                even, odd = _halves(x)
                x = _larger(even, odd)
        return tl.reduce(x, 2, _larger)


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
