"""Both products of the fused MoE for many rows with tokens on the M side of `wgmma`, SM90, Gluon.

A thread of the result then holds two tokens, so block scales are two numbers a thread and 128 columns instead of a
quarter of the tile's tokens, and a maximum over 128 activations stays within four threads.

    grid (programs): items in turn, (tile of 128 tokens, 128 columns of the activations or 256 of the output)
    producer warps   as in `hopper` and `hopper_down`; the down product's starts on its weights before the gate-up
                     kernel has ended
    two warpgroups   64 tokens each, nothing shared but the stages: while one adds a fresh accumulator to its sums, the
                     tensor core works for the other. 64 x 256 sums and 64 x 128 fresh are 192 registers a thread.
                     The second one passes its stages on where a tile has 64 rows or fewer.

256 weight rows share the token rows of a stage. What limits 128 x 128 tiles at FP8 is the way from the L2 to the SMs:
32 KiB for 512 cycles of products is 64 bytes a cycle and SM, twice of what arrives (some 28). This takes three quarters
of it, and block scales find all 128 columns of a group of the activations in one pass over H.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from hpc.common.gluon import barrier, fence_async_shared, mbarrier, pdl_launch, pdl_wait, tma_load
from hpc.moe.hopper_math import gated, inverse
from hpc.moe.hopper_order import all_of
from hpc.moe.hopper_ring import advance, hand_over, hand_over_rest


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
        expert, block, start, rows = all_of(expert_ptr, start_ptr, rows_ptr, item, C)
        column = block * 16
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
            late, done = hand_over(full_bars, late, done, C)
            stage, phase = advance(stage, phase, C)
    hand_over_rest(full_bars, late, done, C)


@gluon.jit
def sum_of(x, w, d):
    """x w^T in a fresh accumulator; d gives its registers."""
    return warpgroup_mma_wait(0, deps=[warpgroup_mma(x, w.permute([1, 0]), d, use_acc=False, is_async=True)])


@gluon.jit
def added(acc, d):
    """acc + d before anything that follows: left to itself LLVM adds up at the end of a stage, with every fresh
    accumulator alive until then. The wait has nothing to wait for."""
    return warpgroup_mma_wait(0, deps=[acc + d])


@gluon.jit
def pass_on(full_bars, empty_bars, stage, phase, C: gl.constexpr):
    """(stage, phase) after an item of which this warpgroup has no rows."""
    for _ in range(0, C.KB):
        mbarrier.wait(full_bars.index(stage), phase)
        barrier()
        mbarrier.arrive(empty_bars.index(stage), count=1)
        stage, phase = advance(stage, phase, C)
    return stage, phase


@gluon.jit
def _up_scales(ws_ptr, column, kb, ws_cols, C: gl.constexpr):
    """Scales of the gate rows and of either half's up rows; gate columns begin on a multiple of 128."""
    gate = gl.load(ws_ptr + column // 128 * ws_cols + kb)
    up0 = gl.load(ws_ptr + (C.I + column) // 128 * ws_cols + kb)
    up1 = up0
    if C.I % 128 != 0:  # past I, weights are zeros
        up1 = gl.load(ws_ptr + (C.I + gl.minimum(column + 64, C.I - 1)) // 128 * ws_cols + kb)
    return gate, up0, up1


@gluon.jit
def _up_sums(wtile, xtile, stile, full_bars, empty_bars, stage, phase, ws_ptr, column, ws_cols,
             GROUP: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(sums [64, 128] of either half of the columns, stage, phase) over all of H."""
    MMA: gl.constexpr = C.PAIR_MMA
    SPANS: gl.constexpr = C.SPANS
    WIDTH: gl.constexpr = 128 // C.SPANS
    is_up = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, MMA)), 0) // 8 % 2 == 1
    zero = gl.full([64, 128], 0.0, gl.float32, MMA)
    acc0 = zero
    acc1 = zero
    d = zero
    gate = 1.0
    up0 = 1.0
    up1 = 1.0
    if C.BLOCK:
        gate, up0, up1 = _up_scales(ws_ptr, column, 0, ws_cols, C)
    for k in range(0, C.KB):
        if C.BLOCK:  # for the next turn: on their way while this one's products are
            next_gate, next_up0, next_up1 = _up_scales(
                ws_ptr, column, gl.minimum(k + 1, C.KB - 1), ws_cols, C
            )
        mbarrier.wait(full_bars.index(stage), phase)
        x = xtile.index(stage * 2 + GROUP)
        if C.BLOCK:
            tokens = gl.expand_dims(stile.index(stage * 2 + GROUP).load(gl.SliceLayout(1, MMA)), 1)
        for i in gl.static_range(2 * SPANS):
            w = wtile.index(stage * 2 + i // SPANS)
            if SPANS == 1:
                d = sum_of(x, w, d)
            else:
                x_part = x.slice(i % SPANS * WIDTH, WIDTH, dim=1)
                w_part = w.slice(i % SPANS * WIDTH, WIDTH, dim=1)
                d = sum_of(x_part, w_part, d)
            if i == 2 * SPANS - 1:
                barrier()
                mbarrier.arrive(empty_bars.index(stage), count=1)
            scaled = d
            if C.BLOCK:
                scaled = d * (tokens * gl.where(is_up, up0 if i < SPANS else up1, gate))
            if i < SPANS:
                acc0 = added(acc0, scaled)
            else:
                acc1 = added(acc1, scaled)
        if C.BLOCK:
            gate = next_gate
            up0 = next_up0
            up1 = next_up1
        stage, phase = advance(stage, phase, C)
    return acc0, acc1, stage, phase


@gluon.jit
def _activations(acc, scale, C: gl.constexpr):
    """fp32 [64, 64] from [64, 128] with gate and up alternating by eight columns."""
    pairs = acc.reshape([64, 8, 2, 8]).permute([0, 1, 3, 2])
    gate, up = gl.split(pairs)
    return gated(gate, up, scale, C).reshape([64, 64])


@gluon.jit
def _store_act_rows(value, a_ptr, start, first, rows, column, stride_a, C: gl.constexpr):
    """e4m3 values [64, 64] to a[start + first + n, column + i]."""
    OUT: gl.constexpr = C.PAIR_OUT
    q = gl.convert_layout(value.to(gl.float8e4nv), OUT)
    n = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, OUT)), 1) + first
    i = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, OUT)), 0) + column
    gl.store(a_ptr + (start + n).to(gl.int64) * stride_a + i, q, mask=(n < rows) & (i < C.I))


@gluon.jit
def _up_consumer(GROUP: gl.constexpr, wtile, xtile, stile, full_bars, empty_bars, ws_ptr, act_ptr,
                 expert_ptr, start_ptr, rows_ptr, num_tiles_ptr, a_ptr, as_ptr, num_rows, stride_a, ws_rows, ws_cols,
                 C: gl.constexpr):  # fmt: skip
    """The warpgroup of tokens 64 GROUP to 64 GROUP + 63 of a tile."""
    FIRST: gl.constexpr = 64 * GROUP
    pdl_wait(C.PDL)
    pdl_launch(C.PDL)  # after the wait: what the next kernel reads early, the index, is then complete
    num_items = gl.load(num_tiles_ptr) * C.RT
    act = 1.0
    if not C.BLOCK:
        act = gl.load(act_ptr)
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        expert, block, start, rows = all_of(expert_ptr, start_ptr, rows_ptr, item, C)
        column = block * 128
        if rows > FIRST:
            scale = 1.0
            scales_at = ws_ptr
            if C.BLOCK:
                scales_at = ws_ptr + expert.to(gl.int64) * (ws_rows * ws_cols)
            else:
                scale = gl.load(ws_ptr + expert)
            acc0, acc1, stage, phase = _up_sums(
                wtile, xtile, stile, full_bars, empty_bars, stage, phase, scales_at,
                column, ws_cols, GROUP, C,
            )  # fmt: skip
            h0 = _activations(acc0, scale, C)
            h1 = _activations(acc1, scale, C)
            if C.BLOCK:
                s = gl.maximum(gl.max(gl.abs(h0), 1), gl.max(gl.abs(h1), 1)) / 448.0
                factor = gl.expand_dims(inverse(s + 1e-8), 1)
                h0 = h0 * factor
                h1 = h1 * factor
                n = gl.arange(0, 64, s.type.layout) + FIRST
                gl.store(as_ptr + column // 128 * num_rows + start + n, s, mask=n < rows)
            else:
                h0 = h0 * act
                h1 = h1 * act
            _store_act_rows(h0, a_ptr, start, FIRST, rows, column, stride_a, C)
            _store_act_rows(h1, a_ptr, start, FIRST, rows, column + 64, stride_a, C)
        else:
            stage, phase = pass_on(full_bars, empty_bars, stage, phase, C)


@gluon.jit(
    do_not_specialize=["num_rows", "top_k", "xs_cols", "ws_rows", "ws_cols"],
    do_not_specialize_on_alignment=["xs_ptr", "ws_ptr", "act_ptr"],
)  # fmt: skip
def _moe_gate_up_pair_kernel(
    w_desc, x_ptr, xs_ptr, ws_ptr, act_ptr, expert_ptr, start_ptr, rows_ptr, num_tiles_ptr, pair_ptr, counter_ptr,
    part_ptr, a_ptr, as_ptr, num_rows, top_k, stride_a, xs_cols, ws_rows, ws_cols, C: gl.constexpr,
):  # fmt: skip
    """`hopper._moe_gate_up_sm90_kernel` by items of 128 tokens and 128 columns; counter_ptr and part_ptr unused."""
    STAGES: gl.constexpr = C.STAGES
    wbuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES, 1, 16, 2, 8, 128], C.W_BOX)
    wtile = wbuf._reinterpret(gl.float8e4nv, [C.STAGES * 2, 128, 128], C.TILE)
    xbuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES, 128, 128], C.TILE)
    xtile = xbuf._reinterpret(gl.float8e4nv, [C.STAGES * 2, 64, 128], C.TILE)
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sbuf = gl.allocate_shared_memory(gl.float32, [C.STAGES if C.BLOCK else 1, 128], SCALES)
    stile = sbuf._reinterpret(gl.float32, [C.STAGES * 2 if C.BLOCK else 2, 64], SCALES)
    full_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(i), count=2)
        mbarrier.init(empty_bars.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_up_consumer, (0, wtile, xtile, stile, full_bars, empty_bars, ws_ptr, act_ptr, expert_ptr,
                            start_ptr, rows_ptr, num_tiles_ptr, a_ptr, as_ptr, num_rows, stride_a, ws_rows, ws_cols,
                            C)),
            (_up_consumer, (1, wtile, xtile, stile, full_bars, empty_bars, ws_ptr, act_ptr, expert_ptr,
                            start_ptr, rows_ptr, num_tiles_ptr, a_ptr, as_ptr, num_rows, stride_a, ws_rows, ws_cols,
                            C)),
            (_up_producer, (w_desc, x_ptr, xs_ptr, wbuf, xbuf, sbuf, full_bars, empty_bars, expert_ptr, start_ptr,
                            rows_ptr, num_tiles_ptr, pair_ptr, top_k, xs_cols, C)),
        ],
        [4, C.PWARPS],
        [C.PAIR_REGS, C.PRODUCER_REGS],
    )  # fmt: skip
