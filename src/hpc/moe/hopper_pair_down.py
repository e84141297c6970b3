"""Down product of the fused MoE for many rows with tokens on the M side of `wgmma`: see `hopper_pair`.

One scale a tensor stays in the tensor core's accumulators over all of I: their error reaches y only, as 1.2e-3 at
I = 1536, and flips nothing. Block scales take a fresh accumulator a box.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from hpc.common.gluon import barrier, fence_async_shared, mbarrier, pdl_launch, pdl_wait
from hpc.moe.hopper_down import fetch_rows, fetch_weights
from hpc.moe.hopper_order import in_list_order
from hpc.moe.hopper_pair import added, pass_on, sum_of
from hpc.moe.hopper_ring import advance


@gluon.jit
def _producer(w_desc, a_desc, wbuf, abuf, full_bars, empty_bars, expert_ptr, start_ptr, num_tiles_ptr,
              C: gl.constexpr):  # fmt: skip
    """One warp that keeps STAGES stages in flight, across items; the weights of the first ones before the wait."""
    STAGES: gl.constexpr = C.STAGES
    BYTES: gl.constexpr = C.BK * (256 + 128)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    units = gl.maximum(gl.load(num_tiles_ptr) * C.RT - first + step - 1, 0) // step * C.KB
    for i in range(0, gl.minimum(STAGES, units)):
        expert, _, block = in_list_order(expert_ptr, first + i // C.KB * step, C)
        mbarrier.expect(full_bars.index(i), BYTES)
        fetch_weights(w_desc, wbuf, full_bars.index(i), i, expert, block * 256, i % C.KB * C.BK, C)
    pdl_wait(C.PDL)
    for i in range(0, gl.minimum(STAGES, units)):
        start = gl.load(start_ptr + (first + i // C.KB * step) // C.RT)
        fetch_rows(a_desc, abuf, full_bars.index(i), i, start, i % C.KB * C.BK, C)
    stage = 0
    phase = 0
    for unit in range(STAGES, units):
        expert, tile, block = in_list_order(expert_ptr, first + unit // C.KB * step, C)
        start = gl.load(start_ptr + tile)
        k0 = unit % C.KB * C.BK
        mbarrier.wait(empty_bars.index(stage), phase)
        full = full_bars.index(stage)
        mbarrier.expect(full, BYTES)
        fetch_weights(w_desc, wbuf, full, stage, expert, block * 256, k0, C)
        fetch_rows(a_desc, abuf, full, stage, start, k0, C)
        stage, phase = advance(stage, phase, C)


@gluon.jit
def _block_sums(wtile, atile, full_bars, empty_bars, stage, phase, ws_ptr, second, row_at, live,
                num_rows, GROUP: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(sums [64, 128] of either half of the columns, stage, phase) over all of I, block scales."""
    zero = gl.full([64, 128], 0.0, gl.float32, C.PAIR_MMA)
    acc0 = zero
    acc1 = zero
    d = zero
    token = gl.load(row_at, mask=live, other=0.0)
    scale0 = gl.load(ws_ptr)
    scale1 = gl.load(ws_ptr + second)
    for k in range(0, C.KB):
        # for the next turn: on their way while this one's products are
        group = gl.minimum(k + 1, C.KB - 1) * C.BK // 128
        next_token = gl.load(row_at + group * num_rows, mask=live, other=0.0)
        next_scale0 = gl.load(ws_ptr + group)
        next_scale1 = gl.load(ws_ptr + second + group)
        mbarrier.wait(full_bars.index(stage), phase)
        a = atile.index(stage * 2 + GROUP)
        d = sum_of(a, wtile.index(stage * 2), d)
        acc0 = added(acc0, d * gl.expand_dims(token * scale0, 1))
        d = sum_of(a, wtile.index(stage * 2 + 1), d)
        barrier()
        mbarrier.arrive(empty_bars.index(stage), count=1)
        acc1 = added(acc1, d * gl.expand_dims(token * scale1, 1))
        token = next_token
        scale0 = next_scale0
        scale1 = next_scale1
        stage, phase = advance(stage, phase, C)
    return acc0, acc1, stage, phase


