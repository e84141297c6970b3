"""The router product for few tokens on SM90, in Gluon: everything in registers, no shared-memory pipeline.

    out[m, n] = sum_k x[m, k] high[n, k] + scale * sum_k x[m, k] low[n, k]  (+ scale^2 * sum_k x[m, k] third[n, k])

Grid: weight-row tiles (16) x token tiles (MT) x splits of K, splits fastest. Weight rows are the M side of `mma.sync`
m16n8k16, tokens the N side, so 8 tokens need no padding. Every lane loads 16 consecutive bytes of a row: the order of
K inside a block of 32 is not that of the instruction, but it is the same for both operands, and the sum does not care.
So operands go from global memory to their registers without a shuffle.

Warps take different K and add up through shared memory; CTAs of a tile leave fp32 partials to a second kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hpc.common.gluon import mma_v2, pdl_launch, pdl_wait
from hpc.gemm.router.hopper_config import SmallConfig

__all__ = ["SmallConfig"]


@gluon.jit
def _offsets(row0, stride, k0, rows_end, k_end, ROWS: gl.constexpr, L: gl.constexpr, C: gl.constexpr):
    """Offsets and mask of a [WARPS, ROWS, 32] block whose warp w starts at k0 + w * CHUNKS * 32."""
    w = gl.expand_dims(gl.expand_dims(gl.arange(0, C.WARPS, gl.SliceLayout(1, gl.SliceLayout(2, L))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L))), 0), 2)
    i = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
    k = w * (C.CHUNKS * 32) + i + k0
    row = r + row0
    return row.to(gl.int64) * stride + k, (row < rows_end) & (k < k_end)


@gluon.jit
def _operand(block, ROWS: gl.constexpr, C: gl.constexpr):
    """Relabel K so that a lane's 16 bytes are its four pairs of two k16 steps: k = (t, s, h, e) -> (s, h, t, e)."""
    block = block.reshape([C.WARPS, ROWS, 4, 2, 2, 2]).permute([0, 1, 3, 4, 2, 5])
    return block.reshape([C.WARPS, ROWS, 32])


@gluon.jit
def _weights(ptr, n0, stride, k0, n_end, k_end, C: gl.constexpr):
    """The CTA's part of one BF16 weight, as CHUNKS blocks in registers."""
    CHUNKS: gl.constexpr = C.CHUNKS
    ROWS: gl.constexpr = C.ROWS
    L: gl.constexpr = C.W_LOAD
    blocks = ()
    for j in gl.static_range(CHUNKS):
        offset, mask = _offsets(n0, stride, k0 + j * 32, n_end, k_end, ROWS, L, C)
        block = gl.load(ptr + offset, mask=mask, other=0.0)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit(do_not_specialize=["num_tokens", "splits"])
def _router_small_kernel(x_ptr, high_ptr, low_ptr, third_ptr, out_ptr, num_tokens, n_end, k_end, splits, stride_x,
                         stride_high, stride_low, stride_third, stride_out, scale, C: gl.constexpr):  # fmt: skip
    """See the module docstring. x [num_tokens, k_end], weights [n_end, k_end], all BF16 with rows of 16-byte multiples.

    PARTIAL: out_ptr is fp32 [splits, num_tokens, n_end], added by a second kernel; else it is the output and splits 1.
    """
    pdl_launch(C.PDL)
    pid = gl.program_id(0)
    split = pid % splits
    tile = pid // splits
    n_tiles = (n_end + C.ROWS - 1) // C.ROWS
    n0 = tile % n_tiles * C.ROWS
    m0 = tile // n_tiles * C.MT
    k0 = split * C.SPAN
    CHUNKS: gl.constexpr = C.CHUNKS
    if not C.EARLY:
        pdl_wait(C.PDL)
    high = _weights(high_ptr, n0, stride_high, k0, n_end, k_end, C)
    low = _weights(low_ptr, n0, stride_low, k0, n_end, k_end, C)
    third = ()
    if C.TERMS == 3:
        third = _weights(third_ptr, n0, stride_third, k0, n_end, k_end, C)
    if C.EARLY:
        pdl_wait(C.PDL)
    MT: gl.constexpr = C.MT
    ROWS: gl.constexpr = C.ROWS
    LX: gl.constexpr = C.X_LOAD
    LA: gl.constexpr = C.LA
    LB: gl.constexpr = C.LB
    acc_high = gl.full([C.WARPS, C.ROWS, C.MT], 0.0, gl.float32, C.MMA)
    acc_low = gl.full([C.WARPS, C.ROWS, C.MT], 0.0, gl.float32, C.MMA)
    acc_third = gl.full([C.WARPS, C.ROWS, C.MT], 0.0, gl.float32, C.MMA)
    tokens = ()
    for j in gl.static_range(CHUNKS):
        offset, mask = _offsets(m0, stride_x, k0 + j * 32, num_tokens, k_end, MT, LX, C)
        block = gl.load(x_ptr + offset, mask=mask, other=0.0)
        tokens = tokens + (block,)  # type: ignore[assignment]  # noqa: RUF005
    for j in gl.static_range(CHUNKS):
        x = gl.convert_layout(_operand(tokens[j], MT, C).permute([0, 2, 1]), LB, assert_trivial=True)
        acc_high = mma_v2(gl.convert_layout(_operand(high[j], ROWS, C), LA, assert_trivial=True), x, acc_high)
        acc_low = mma_v2(gl.convert_layout(_operand(low[j], ROWS, C), LA, assert_trivial=True), x, acc_low)
        if C.TERMS == 3:
            acc_third = mma_v2(
                gl.convert_layout(_operand(third[j], ROWS, C), LA, assert_trivial=True), x, acc_third
            )
    total = acc_high + acc_low * scale
    if C.TERMS == 3:
        total = acc_high + (acc_low + acc_third * scale) * scale
    total = gl.sum(gl.convert_layout(total, C.MERGE), 0)

    LO: gl.constexpr = gl.SliceLayout(0, C.MERGE)
    r = gl.expand_dims(gl.arange(0, C.ROWS, gl.SliceLayout(1, LO)), 1)
    t = gl.expand_dims(gl.arange(0, C.MT, gl.SliceLayout(0, LO)), 0)
    mask = (r + n0 < n_end) & (t + m0 < num_tokens)
    if C.PARTIAL:
        row = split.to(gl.int64) * num_tokens + (t + m0)
        gl.store(out_ptr + (row * n_end + (r + n0)), total, mask=mask)
    else:
        out = out_ptr + ((t + m0).to(gl.int64) * stride_out + (r + n0))
        gl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)
