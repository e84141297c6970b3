"""Router kernels in Triton that run on any GPU and, interpreted, on a CPU: row products, tiles, sums of partials."""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait, to_bf16


@triton.jit
def _store(ptr, value, mask, OUT_BF16: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 to the output's dtype with one rounding."""
    if OUT_BF16:
        tl.store(ptr, to_bf16(value, INTERPRET), mask=mask)
    else:
        tl.store(ptr, value, mask=mask)


@triton.jit
def _weight(high_ptr, low_ptr, third_ptr, row_high, row_low, row_third, k, mask, scale, TERMS: tl.constexpr):
    """high + scale * low (+ scale^2 * third) in fp32: at most 24 bits apart, so the sum keeps the weight."""
    high = tl.load(high_ptr + (row_high + k), mask=mask, other=0.0).to(tl.float32)
    low = tl.load(low_ptr + (row_low + k), mask=mask, other=0.0).to(tl.float32)
    if TERMS == 3:
        low += tl.load(third_ptr + (row_third + k), mask=mask, other=0.0).to(tl.float32) * scale
    return high + low * scale


@triton.jit(do_not_specialize=["num_tokens"])
def _router_row_kernel(
    x_ptr, high_ptr, low_ptr, third_ptr, out_ptr, num_tokens, n_end, k_end,
    stride_x, stride_high, stride_low, stride_third, stride_out, scale,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TERMS: tl.constexpr, EARLY: tl.constexpr,
    OUT_BF16: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A handful of tokens: ROWS weight rows a program, no matrix unit, nothing to merge.

        out[m, n] = sum_k x[m, k] * (high[n, k] + scale * low[n, k] (+ scale^2 * third[n, k]))

    Grid: (n / ROWS). BLOCK_K >= k_end: a row is in registers, loaded before the wait if EARLY.
    """
    pdl_launch(PDL)
    if not EARLY:
        pdl_wait(PDL)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (n < n_end) & (k < k_end)
    row = n.to(tl.int64)
    w = _weight(high_ptr, low_ptr, third_ptr, row * stride_high, row * stride_low, row * stride_third, k, mask, scale,
                TERMS)  # fmt: skip
    if EARLY:
        pdl_wait(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for m in tl.static_range(TOKENS):
        token = tl.minimum(m, num_tokens - 1)
        x = tl.load(x_ptr + token.to(tl.int64) * stride_x + k, mask=k < k_end, other=0.0).to(tl.float32)
        total = tl.sum(w * x, axis=1)
        _store(
            out_ptr + (m * stride_out + rows), total, (rows < n_end) & (m < num_tokens), OUT_BF16, INTERPRET
        )


@triton.jit
def _dot(x, w, acc, INTERPRET: tl.constexpr):
    """acc + x w^T; the interpreter multiplies in fp32, where products of bf16 values are exact."""
    if INTERPRET:
        return acc + tl.sum(x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :], axis=2)
    else:
        return tl.dot(x, tl.trans(w), acc)


@triton.jit(do_not_specialize=["num_tokens", "steps"])
def _router_block_kernel(
    x_ptr, high_ptr, low_ptr, third_ptr, out_ptr, num_tokens, n_end, k_end, steps,
    stride_x, stride_high, stride_low, stride_third, stride_out, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TERMS: tl.constexpr, PARTIAL: tl.constexpr,
    OUT_BF16: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Any n, k and row strides: one [BLOCK_M, BLOCK_N] tile of one split of K a program.

    Grid: (weight-row tiles * token tiles, 1, splits), weight rows fastest; a split takes `steps` blocks of K.
    PARTIAL: out_ptr is fp32 [splits, num_tokens, n_end], added by `_router_sum_kernel`; else the output, splits 1.
    """
    pdl_launch(PDL)
    pdl_wait(PDL)
    n_tiles = tl.cdiv(n_end, BLOCK_N)
    n = tl.program_id(0) % n_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) // n_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    acc_high = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_low = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_third = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_row = m.to(tl.int64)[:, None] * stride_x
    w_row = n.to(tl.int64)[:, None]
    for step in range(split * steps, (split + 1) * steps):
        k = (step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptr + (x_row + k), mask=(m[:, None] < num_tokens) & (k < k_end), other=0.0)
        mask = (n[:, None] < n_end) & (k < k_end)
        high = tl.load(high_ptr + (w_row * stride_high + k), mask=mask, other=0.0)
        low = tl.load(low_ptr + (w_row * stride_low + k), mask=mask, other=0.0)
        if TERMS == 3:
            # Each step's sum leaves the matrix unit, whose own additions lose more than the third part gains: 4.4e-6
            # RMS against 2.4e-7. As a plain sum the compiler would put it back; it leaves an fma alone.
            zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            third = tl.load(third_ptr + (w_row * stride_third + k), mask=mask, other=0.0)
            acc_high = tl.fma(_dot(x, high, zero, INTERPRET), 1.0, acc_high)
            acc_low = tl.fma(_dot(x, low, zero, INTERPRET), 1.0, acc_low)
            acc_third = tl.fma(_dot(x, third, zero, INTERPRET), 1.0, acc_third)
        else:
            acc_high = _dot(x, high, acc_high, INTERPRET)
            acc_low = _dot(x, low, acc_low, INTERPRET)
    if TERMS == 3:
        acc_low += acc_third * scale
    total = acc_high + acc_low * scale
    mask = (m[:, None] < num_tokens) & (n[None, :] < n_end)
    if PARTIAL:
        row = split.to(tl.int64) * num_tokens + m.to(tl.int64)[:, None]
        tl.store(out_ptr + (row * n_end + n[None, :]), total, mask=mask)
    else:
        out = out_ptr + (m.to(tl.int64)[:, None] * stride_out + n[None, :])
        _store(out, total, mask, OUT_BF16, INTERPRET)


@triton.jit
def _sum_splits(part_ptr, at, stride_split, splits, mask, MAX_SPLITS: tl.constexpr):
    """part[0][at] + part[1][at] + ..., in order: MAX_SPLITS loads in flight, those from `splits` on left out."""
    total = tl.load(part_ptr + at, mask=mask, other=0.0)
    for s in tl.static_range(1, MAX_SPLITS):
        total += tl.load(part_ptr + (s * stride_split + at), mask=mask & (s < splits), other=0.0)
    return total


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _router_sum_kernel(
    part_ptr, out_ptr, num_tokens, n_end, splits, stride_out,
    MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, OUT_BF16: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """out = sum of part[s] over s; part is fp32 [splits, num_tokens, n_end]. Grid: (elements / BLOCK)."""
    pdl_launch(PDL)
    count = num_tokens.to(tl.int64) * n_end
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    total = _sum_splits(part_ptr, at, count, splits, at < count, MAX_SPLITS)
    _store(out_ptr + (at // n_end * stride_out + at % n_end), total, at < count, OUT_BF16, INTERPRET)
