"""The router product for many tokens on SM90, in Gluon: TMA, wgmma, one producer warp.

    out[m, n] = sum_k x[m, k] high[n, k] + scale * sum_k x[m, k] low[n, k]  (+ scale^2 * sum_k x[m, k] third[n, k])

Units of work: token tiles (BM) x weight-row tiles (BN) x splits of K; weight-row tiles are fastest, so that CTAs that
run side by side share their x in the L2. CTAs take units pid, pid + grid, ... and the producer runs ahead into the
next unit while the epilogue stores.

High and low rows of a tile are stacked in shared memory, so one wgmma of width 2 * P reads x once for both products:

    [ x high^T | x low^T ] [BM, 2 P]  +=  x [BM, 64]  [ high; low ]^T [64, 2 P]

The epilogue splits the accumulator in registers and combines: hi + scale * lo. BN may be two powers of two (64 + 32).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from hpc.common.gluon import (
    TensorDescriptor,
    fence_async_shared,
    mbarrier,
    pdl_launch,
    pdl_wait,
    tma_load,
)
from hpc.gemm.router.hopper_config import TileConfig

__all__ = ["TensorDescriptor", "TileConfig"]


@gluon.jit
def _unit(unit, n_end, k_end, splits, C: gl.constexpr):
    """(first token, first weight row, split, first and past-the-end step of K) of a unit."""
    n_tiles = (n_end + C.BN - 1) // C.BN
    steps = (k_end + C.BK - 1) // C.BK
    split = unit % splits
    tile = unit // splits
    lo = split * steps // splits
    hi = (split + 1) * steps // splits
    return tile // n_tiles * C.BM, tile % n_tiles * C.BN, split, lo, hi


@gluon.jit
def _load_weights(descs, bufs, bar, stage, n0, k, C: gl.constexpr):
    """Start the copies of all parts of the weight rows of one stage; rows past the end arrive as zeros."""
    high, low, third = descs
    w0, w1, w3 = bufs
    A: gl.constexpr = C.P0 // C.BOX
    for i in gl.static_range(A):
        tma_load(high, [n0 + i * C.BOX, k], bar, w0.index(stage).slice(i * C.BOX, C.BOX))
        tma_load(low, [n0 + i * C.BOX, k], bar, w0.index(stage).slice(C.P0 + i * C.BOX, C.BOX))
    if C.P1 > 0:
        tma_load(high, [n0 + C.P0, k], bar, w1.index(stage).slice(0, C.P1))
        tma_load(low, [n0 + C.P0, k], bar, w1.index(stage).slice(C.P1, C.P1))
    if C.TERMS == 3:
        tma_load(third, [n0, k], bar, w3.index(stage))


@gluon.jit
def _producer(
    x_desc, descs, xbuf, bufs, full_bars, empty_bars, num_units, n_end, k_end, splits, C: gl.constexpr
):
    """One warp that keeps STAGES of K under way, across units."""
    STAGES: gl.constexpr = C.STAGES
    unit = gl.program_id(0)
    m0, n0, _, lo, hi = _unit(unit, n_end, k_end, splits, C)
    early = 0
    if C.EARLY:
        # The preceding kernel does not write the weights, so the first stages' start before it ends.
        early = gl.minimum(hi - lo, STAGES)
        for s in range(early):
            mbarrier.expect(full_bars.index(s), C.STAGE_BYTES)
            _load_weights(descs, bufs, full_bars.index(s), s, n0, (lo + s) * C.BK, C)
    pdl_wait(C.PDL)
    stage = 0
    phase = 1
    while unit < num_units:
        m0, n0, _, lo, hi = _unit(unit, n_end, k_end, splits, C)
        for k in range(lo, hi):
            bar = full_bars.index(stage)
            if early > 0:
                early -= 1
            else:
                mbarrier.wait(empty_bars.index(stage), phase)
                mbarrier.expect(bar, C.STAGE_BYTES)
                _load_weights(descs, bufs, bar, stage, n0, k * C.BK, C)
            tma_load(x_desc, [m0, k * C.BK], bar, xbuf.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        unit += gl.num_programs(0)


@gluon.jit
def _combine(acc, third, scale, P: gl.constexpr, C: gl.constexpr):
    """[BM, P] from the halves of a stacked accumulator: high + scale * low."""
    high, low = acc.reshape([C.BM, 2, P]).permute([0, 2, 1]).split()
    if C.TERMS == 3:
        low = low + gl.convert_layout(third, low.type.layout) * scale
    return high + low * scale


@gluon.jit
def _store(total, m0, n0, split, num_tokens, n_end, out_ptr, stride_out, P: gl.constexpr, C: gl.constexpr):
    """P columns to the output, or to this split's partial."""
    L: gl.constexpr = total.type.layout
    m = gl.expand_dims(gl.arange(0, C.BM, gl.SliceLayout(1, L)), 1) + m0
    n = gl.expand_dims(gl.arange(0, P, gl.SliceLayout(0, L)), 0) + n0
    mask = (m < num_tokens) & (n < n_end)
    if C.PARTIAL:
        row = split.to(gl.int64) * num_tokens + m
        gl.store(out_ptr + (row * n_end + n), total, mask=mask)
    else:
        gl.store(out_ptr + (m.to(gl.int64) * stride_out + n), total.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _products(xbuf, bufs, full_bars, empty_bars, stage, phase, lo, hi, C: gl.constexpr):
    """The accumulators of steps [lo, hi): one group of wgmma always in flight, the stage before it handed back."""
    w0, w1, w3 = bufs
    acc0 = gl.full([C.BM, 2 * C.P0], 0.0, gl.float32, C.MMA0)
    acc1 = gl.full([C.BM, 2 * C.P1 if C.P1 else 2], 0.0, gl.float32, C.MMA1 if C.P1 else C.MMA0)
    acc3 = gl.full([C.BM, C.P0], 0.0, gl.float32, C.MMA3)
    last = stage + 0  # a name of its own: an alias of `stage` would not be carried through the loop
    for k in range(lo, hi):
        mbarrier.wait(full_bars.index(stage), phase)
        x = xbuf.index(stage)
        acc0 = warpgroup_mma(x, w0.index(stage).permute([1, 0]), acc0, is_async=True)
        if C.P1 > 0:
            acc1 = warpgroup_mma(x, w1.index(stage).permute([1, 0]), acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        elif C.TERMS == 3:
            acc3 = warpgroup_mma(x, w3.index(stage).permute([1, 0]), acc3, is_async=True)
            acc0, acc3 = warpgroup_mma_wait(2, deps=[acc0, acc3])
        else:
            acc0 = warpgroup_mma_wait(1, deps=[acc0])
        if k > lo:
            mbarrier.arrive(empty_bars.index(last), count=1)
        last = stage
        stage += 1
        if stage == C.STAGES:
            stage = 0
            phase ^= 1
    if C.P1 > 0:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    elif C.TERMS == 3:
        acc0, acc3 = warpgroup_mma_wait(0, deps=[acc0, acc3])
    else:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    mbarrier.arrive(empty_bars.index(last), count=1)
    return acc0, acc1, acc3, stage, phase


@gluon.jit
def _consumer(xbuf, bufs, full_bars, empty_bars, out_ptr, num_units, num_tokens, n_end, k_end, splits, stride_out,
              scale, C: gl.constexpr):  # fmt: skip
    """The warps that compute."""
    stage = 0
    phase = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        m0, n0, split, lo, hi = _unit(unit, n_end, k_end, splits, C)
        if C.PROMOTE > 0:
            acc0, acc1, acc3, stage, phase = _products(
                xbuf, bufs, full_bars, empty_bars, stage, phase, lo, gl.minimum(lo + C.PROMOTE, hi), C
            )
            total = _combine(acc0, acc3, scale, C.P0, C)
            for k in range(lo + C.PROMOTE, hi, C.PROMOTE):
                acc0, acc1, acc3, stage, phase = _products(
                    xbuf, bufs, full_bars, empty_bars, stage, phase, k, gl.minimum(k + C.PROMOTE, hi), C
                )
                total += _combine(acc0, acc3, scale, C.P0, C)
            _store(total, m0, n0, split, num_tokens, n_end, out_ptr, stride_out, C.P0, C)
        else:
            acc0, acc1, acc3, stage, phase = _products(
                xbuf, bufs, full_bars, empty_bars, stage, phase, lo, hi, C
            )
            total = _combine(acc0, acc3, scale, C.P0, C)
            _store(total, m0, n0, split, num_tokens, n_end, out_ptr, stride_out, C.P0, C)
            if C.P1 > 0:
                total = _combine(acc1, acc3, scale, C.P1, C)
                _store(total, m0, n0 + C.P0, split, num_tokens, n_end, out_ptr, stride_out, C.P1, C)


@gluon.jit(do_not_specialize=["num_units", "num_tokens", "splits"])
def _router_tile_kernel(x_desc, high_desc, low_desc, third_desc, out_ptr, num_units, num_tokens, n_end, k_end, splits,
                        stride_out, scale, C: gl.constexpr):  # fmt: skip
    """See the module docstring. Every split has a step of K at least.

    PARTIAL: out_ptr is fp32 [splits, num_tokens, n_end], added by a second kernel; else it is the output and splits 1.
    """
    STAGES: gl.constexpr = C.STAGES
    pdl_launch(C.PDL)
    xbuf = gl.allocate_shared_memory(gl.bfloat16, [C.STAGES, C.BM, C.BK], C.SMEM)
    w0 = gl.allocate_shared_memory(gl.bfloat16, [C.STAGES, 2 * C.P0, C.BK], C.SMEM)
    w1 = w0
    w3 = w0
    if C.P1 > 0:
        w1 = gl.allocate_shared_memory(gl.bfloat16, [C.STAGES, 2 * C.P1, C.BK], C.SMEM)
    if C.TERMS == 3:
        w3 = gl.allocate_shared_memory(gl.bfloat16, [C.STAGES, C.P0, C.BK], C.SMEM)
    full_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(i), count=1)
        mbarrier.init(empty_bars.index(i), count=1)
    fence_async_shared()
    bufs = (w0, w1, w3)
    descs = (high_desc, low_desc, third_desc)
    gl.warp_specialize(
        [
            (_consumer, (xbuf, bufs, full_bars, empty_bars, out_ptr, num_units, num_tokens, n_end, k_end, splits,
                         stride_out, scale, C)),
            (_producer, (x_desc, descs, xbuf, bufs, full_bars, empty_bars, num_units, n_end, k_end, splits, C)),
        ],
        [1],
        [40],
    )  # fmt: skip
