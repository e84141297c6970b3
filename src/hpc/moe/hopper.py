"""Gate and up products of the fused MoE for SM90 in Gluon, with SiLU and requantisation in the epilogue.

Weights stand on the M side of `wgmma` and tokens on the N side: a tile is 128 weight rows, 64 of gate and the same 64
of up, times N tokens. w13 is read through a rank-5 view [expert, I / 8, gate or up, 8, H] in boxes [1, 8, 2, 8, 128],
so eight rows of gate alternate with the same eight of up in shared memory, and a thread finds gate and up of one
column in its own accumulator, 8 rows apart. Columns past I arrive as zeros.

    grid (programs): each walks items = (tile of rows, 64 or, with block scales, 2 x 64 columns)
    producer warps   weights by TMA, token rows by cp.async through the index: nothing is gathered beforehand
    consumer warps   d = w x^T per stage from a fresh accumulator, acc += d * scales in fp32 (the FP8 accumulator of
                     the tensor core keeps 14 bits), then a = quantise(silu(gate) * up)

SPLIT (few rows): every program takes an equal run of stages, wherever items begin or end. Where enough experts have
several tiles (`order`), programs first take whole items in turn as often as all of them get one, so that a block of
weights is read at one time for all tiles, and equal runs of what is left. A program that holds a part of an item stores
fp32 sums; the one that arrives last adds all parts in the order of the programs and finishes the item. Counters are
zeroed by the index build.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from hpc.common.gluon import (
    TensorDescriptor,
    barrier,
    fence_async_shared,
    mbarrier,
    pdl_launch,
    pdl_wait,
    tma_load,
)
from hpc.moe.hopper_config import UpConfig
from hpc.moe.hopper_math import gated, inverse
from hpc.moe.hopper_order import all_of
from hpc.moe.hopper_ring import advance, hand_over, hand_over_rest

__all__ = ["TensorDescriptor", "UpConfig"]


@gluon.jit
def _work(num_tiles_ptr, C: gl.constexpr):
    """SPLIT: (base, first stage, past-the-last stage, stages a program); stages are numbered over all items.

    From `base` on, programs take equal runs of them, this one from its first stage; before it, items in turn.
    """
    items = gl.load(num_tiles_ptr) * C.RT
    whole = items // gl.num_programs(0) * gl.num_programs(0)
    base = gl.where(gl.load(num_tiles_ptr + 1) > 0, whole, 0) * C.UNITS
    units = items * C.UNITS
    per = (units - base + gl.num_programs(0) - 1) // gl.num_programs(0)
    first = base + gl.program_id(0) * per
    return base, first, gl.minimum(first + per, units), per


@gluon.jit
def _first_place(base, first, C: gl.constexpr):
    """Where this program begins: a stage, or an item without SPLIT."""
    if C.SPLIT:
        return gl.where(base > 0, gl.program_id(0) * C.UNITS, first)
    else:
        return gl.program_id(0)


@gluon.jit
def _next_place(u, begin, end, base, first, C: gl.constexpr):
    """Where it goes on after the stages from `begin` to `end` of the item at u."""
    if C.SPLIT:
        turn = u + gl.num_programs(0) * C.UNITS
        return gl.where(u < base, gl.where(turn < base, turn, first), u + end - begin)
    else:
        return u + gl.num_programs(0)


@gluon.jit
def _next_item(u, last, num_items, C: gl.constexpr):
    """(item, first and past-the-last stage within it, whether there is one) at position u.

    SPLIT: u counts stages. Else u counts items.
    """
    if C.SPLIT:
        item = u // C.UNITS
        begin = u - item * C.UNITS
        end = gl.minimum(C.UNITS, begin + last - u)
        more = u < last
    else:
        item = u
        begin = 0
        end = C.UNITS
        more = u < num_items
    return item, begin, end, more


@gluon.jit
def _producer(w_desc, x_ptr, xs_ptr, wbuf, xbuf, sbuf, full_bars, empty_bars, expert_ptr, start_ptr, rows_ptr,
              num_tiles_ptr, pair_ptr, top_k, xs_cols, C: gl.constexpr):  # fmt: skip
    """Keep STAGES stages in flight, across items. Gathered rows are handed over LAG stages after their copy began."""
    KS: gl.constexpr = C.KS
    n = gl.arange(0, C.N, gl.SliceLayout(1, C.GATHER))
    kk = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, C.GATHER)), 0)
    sn = gl.arange(0, C.N, gl.BlockedLayout([1], [32], [C.PWARPS], [0]))
    pdl_wait(C.PDL)
    base, first, last, _ = _work(num_tiles_ptr, C)
    num_items = gl.load(num_tiles_ptr) * C.RT
    u = _first_place(base, first, C)
    stage = 0
    phase = 1
    done = 0
    late = 0
    item, begin, end, more = _next_item(u, last, num_items, C)
    while more:
        expert, block, start, rows = all_of(expert_ptr, start_ptr, rows_ptr, item, C)
        column = block * (8 * C.HALVES)
        token = gl.load(pair_ptr + start + n, mask=n < rows, other=0) // top_k
        row_at = x_ptr + gl.expand_dims(token.to(gl.int64) * C.H, 1) + kk
        row_ok = gl.expand_dims(n < rows, 1) & (kk >= 0)
        if C.BLOCK:
            stoken = gl.load(pair_ptr + start + sn, mask=sn < rows, other=0) // top_k
            scale_at = xs_ptr + stoken.to(gl.int64) * xs_cols
        for unit in range(begin, end):
            half = unit // C.KU
            k0 = (unit - half * C.KU) * (KS * 128)
            mbarrier.wait(empty_bars.index(stage), phase)
            full = full_bars.index(stage)
            mbarrier.expect(full, KS * 128 * 128)
            for j in gl.static_range(KS):
                tma_load(
                    w_desc, [expert, column + half * 8, 0, 0, k0 + j * 128], full, wbuf.index(stage * KS + j)
                )
            for j in gl.static_range(KS):
                inside = row_ok & (kk < C.H - (k0 + j * 128))
                async_copy.async_copy_global_to_shared(
                    xbuf.index(stage * KS + j), row_at + (k0 + j * 128), mask=inside
                )
                if C.BLOCK:
                    ok = (sn < rows) & (k0 + j * 128 < C.H)
                    async_copy.async_copy_global_to_shared(
                        sbuf.index(stage * KS + j), scale_at + (k0 // 128 + j), mask=ok
                    )
            late, done = hand_over(full_bars, late, done, C)
            stage, phase = advance(stage, phase, C)
        u = _next_place(u, begin, end, base, first, C)
        item, begin, end, more = _next_item(u, last, num_items, C)
    hand_over_rest(full_bars, late, done, C)


@gluon.jit
def _row_scales(ws_ptr, column, kb, ws_cols, C: gl.constexpr):
    """Scales of the gate rows and of the up rows of a tile that begins at `column`, for block kb along H."""
    inside = kb < C.KB  # past it lies padding of any content
    gate = gl.load(ws_ptr + column // 128 * ws_cols + kb, mask=inside, other=0.0)
    up = gl.load(ws_ptr + (C.I + column) // 128 * ws_cols + kb, mask=inside, other=0.0)
    return gate, up


@gluon.jit
def _piece(w, x, j, zero, C: gl.constexpr):
    """Product over the j-th FRESH of a box's 128 columns, in an accumulator of its own; asynchronous."""
    if C.SPANS > 1:
        w = w.slice(j * C.FRESH, C.FRESH, dim=1)
        x = x.slice(j * C.FRESH, C.FRESH, dim=1)
    return warpgroup_mma(w, x.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _also(pieces, piece):
    return pieces + (piece,)


@gluon.jit
def _wait_all(pieces, COUNT: gl.constexpr):
    """The products themselves, as a tuple."""
    if COUNT == 1:
        return (warpgroup_mma_wait(0, deps=pieces),)
    else:
        return warpgroup_mma_wait(0, deps=pieces)


@gluon.jit
def _token_scales(sbuf, stage, C: gl.constexpr):
    """Scales of the tile's tokens for each of the stage's blocks."""
    KS: gl.constexpr = C.KS
    scales = ()
    for j in gl.static_range(KS):
        scales = scales + (sbuf.index(stage * KS + j).load(gl.SliceLayout(0, C.MMA)),)
    return scales


@gluon.jit
def _products(wtile, xtile, sbuf, full_bars, empty_bars, stage, phase, ws_ptr, column, k0, k1, ws_cols,
              C: gl.constexpr):  # fmt: skip
    """(acc [128, N], stage, phase) over stages k0 to k1 of one tile."""
    KS: gl.constexpr = C.KS
    SPANS: gl.constexpr = C.SPANS
    GROUP: gl.constexpr = C.GROUP
    PIECES: gl.constexpr = KS * SPANS
    MMA: gl.constexpr = C.MMA
    zero = gl.full([128, C.N], 0.0, gl.float32, MMA)
    acc = zero
    is_up = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, MMA)), 1) // 8 % 2 == 1
    for k in range(k0, k1):
        if C.BLOCK:
            weight_scales = ()
            for j in gl.static_range(KS):
                weight_scales = weight_scales + (_row_scales(ws_ptr, column, k * KS + j, ws_cols, C),)
        mbarrier.wait(full_bars.index(stage), phase)
        if C.BLOCK or C.FRESH < KS * 128:
            for first in gl.static_range(0, PIECES, GROUP):
                pieces = ()
                for i in gl.static_range(first, first + GROUP):
                    at = stage * KS + i // SPANS
                    pieces = _also(pieces, _piece(wtile.index(at), xtile.index(at), i % SPANS, zero, C))
                done = _wait_all(pieces, GROUP)
                if C.BLOCK:
                    token_scales = _token_scales(sbuf, stage, C)
                if first + GROUP == PIECES:
                    barrier()
                    mbarrier.arrive(empty_bars.index(stage), count=1)
                for i in gl.static_range(GROUP):
                    if C.BLOCK:
                        gate, up = weight_scales[(first + i) // SPANS]
                        tokens = gl.expand_dims(token_scales[(first + i) // SPANS], 0)
                        acc += done[i] * (tokens * gl.where(is_up, up, gate))
                    else:
                        acc += done[i]
        else:
            d = _piece(wtile.index(stage * KS), xtile.index(stage * KS), 0, zero, C)
            for j in gl.static_range(1, KS):
                at = stage * KS + j
                d = warpgroup_mma(wtile.index(at), xtile.index(at).permute([1, 0]), d, is_async=True)
            d = warpgroup_mma_wait(0, deps=[d])
            barrier()
            mbarrier.arrive(empty_bars.index(stage), count=1)
            acc += d
        stage, phase = advance(stage, phase, C)
    return acc, stage, phase


@gluon.jit
def _activation(acc, scale, C: gl.constexpr):
    """act(gate) * up as fp32 [64, N] from [128, N] with gate and up alternating by eight rows."""
    pairs = acc.reshape([8, 2, 8, C.N]).permute([0, 2, 3, 1])
    gate, up = gl.split(pairs)
    return gated(gate, up, scale, C).reshape([64, C.N])


@gluon.jit
def _store_act(value, a_ptr, start, rows, column, stride_a, C: gl.constexpr):
    """e4m3 values [64, N] to a[start + n, column + i]."""
    OUT: gl.constexpr = C.OUT
    q = gl.convert_layout(value.to(gl.float8e4nv), OUT)
    i = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, OUT)), 1) + column
    n = gl.expand_dims(gl.arange(0, C.N, gl.SliceLayout(0, OUT)), 0)
    at = a_ptr + (start + n).to(gl.int64) * stride_a + i
    gl.store(at, q, mask=(n < rows) & (i < C.I))


