"""Both products of the fused MoE for many rows with tokens on the M side of `wgmma`, SM90, Gluon.

A thread of the result then holds two tokens, so block scales are two numbers a thread and 128 columns instead of a
quarter of the tile's tokens, and a maximum over 128 activations stays within four threads.

    grid (programs): items in turn, (tile of 128 tokens, 128 columns of the activations or 256 of the output)
    producer warps   as in `hopper` and `hopper_down`; the down product's starts on its weights before the gate-up
                     kernel has ended
    two warpgroups   64 tokens each, nothing shared but the stages: while one adds a fresh accumulator to its sums, the
                     tensor core works for the other. 64 x 256 sums and 64 x 128 fresh are 192 registers a thread,
                     the fresh ones in one piece or in two that take turns.
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
from hpc.moe.hopper_order import in_list_order
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
        expert, tile, block = in_list_order(expert_ptr, item, C)
        start = gl.load(start_ptr + tile)
        rows = gl.load(rows_ptr + tile)
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
def _half_sums(wtile, xtile, stile, full_bars, empty_bars, stage, phase, ws_ptr, column, ws_cols,
               GROUP: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(sums [64, 128] of either half of the columns, stage, phase) over all of H, 128 columns in an accumulator.

    A product of 256 cycles covers what the other warpgroup does meanwhile."""
    MMA: gl.constexpr = C.PAIR_MMA
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
        d = sum_of(x, wtile.index(stage * 2), d)
        scaled = d
        if C.BLOCK:
            scaled = d * (tokens * gl.where(is_up, up0, gate))
        acc0 = added(acc0, scaled)
        d = sum_of(x, wtile.index(stage * 2 + 1), d)
        barrier()
        mbarrier.arrive(empty_bars.index(stage), count=1)
        scaled = d
        if C.BLOCK:
            scaled = d * (tokens * gl.where(is_up, up1, gate))
            gate = next_gate
            up0 = next_up0
            up1 = next_up1
        acc1 = added(acc1, scaled)
        stage, phase = advance(stage, phase, C)
    return (acc0, acc1), stage, phase


@gluon.jit
def _with(sums, I: gl.constexpr, value):
    """The four sums with the I-th replaced."""
    return (
        value if I == 0 else sums[0], value if I == 1 else sums[1], value if I == 2 else sums[2],
        value if I == 3 else sums[3],
    )  # fmt: skip