@gluon.jit
def _tensor_sums(wtile, atile, full_bars, empty_bars, stage, phase, GROUP: gl.constexpr, C: gl.constexpr):
    """(sums [64, 128] of either half of the columns, stage, phase) over all of I, one scale a tensor."""
    acc0 = gl.full([64, 128], 0.0, gl.float32, C.PAIR_MMA)
    acc1 = acc0
    before = stage  # the stage whose products may still be under way
    for k in range(0, C.KB):
        mbarrier.wait(full_bars.index(stage), phase)
        a = atile.index(stage * 2 + GROUP)
        acc0 = warpgroup_mma(a, wtile.index(stage * 2).permute([1, 0]), acc0, is_async=True)
        acc1 = warpgroup_mma(a, wtile.index(stage * 2 + 1).permute([1, 0]), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(2, deps=(acc0, acc1))
        barrier()
        mbarrier.arrive(empty_bars.index(before), count=1, pred=k > 0)
        before = stage + 0
        stage, phase = advance(stage, phase, C)
    acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
    barrier()
    mbarrier.arrive(empty_bars.index(before), count=1)
    return acc0, acc1, stage, phase


@gluon.jit
def _store_rows(acc, y_ptr, pair, live, column, C: gl.constexpr):
    """bf16 of [64, 128] to y[pair of a row, column + i]."""
    OUT: gl.constexpr = C.PAIR_OUT
    h = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, OUT)), 0) + column
    y = gl.convert_layout(acc.to(gl.bfloat16), OUT)
    at = y_ptr + gl.expand_dims(pair.to(gl.int64) * C.H, 1) + h
    gl.store(at, y, mask=gl.expand_dims(live, 1) & (h < C.H))


@gluon.jit
def _consumer(GROUP: gl.constexpr, wtile, atile, full_bars, empty_bars, ws_ptr, as_ptr, expert_ptr,
              start_ptr, rows_ptr, num_tiles_ptr, pair_ptr, y_ptr, num_rows, ws_rows, ws_cols,
              C: gl.constexpr):  # fmt: skip
    """The warpgroup of rows 64 GROUP to 64 GROUP + 63 of a tile."""
    FIRST: gl.constexpr = 64 * GROUP
    n = gl.arange(0, 64, gl.SliceLayout(1, C.PAIR_MMA)) + FIRST
    on = gl.arange(0, 64, gl.SliceLayout(1, C.PAIR_OUT)) + FIRST
    pdl_wait(C.PDL)
    pdl_launch(C.PDL)
    num_items = gl.load(num_tiles_ptr) * C.RT
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        expert, tile, block = in_list_order(expert_ptr, item, C)
        start = gl.load(start_ptr + tile)
        rows = gl.load(rows_ptr + tile)
        column = block * 256
        if rows > FIRST:
            pair = gl.load(pair_ptr + start + on, mask=on < rows, other=0)
            if C.BLOCK:
                scale_at = ws_ptr + expert.to(gl.int64) * (ws_rows * ws_cols) + column // 128 * ws_cols
                second = gl.where(column + 128 < C.H, ws_cols, 0)  # past H, weights are zeros
                acc0, acc1, stage, phase = _block_sums(
                    wtile, atile, full_bars, empty_bars, stage, phase, scale_at, second,
                    as_ptr + start + n, n < rows, num_rows, GROUP, C,
                )  # fmt: skip
            else:
                scale = gl.load(ws_ptr + expert)
                acc0, acc1, stage, phase = _tensor_sums(
                    wtile, atile, full_bars, empty_bars, stage, phase, GROUP, C
                )
                acc0 = acc0 * scale
                acc1 = acc1 * scale
            _store_rows(acc0, y_ptr, pair, on < rows, column, C)
            _store_rows(acc1, y_ptr, pair, on < rows, column + 128, C)
        else:
            stage, phase = pass_on(full_bars, empty_bars, stage, phase, C)


@gluon.jit(do_not_specialize=["num_rows", "ws_rows", "ws_cols"], do_not_specialize_on_alignment=["ws_ptr"])
def _moe_down_pair_kernel(
    w_desc, a_desc, ws_ptr, as_ptr, expert_ptr, start_ptr, rows_ptr, num_tiles_ptr, pair_ptr, y_ptr,
    num_rows, ws_rows, ws_cols, C: gl.constexpr,
):  # fmt: skip
    """`hopper_down._moe_down_sm90_kernel` by items of 128 rows and 256 output columns."""
    STAGES: gl.constexpr = C.STAGES
    wbuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES, 1, 256, C.BK], C.W_BOX)
    wtile = wbuf._reinterpret(gl.float8e4nv, [C.STAGES * 2, 128, C.BK], C.TILE)
    abuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES, 128, C.BK], C.TILE)
    atile = abuf._reinterpret(gl.float8e4nv, [C.STAGES * 2, 64, C.BK], C.TILE)
    full_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(i), count=1)
        mbarrier.init(empty_bars.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (0, wtile, atile, full_bars, empty_bars, ws_ptr, as_ptr, expert_ptr, start_ptr,
                         rows_ptr, num_tiles_ptr, pair_ptr, y_ptr, num_rows, ws_rows, ws_cols, C)),
            (_consumer, (1, wtile, atile, full_bars, empty_bars, ws_ptr, as_ptr, expert_ptr, start_ptr,
                         rows_ptr, num_tiles_ptr, pair_ptr, y_ptr, num_rows, ws_rows, ws_cols, C)),
            (_producer, (w_desc, a_desc, wbuf, abuf, full_bars, empty_bars, expert_ptr, start_ptr, num_tiles_ptr, C)),
        ],
        [4, 1],
        [C.PAIR_REGS, C.PRODUCER_REGS],
    )  # fmt: skip