@gluon.jit
def _finish(h0, h1, act, a_ptr, as_ptr, start, rows, column, stride_a, num_rows, C: gl.constexpr):
    """Quantise an item's activations: h0 alone by the given factor, or h0 and h1 by their common maximum a row."""
    if C.BLOCK:
        amax = gl.maximum(gl.max(gl.abs(h0), 0), gl.max(gl.abs(h1), 0))
        s = amax / 448.0
        factor = gl.expand_dims(inverse(s + 1e-8), 0)
        _store_act(h0 * factor, a_ptr, start, rows, column, stride_a, C)
        _store_act(h1 * factor, a_ptr, start, rows, column + 64, stride_a, C)
        n = gl.arange(0, C.N, s.type.layout)
        gl.store(as_ptr + column // 128 * num_rows + start + n, s, mask=n < rows)
    else:
        _store_act(h0 * act, a_ptr, start, rows, column, stride_a, C)


@gluon.jit
def _slot(part_ptr, program, first_of_program, item_begin, half, C: gl.constexpr):
    """[128, N] sums of a program for one half of the item that begins at stage `item_begin`.

    A program holds parts of at most two items: the one in whose middle it begins, and the one that it leaves.
    """
    which = gl.where(first_of_program > item_begin, 0, 1)
    index = (program * 2 + which) * C.HALVES + half
    return part_ptr + index.to(gl.int64) * (128 * C.N)


@gluon.jit
def _offsets(C: gl.constexpr):
    MMA: gl.constexpr = C.MMA
    r = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, MMA)), 1)
    n = gl.expand_dims(gl.arange(0, C.N, gl.SliceLayout(0, MMA)), 0)
    return r * C.N + n