@gluon.jit
def _quarter_sums(wtile, xtile, stile, full_bars, empty_bars, stage, phase, ws_ptr, column, ws_cols,
                  GROUP: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(sums [64, 64] of each quarter of the columns, stage, phase) over all of H, 64 columns in an accumulator.

    Products of 128 cycles would not cover what lies between them. So they are half as wide, and two accumulators take
    turns: one is added up while the other's product runs. 793 us for 855 (gate-up, 32768 rows, I = 1536, E = 24).
    """
    MMA: gl.constexpr = C.QUARTER_MMA
    LAST: gl.constexpr = 8  # products of a stage, two spans of H times four quarters
    is_up = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, MMA)), 0) // 8 % 2 == 1
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    sums = (zero, zero, zero, zero)
    d = (zero, zero)
    gate = 1.0
    up0 = 1.0
    up1 = 1.0
    if C.BLOCK:
        gate, up0, up1 = _up_scales(ws_ptr, column, 0, ws_cols, C)
    for k in range(0, C.KB):
        if C.BLOCK:
            next_gate, next_up0, next_up1 = _up_scales(
                ws_ptr, column, gl.minimum(k + 1, C.KB - 1), ws_cols, C
            )
        mbarrier.wait(full_bars.index(stage), phase)
        x = xtile.index(stage * 2 + GROUP)
        if C.BLOCK:
            tokens = gl.expand_dims(stile.index(stage * 2 + GROUP).load(gl.SliceLayout(1, MMA)), 1)
        for i in gl.static_range(LAST + 1):
            begun = d[0]
            if i < LAST:
                w_part = wtile.index(stage * 4 + i % 4).slice(i // 4 * 64, 64, dim=1)
                x_part = x.slice(i // 4 * 64, 64, dim=1)
                begun = warpgroup_mma(x_part, w_part.permute([1, 0]), d[0], use_acc=False, is_async=True)
            ended = d[1]
            if i > 0:  # the product before; none is under way between stages, ptxas would serialize all
                ended = warpgroup_mma_wait(1 if i < LAST else 0, deps=[d[1]])
                if i == LAST:
                    barrier()
                    mbarrier.arrive(empty_bars.index(stage), count=1)
                scaled = ended
                if C.BLOCK:
                    scaled = ended * (tokens * gl.where(is_up, up0 if (i - 1) % 4 < 2 else up1, gate))
                total = warpgroup_mma_wait(
                    1 if i < LAST else 0, deps=[sums[(i - 1) % 4] + scaled]
                )  # as `added`
                sums = _with(sums, (i - 1) % 4, total)
            d = (ended, begun)
        if C.BLOCK:
            gate = next_gate
            up0 = next_up0
            up1 = next_up1
        stage, phase = advance(stage, phase, C)
    return sums, stage, phase


@gluon.jit
def _activations(acc, scale, C: gl.constexpr):
    """fp32 [64, n / 2] from [64, n] with gate and up alternating by eight columns."""
    COLUMNS: gl.constexpr = acc.shape[1]
    pairs = acc.reshape([64, COLUMNS // 16, 2, 8]).permute([0, 1, 3, 2])
    gate, up = gl.split(pairs)
    return gated(gate, up, scale, C).reshape([64, COLUMNS // 2])


@gluon.jit
def _store_act_rows(value, a_ptr, start, first, rows, column, stride_a, C: gl.constexpr):
    """e4m3 values [64, n] to a[start + first + i, column + j]."""
    OUT: gl.constexpr = C.PAIR_OUT
    q = gl.convert_layout(value.to(gl.float8e4nv), OUT)
    n = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, OUT)), 1) + first
    i = gl.expand_dims(gl.arange(0, value.shape[1], gl.SliceLayout(0, OUT)), 0) + column
    gl.store(a_ptr + (start + n).to(gl.int64) * stride_a + i, q, mask=(n < rows) & (i < C.I))


@gluon.jit
def _all_activations(sums, scale, C: gl.constexpr):
    """Those of every part of an item's columns."""
    first, second = _activations(sums[0], scale, C), _activations(sums[1], scale, C)
    if C.PARTS == 2:
        return first, second
    else:
        return first, second, _activations(sums[2], scale, C), _activations(sums[3], scale, C)


@gluon.jit
def _finish(values, act, a_ptr, as_ptr, start, first, rows, column, stride_a, num_rows, C: gl.constexpr):
    """Quantise an item's activations by the given factor or by the maximum of a row."""
    PARTS: gl.constexpr = C.PARTS
    if C.BLOCK:
        top = gl.max(gl.abs(values[0]), 1)
        for i in gl.static_range(1, PARTS):
            top = gl.maximum(top, gl.max(gl.abs(values[i]), 1))
        s = top / 448.0
        factor = gl.expand_dims(inverse(s + 1e-8), 1)
        n = gl.arange(0, 64, s.type.layout) + first
        gl.store(as_ptr + column // 128 * num_rows + start + n, s, mask=n < rows)
    else:
        factor = act
    for i in gl.static_range(PARTS):
        at = column + i * (128 // PARTS)
        _store_act_rows(values[i] * factor, a_ptr, start, first, rows, at, stride_a, C)


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
        expert, tile, block = in_list_order(expert_ptr, item, C)
        start = gl.load(start_ptr + tile)
        rows = gl.load(rows_ptr + tile)
        column = block * 128
        if rows > FIRST:
            scale = 1.0
            scales_at = ws_ptr
            if C.BLOCK:
                scales_at = ws_ptr + expert.to(gl.int64) * (ws_rows * ws_cols)
            else:
                scale = gl.load(ws_ptr + expert)
            if C.PARTS == 4:
                sums, stage, phase = _quarter_sums(
                    wtile, xtile, stile, full_bars, empty_bars, stage, phase, scales_at,
                    column, ws_cols, GROUP, C,
                )  # fmt: skip
            else:
                sums, stage, phase = _half_sums(
                    wtile, xtile, stile, full_bars, empty_bars, stage, phase, scales_at,
                    column, ws_cols, GROUP, C,
                )  # fmt: skip
            _finish(_all_activations(sums, scale, C), act, a_ptr, as_ptr, start, FIRST, rows, column, stride_a,
                    num_rows, C)  # fmt: skip
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
    wtile = wbuf._reinterpret(gl.float8e4nv, [C.STAGES * C.PARTS, 256 // C.PARTS, 128], C.TILE)
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
