"""Both products of the fused MoE for many rows, SM90, Gluon: tiles of 256 weight rows, bound by the tensor core.

What limits 128 x 128 tiles at FP8 is the way from the L2 to the SMs: 32 KiB for 512 cycles of products is 64 bytes a
cycle and SM, twice of what arrives (some 28). Two weight tiles that share the rows of a stage need three quarters of
it, and block scales find all 128 columns of a group of the activations in one pass over H.

    grid (programs): items in turn, (tile of N rows, 128 columns of the activations or 256 of the output), so that the
                     programs are at one expert's weights at a time and share them in the L2
    producer warps   as in `hopper` and `hopper_down`
    consumer warps   two sums [128, N], each fed from fresh accumulators of the tensor core one after the other:
                     sum, sum and accumulator are 192 registers a thread at N = 128, a second accumulator would spill
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from hpc.common.gluon import barrier, fence_async_shared, mbarrier, pdl_launch, pdl_wait, tma_load
from hpc.moe.hopper import _activation, _also, _finish, _piece, _row_scales, _store_act, _wait_all


@gluon.jit
def _advance(stage, phase, C: gl.constexpr):
    """The next stage of the ring and its phase."""
    stage += 1
    if stage == C.STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _up_producer(w_desc, x_ptr, xs_ptr, wbuf, xbuf, sbuf, full_bars, empty_bars, expert_ptr, start_ptr, rows_ptr,
                 num_tiles_ptr, pair_ptr, top_k, xs_cols, C: gl.constexpr):  # fmt: skip
    """Keep STAGES stages in flight, across items. Gathered rows are handed over LAG stages after their copy began."""
    n = gl.arange(0, C.N, gl.SliceLayout(1, C.GATHER))
    kk = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, C.GATHER)), 0)
    sn = gl.arange(0, C.N, gl.BlockedLayout([1], [32], [C.PWARPS], [0]))
    pdl_wait(C.PDL)
    num_items = gl.load(num_tiles_ptr) * C.RT
    stage = 0
    phase = 1
    done = 0
    late = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // C.RT
        column = (item - tile * C.RT) * 16
        expert = gl.load(expert_ptr + tile)
        start = gl.load(start_ptr + tile)
        rows = gl.load(rows_ptr + tile)
        token = gl.load(pair_ptr + start + n, mask=n < rows, other=0) // top_k
        row_at = x_ptr + gl.expand_dims(token.to(gl.int64) * C.H, 1) + kk
        row_ok = gl.expand_dims(n < rows, 1) & (kk >= 0)
        if C.BLOCK:
            stoken = gl.load(pair_ptr + start + sn, mask=sn < rows, other=0) // top_k
            scale_at = xs_ptr + stoken.to(gl.int64) * xs_cols
        for k in range(0, C.KB):
            mbarrier.wait(empty_bars.index(stage), phase)
            full = full_bars.index(stage)
            mbarrier.expect(full, 256 * 128)
            tma_load(w_desc, [expert, column, 0, 0, k * 128], full, wbuf.index(stage))
            inside = row_ok & (kk < C.H - k * 128)
            async_copy.async_copy_global_to_shared(xbuf.index(stage), row_at + k * 128, mask=inside)
            if C.BLOCK:
                async_copy.async_copy_global_to_shared(sbuf.index(stage), scale_at + k, mask=sn < rows)
            async_copy.commit_group()
            async_copy.wait_group(C.LAG)
            fence_async_shared()
            barrier()
            mbarrier.arrive(full_bars.index(late), count=1, pred=done >= C.LAG)
            if done >= C.LAG:
                late += 1
                if late == C.STAGES:
                    late = 0
            done += 1
            stage, phase = _advance(stage, phase, C)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    for _ in range(gl.minimum(done, C.LAG)):
        mbarrier.arrive(full_bars.index(late), count=1)
        late += 1
        if late == C.STAGES:
            late = 0


@gluon.jit
def _up_consumer(wtile, xtile, sbuf, full_bars, empty_bars, ws_ptr, act_ptr, expert_ptr, start_ptr, rows_ptr,
                 num_tiles_ptr, a_ptr, as_ptr, num_rows, stride_a, ws_rows, ws_cols, C: gl.constexpr):  # fmt: skip
    """The warps that compute; see the module docstring."""
    MMA: gl.constexpr = C.MMA
    SPANS: gl.constexpr = C.SPANS
    GROUP: gl.constexpr = C.GROUP
    is_up = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, MMA)), 1) // 8 % 2 == 1
    zero = gl.full([128, C.N], 0.0, gl.float32, MMA)
    pdl_wait(C.PDL)
    pdl_launch(C.PDL)  # after the wait: what the next kernel reads early, the index, is then complete
    num_items = gl.load(num_tiles_ptr) * C.RT
    act = 1.0
    if not C.BLOCK:
        act = gl.load(act_ptr)
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // C.RT
        column = (item - tile * C.RT) * 128
        column1 = gl.minimum(column + 64, C.I - 1)  # past I, weights are zeros and results are not stored
        expert = gl.load(expert_ptr + tile)
        start = gl.load(start_ptr + tile)
        rows = gl.load(rows_ptr + tile)
        scale = 1.0
        scales_at = ws_ptr
        if C.BLOCK:
            scales_at = ws_ptr + expert.to(gl.int64) * (ws_rows * ws_cols)
        else:
            scale = gl.load(ws_ptr + expert)
        acc0 = zero
        acc1 = zero
        for k in range(0, C.KB):
            if C.BLOCK:
                gate0, up0 = _row_scales(scales_at, column, k, ws_cols, C)
                gate1, up1 = _row_scales(scales_at, column1, k, ws_cols, C)
            mbarrier.wait(full_bars.index(stage), phase)
            for first in gl.static_range(0, 2 * SPANS, GROUP):
                pieces = ()
                for i in gl.static_range(first, first + GROUP):
                    w = wtile.index(stage * 2 + i // SPANS)
                    pieces = _also(pieces, _piece(w, xtile.index(stage), i % SPANS, zero, C))
                done = _wait_all(pieces, GROUP)
                if C.BLOCK:
                    tokens = gl.expand_dims(sbuf.index(stage).load(gl.SliceLayout(0, MMA)), 0)
                if first + GROUP == 2 * SPANS:
                    barrier()
                    mbarrier.arrive(empty_bars.index(stage), count=1)
                for i in gl.static_range(GROUP):
                    d = done[i]
                    if C.BLOCK:
                        if first + i < SPANS:
                            d = d * (tokens * gl.where(is_up, up0, gate0))
                        else:
                            d = d * (tokens * gl.where(is_up, up1, gate1))
                    if first + i < SPANS:
                        acc0 += d
                    else:
                        acc1 += d
            stage, phase = _advance(stage, phase, C)
        h0 = _activation(acc0, scale, C)
        h1 = _activation(acc1, scale, C)
        _finish(h0, h1, act, a_ptr, as_ptr, start, rows, column, stride_a, num_rows, C)
        if not C.BLOCK:
            _store_act(h1 * act, a_ptr, start, rows, column + 64, stride_a, C)


@gluon.jit(
    do_not_specialize=["num_rows", "top_k", "xs_cols", "ws_rows", "ws_cols"],
    do_not_specialize_on_alignment=["xs_ptr", "ws_ptr", "act_ptr"],
)  # fmt: skip
def _moe_gate_up_wide_kernel(
    w_desc, x_ptr, xs_ptr, ws_ptr, act_ptr, expert_ptr, start_ptr, rows_ptr, num_tiles_ptr, pair_ptr, counter_ptr,
    part_ptr, a_ptr, as_ptr, num_rows, top_k, stride_a, xs_cols, ws_rows, ws_cols, C: gl.constexpr,
):  # fmt: skip
    """`hopper._moe_gate_up_sm90_kernel` by items of 128 columns; counter_ptr and part_ptr are not used."""
    STAGES: gl.constexpr = C.STAGES
    wbuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES, 1, 16, 2, 8, 128], C.W_BOX)
    wtile = wbuf._reinterpret(gl.float8e4nv, [C.STAGES * 2, 128, 128], C.TILE)
    xbuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES, C.N, 128], C.TILE)
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sbuf = gl.allocate_shared_memory(gl.float32, [C.STAGES if C.BLOCK else 1, C.N], SCALES)
    full_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(i), count=2)
        mbarrier.init(empty_bars.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_up_consumer, (wtile, xbuf, sbuf, full_bars, empty_bars, ws_ptr, act_ptr, expert_ptr, start_ptr, rows_ptr,
                            num_tiles_ptr, a_ptr, as_ptr, num_rows, stride_a, ws_rows, ws_cols, C)),
            (_up_producer, (w_desc, x_ptr, xs_ptr, wbuf, xbuf, sbuf, full_bars, empty_bars, expert_ptr, start_ptr,
                            rows_ptr, num_tiles_ptr, pair_ptr, top_k, xs_cols, C)),
        ],
        [C.PWARPS],
        [C.PRODUCER_REGS],
    )  # fmt: skip


@gluon.jit
def _down_producer(w_desc, a_desc, wbuf, abuf, full_bars, empty_bars, expert_ptr, start_ptr, num_tiles_ptr,
                   C: gl.constexpr):  # fmt: skip
    """One warp that keeps STAGES stages in flight, across items."""
    BYTES: gl.constexpr = C.BK * (256 + C.N)
    pdl_wait(C.PDL)
    num_items = gl.load(num_tiles_ptr) * C.RT
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // C.RT
        expert = gl.load(expert_ptr + tile)
        start = gl.load(start_ptr + tile)
        for k in range(0, C.KB):
            mbarrier.wait(empty_bars.index(stage), phase)
            full = full_bars.index(stage)
            mbarrier.expect(full, BYTES)
            tma_load(w_desc, [expert, (item - tile * C.RT) * 256, k * C.BK], full, wbuf.index(stage))
            tma_load(a_desc, [start, k * C.BK], full, abuf.index(stage))
            stage, phase = _advance(stage, phase, C)


@gluon.jit
def _store_y(acc, y_ptr, pair, live, column, C: gl.constexpr):
    """bf16 of [128, N] to y[pair of a row, column + i]."""
    OUT: gl.constexpr = C.OUT
    h = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, OUT)), 1) + column
    y = gl.convert_layout(acc.to(gl.bfloat16), OUT)
    at = y_ptr + gl.expand_dims(pair.to(gl.int64) * C.H, 0) + h
    gl.store(at, y, mask=gl.expand_dims(live, 0) & (h < C.H))


@gluon.jit
def _down_consumer(wtile, abuf, full_bars, empty_bars, ws_ptr, as_ptr, expert_ptr, start_ptr, rows_ptr,
                   num_tiles_ptr, pair_ptr, y_ptr, num_rows, ws_rows, ws_cols, C: gl.constexpr):  # fmt: skip
    """The warps that compute. One scale a tensor stays in the tensor core's accumulators over all of I: their error
    reaches y only, as 1.2e-3 at I = 1536, and flips nothing."""
    MMA: gl.constexpr = C.MMA
    OUT: gl.constexpr = C.OUT
    zero = gl.full([128, C.N], 0.0, gl.float32, MMA)
    n = gl.arange(0, C.N, gl.SliceLayout(0, MMA))
    on = gl.arange(0, C.N, gl.SliceLayout(0, OUT))
    stage = 0
    phase = 0
    before = 0  # the stage whose products may still be under way
    pdl_wait(C.PDL)
    pdl_launch(C.PDL)
    num_items = gl.load(num_tiles_ptr) * C.RT
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // C.RT
        column = (item - tile * C.RT) * 256
        expert = gl.load(expert_ptr + tile)
        start = gl.load(start_ptr + tile)
        rows = gl.load(rows_ptr + tile)
        pair = gl.load(pair_ptr + start + on, mask=on < rows, other=0)
        acc0 = zero
        acc1 = zero
        if C.BLOCK:
            scale_at = ws_ptr + expert.to(gl.int64) * (ws_rows * ws_cols) + column // 128 * ws_cols
            row_at = as_ptr + start + n
            second = gl.where(column + 128 < C.H, ws_cols, 0)  # past H, weights are zeros
        else:
            scale = gl.load(ws_ptr + expert)
        for k in range(0, C.KB):
            if C.BLOCK:
                group = k * C.BK // 128
                token = gl.load(row_at + group * num_rows, mask=n < rows, other=0.0)
                scale0 = gl.load(scale_at + group)
                scale1 = gl.load(scale_at + second + group)
            mbarrier.wait(full_bars.index(stage), phase)
            a = abuf.index(stage).permute([1, 0])
            if C.BLOCK:
                d = warpgroup_mma_wait(
                    0, deps=[warpgroup_mma(wtile.index(stage * 2), a, zero, use_acc=False, is_async=True)]
                )
                acc0 += d * gl.expand_dims(token * scale0, 0)
                d = warpgroup_mma_wait(
                    0, deps=[warpgroup_mma(wtile.index(stage * 2 + 1), a, zero, use_acc=False, is_async=True)]
                )
                barrier()
                mbarrier.arrive(empty_bars.index(stage), count=1)
                acc1 += d * gl.expand_dims(token * scale1, 0)
            else:
                acc0 = warpgroup_mma(wtile.index(stage * 2), a, acc0, is_async=True)
                acc1 = warpgroup_mma(wtile.index(stage * 2 + 1), a, acc1, is_async=True)
                acc0, acc1 = warpgroup_mma_wait(2, deps=(acc0, acc1))
                barrier()
                mbarrier.arrive(empty_bars.index(before), count=1, pred=k > 0)
                before = stage
            stage, phase = _advance(stage, phase, C)
        if not C.BLOCK:
            acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
            barrier()
            mbarrier.arrive(empty_bars.index(before), count=1)
            acc0 = acc0 * scale
            acc1 = acc1 * scale
        _store_y(acc0, y_ptr, pair, on < rows, column, C)
        _store_y(acc1, y_ptr, pair, on < rows, column + 128, C)


@gluon.jit(do_not_specialize=["num_rows", "ws_rows", "ws_cols"], do_not_specialize_on_alignment=["ws_ptr"])
def _moe_down_wide_kernel(
    w_desc, a_desc, ws_ptr, as_ptr, expert_ptr, start_ptr, rows_ptr, num_tiles_ptr, pair_ptr, y_ptr,
    num_rows, ws_rows, ws_cols, C: gl.constexpr,
):  # fmt: skip
    """`hopper_down._moe_down_sm90_kernel` by items of 256 output columns."""
    STAGES: gl.constexpr = C.STAGES
    wbuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES, 1, 256, C.BK], C.W_BOX)
    wtile = wbuf._reinterpret(gl.float8e4nv, [C.STAGES * 2, 128, C.BK], C.TILE)
    abuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES, C.N, C.BK], C.TILE)
    full_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(i), count=1)
        mbarrier.init(empty_bars.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_down_consumer, (wtile, abuf, full_bars, empty_bars, ws_ptr, as_ptr, expert_ptr, start_ptr, rows_ptr,
                              num_tiles_ptr, pair_ptr, y_ptr, num_rows, ws_rows, ws_cols, C)),
            (_down_producer, (w_desc, a_desc, wbuf, abuf, full_bars, empty_bars, expert_ptr, start_ptr,
                              num_tiles_ptr, C)),
        ],
        [1],
        [C.PRODUCER_REGS],
    )  # fmt: skip