@gluon.jit
def _gather_parts(part_ptr, item_begin, half, per, C: gl.constexpr):
    """Sum of one half of an item over the programs that hold a part of it, in their order."""
    MMA: gl.constexpr = C.MMA
    UNROLL: gl.constexpr = 4 if C.N <= 16 else 2 if C.N <= 32 else 1
    low = (item_begin + half * C.KU) // per
    high = (item_begin + half * C.KU + C.KU - 1) // per
    acc = gl.full([128, C.N], 0.0, gl.float32, MMA)
    offsets = _offsets(C)
    for first in range(low, high + 1, UNROLL):
        loaded = ()
        for j in gl.static_range(UNROLL):
            program = first + j
            at = _slot(part_ptr, program, program * per, item_begin, half, C) + offsets
            loaded = loaded + (
                gl.load(at, mask=(offsets >= 0) & (program <= high), other=0.0, cache_modifier=".cg"),
            )
        for j in gl.static_range(UNROLL):
            acc += loaded[j]
    return acc


@gluon.jit
def _consumer(wtile, xtile, sbuf, full_bars, empty_bars, ws_ptr, act_ptr, expert_ptr, start_ptr, rows_ptr,
              num_tiles_ptr, counter_ptr, part_ptr, a_ptr, as_ptr, num_rows, stride_a, ws_rows, ws_cols,
              C: gl.constexpr):  # fmt: skip
    """The warps that compute; see the module docstring."""
    pdl_wait(C.PDL)
    pdl_launch(C.PDL)  # after the wait: what the next kernel reads early, the index, is then complete
    base, first, last, per = _work(num_tiles_ptr, C)
    num_items = gl.load(num_tiles_ptr) * C.RT
    u = _first_place(base, first, C)
    act = 1.0
    if not C.BLOCK:
        act = gl.load(act_ptr)
    stage = 0
    phase = 0
    item, begin, end, more = _next_item(u, last, num_items, C)
    while more:
        expert, block, start, rows = all_of(expert_ptr, start_ptr, rows_ptr, item, C)
        column = block * (64 * C.HALVES)
        scale = 1.0
        scales_at = ws_ptr
        if C.BLOCK:
            scales_at = ws_ptr + expert.to(gl.int64) * (ws_rows * ws_cols)
        else:
            scale = gl.load(ws_ptr + expert)
        whole = (begin == 0) & (end == C.UNITS)
        acc, stage, phase = _products(
            wtile, xtile, sbuf, full_bars, empty_bars, stage, phase, scales_at, column, begin, gl.minimum(end, C.KU),
            ws_cols, C,
        )  # fmt: skip
        if C.BLOCK:
            # the second half's columns may lie past I: then its scales are those of the last block
            column1 = gl.minimum(column + 64, C.I - 64)
        if C.SPLIT:
            if not whole:
                item_begin = item * C.UNITS - base
                offsets = _offsets(C)
                if begin < C.KU:
                    at = _slot(part_ptr, gl.program_id(0), first - base, item_begin, 0, C)
                    gl.store(at + offsets, acc)
        h0 = _activation(acc, scale, C)
        h1 = h0
        if C.BLOCK:
            acc, stage, phase = _products(
                wtile, xtile, sbuf, full_bars, empty_bars, stage, phase, scales_at, column1,
                gl.maximum(begin, C.KU) - C.KU, end - C.KU, ws_cols, C,
            )  # fmt: skip
            if C.SPLIT:
                if not whole:
                    if end > C.KU:
                        at = _slot(part_ptr, gl.program_id(0), first - base, item * C.UNITS - base, 1, C)
                        gl.store(at + _offsets(C), acc)
            h1 = _activation(acc, scale, C)
        finish = whole
        if C.SPLIT:
            if not whole:
                item_begin = item * C.UNITS - base
                holders = (item_begin + C.UNITS - 1) // per - item_begin // per + 1
                barrier()
                arrived = gl.atomic_add(counter_ptr + item, 1, sem="acq_rel", scope="gpu")
                barrier()
                finish = arrived == holders - 1
                if finish:
                    h0 = _activation(_gather_parts(part_ptr, item_begin, 0, per, C), scale, C)
                    if C.BLOCK:
                        h1 = _activation(_gather_parts(part_ptr, item_begin, 1, per, C), scale, C)
                    else:
                        h1 = h0
        if finish:
            _finish(h0, h1, act, a_ptr, as_ptr, start, rows, column, stride_a, num_rows, C)
        u = _next_place(u, begin, end, base, first, C)
        item, begin, end, more = _next_item(u, last, num_items, C)


@gluon.jit(
    do_not_specialize=["num_rows", "top_k", "xs_cols", "ws_rows", "ws_cols"],
    do_not_specialize_on_alignment=["xs_ptr", "ws_ptr", "act_ptr"],
)  # fmt: skip
def _moe_gate_up_sm90_kernel(
    w_desc, x_ptr, xs_ptr, ws_ptr, act_ptr, expert_ptr, start_ptr, rows_ptr, num_tiles_ptr, pair_ptr, counter_ptr,
    part_ptr, a_ptr, as_ptr, num_rows, top_k, stride_a, xs_cols, ws_rows, ws_cols, C: gl.constexpr,
):  # fmt: skip
    """Items of this program, in order; see the module docstring for formulas and grid.

    x_ptr: e4m3 [tokens, H]; a_ptr: e4m3 [rows, stride_a]; as_ptr: fp32 [ceil(I / 128), num_rows] for block scales.
    part_ptr: fp32 [2 * programs * HALVES, 128, N]; counter_ptr: int32, one an item, zero on entry.
    """
    STAGES: gl.constexpr = C.STAGES
    wbuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES * C.KS, 1, 8, 2, 8, 128], C.W_BOX)
    wtile = wbuf._reinterpret(gl.float8e4nv, [C.STAGES * C.KS, 128, 128], C.TILE)
    xbuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES * C.KS, C.N, 128], C.TILE)
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sbuf = gl.allocate_shared_memory(gl.float32, [C.STAGES * C.KS if C.BLOCK else 1, C.N], SCALES)
    full_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(i), count=2)
        mbarrier.init(empty_bars.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (wtile, xbuf, sbuf, full_bars, empty_bars, ws_ptr, act_ptr, expert_ptr, start_ptr, rows_ptr,
                         num_tiles_ptr, counter_ptr, part_ptr, a_ptr, as_ptr, num_rows, stride_a, ws_rows, ws_cols,
                         C)),
            (_producer, (w_desc, x_ptr, xs_ptr, wbuf, xbuf, sbuf, full_bars, empty_bars, expert_ptr, start_ptr,
                         rows_ptr, num_tiles_ptr, pair_ptr, top_k, xs_cols, C)),
        ],
        [C.PWARPS],
        [C.PRODUCER_REGS],
    )  # fmt: skip
