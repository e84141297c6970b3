"""Down product of the fused MoE for SM90 in Gluon: y[pair] = bf16(a[row] w2^T * scale).

Weights stand on the M side of `wgmma`: a tile is 128 columns of the output times N rows; both operands arrive by TMA,
since the rows of an expert lie together. Rows past the end of a tile belong to the next expert; their columns of the
accumulator are computed and not stored.

    grid (programs): items (tile of rows, 128 output columns), in equal runs, or in turn if SPREAD or if enough experts
                     have several tiles: `order`
    producer warp    starts on the weights before the gate-up kernel has ended: the tile list is older than that
    consumer warps   acc += (w a^T per stage) * scales in fp32
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from hpc.common.gluon import barrier, fence_async_shared, mbarrier, pdl_launch, pdl_wait, tma_load
from hpc.moe.hopper_config import DownConfig
from hpc.moe.hopper_order import all_of, first_row, operands_of, weights_of
from hpc.moe.hopper_ring import advance

__all__ = ["DownConfig"]


@gluon.jit
def _range(num_tiles_ptr, C: gl.constexpr):
    """(first item, past-the-last item, step) of this program."""
    items = gl.load(num_tiles_ptr) * C.RT
    pid = gl.program_id(0)
    if C.SPREAD:
        return pid, items, gl.num_programs(0)
    else:
        in_turn = gl.load(num_tiles_ptr + 1) > 0
        first = gl.where(in_turn, pid, pid * items // gl.num_programs(0))
        last = gl.where(in_turn, items, (pid + 1) * items // gl.num_programs(0))
        return first, last, gl.where(in_turn, gl.num_programs(0), 1)


@gluon.jit
def fetch_weights(w_desc, wbuf, bar, stage, expert, h, k0, C: gl.constexpr):
    KS: gl.constexpr = C.KS
    for j in gl.static_range(KS):
        tma_load(w_desc, [expert, h, k0 + j * C.BK], bar, wbuf.index(stage * KS + j))


@gluon.jit
def fetch_rows(a_desc, abuf, bar, stage, start, k0, C: gl.constexpr):
    KS: gl.constexpr = C.KS
    for j in gl.static_range(KS):
        tma_load(a_desc, [start, k0 + j * C.BK], bar, abuf.index(stage * KS + j))


@gluon.jit
def _producer(w_desc, a_desc, wbuf, abuf, full_bars, empty_bars, expert_ptr, start_ptr, num_tiles_ptr,
              C: gl.constexpr):  # fmt: skip
    """One warp that keeps STAGES stages in flight, across tiles; the weights of the first ones before the wait."""
    STAGES: gl.constexpr = C.STAGES
    BYTES: gl.constexpr = C.KS * C.BK * (128 + C.N)
    first, last, step = _range(num_tiles_ptr, C)
    units = (last - first + step - 1) // step * C.KU
    for i in range(0, gl.minimum(STAGES, units)):
        expert, block = weights_of(expert_ptr, first + i // C.KU * step, C)
        mbarrier.expect(full_bars.index(i), BYTES)
        k0 = i % C.KU * (C.KS * C.BK)
        fetch_weights(w_desc, wbuf, full_bars.index(i), i, expert, block * 128, k0, C)
    pdl_wait(C.PDL)
    for i in range(0, gl.minimum(STAGES, units)):
        start = first_row(expert_ptr, start_ptr, first + i // C.KU * step, C)
        fetch_rows(a_desc, abuf, full_bars.index(i), i, start, i % C.KU * (C.KS * C.BK), C)
    stage = 0
    phase = 0
    for unit in range(STAGES, units):
        expert, block, start = operands_of(expert_ptr, start_ptr, first + unit // C.KU * step, C)
        k0 = unit % C.KU * (C.KS * C.BK)
        mbarrier.wait(empty_bars.index(stage), phase)
        full = full_bars.index(stage)
        mbarrier.expect(full, BYTES)
        fetch_weights(w_desc, wbuf, full, stage, expert, block * 128, k0, C)
        fetch_rows(a_desc, abuf, full, stage, start, k0, C)
        stage, phase = advance(stage, phase, C)


@gluon.jit
def _consumer(wbuf, abuf, full_bars, empty_bars, ws_ptr, as_ptr, expert_ptr, start_ptr, rows_ptr, num_tiles_ptr,
              pair_ptr, y_ptr, num_rows, ws_rows, ws_cols, C: gl.constexpr):  # fmt: skip
    """The warps that compute; see the module docstring."""
    KS: gl.constexpr = C.KS
    MMA: gl.constexpr = C.MMA
    OUT: gl.constexpr = C.OUT
    first, last, step = _range(num_tiles_ptr, C)
    zero = gl.full([128, C.N], 0.0, gl.float32, MMA)
    n = gl.arange(0, C.N, gl.SliceLayout(0, MMA))
    on = gl.arange(0, C.N, gl.SliceLayout(0, OUT))
    h = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, OUT)), 1)
    stage = 0
    phase = 0
    pdl_wait(C.PDL)
    pdl_launch(C.PDL)
    for item in range(first, last, step):
        expert, block, start, rows = all_of(expert_ptr, start_ptr, rows_ptr, item, C)
        column = block * 128
        pair = gl.load(pair_ptr + start + on, mask=on < rows, other=0)
        acc = zero
        if C.BLOCK:
            scale_at = ws_ptr + expert.to(gl.int64) * (ws_rows * ws_cols) + column // 128 * ws_cols
            row_at = as_ptr + start + n
        else:
            scale = gl.load(ws_ptr + expert)
        for k in range(0, C.KU):
            if C.BLOCK:
                scales = ()
                for j in gl.static_range(KS):
                    group = gl.minimum((k * KS + j) * C.BK // 128, (C.I - 1) // 128)
                    token = gl.load(row_at + group * num_rows, mask=n < rows, other=0.0)
                    scales = scales + (token * gl.load(scale_at + group),)
            mbarrier.wait(full_bars.index(stage), phase)
            if C.BLOCK:
                pieces = ()
                for j in gl.static_range(KS):
                    at = stage * KS + j
                    d = warpgroup_mma(
                        wbuf.index(at), abuf.index(at).permute([1, 0]), zero, use_acc=False, is_async=True
                    )
                    pieces = pieces + (d,)
                if KS == 1:
                    done = (warpgroup_mma_wait(0, deps=pieces),)
                else:
                    done = warpgroup_mma_wait(0, deps=pieces)
                barrier()
                mbarrier.arrive(empty_bars.index(stage), count=1)
                for j in gl.static_range(KS):
                    acc += done[j] * gl.expand_dims(scales[j], 0)
            else:
                d = warpgroup_mma(
                    wbuf.index(stage * KS),
                    abuf.index(stage * KS).permute([1, 0]),
                    zero,
                    use_acc=False,
                    is_async=True,
                )
                for j in gl.static_range(1, KS):
                    at = stage * KS + j
                    d = warpgroup_mma(wbuf.index(at), abuf.index(at).permute([1, 0]), d, is_async=True)
                d = warpgroup_mma_wait(0, deps=[d])
                barrier()
                mbarrier.arrive(empty_bars.index(stage), count=1)
                acc += d
            stage, phase = advance(stage, phase, C)
        if not C.BLOCK:
            acc = acc * scale
        y = gl.convert_layout(acc.to(gl.bfloat16), OUT)
        at = y_ptr + gl.expand_dims(pair.to(gl.int64) * C.H, 0) + (column + h)
        gl.store(at, y, mask=gl.expand_dims(on < rows, 0) & (column + h < C.H))


@gluon.jit(do_not_specialize=["num_rows", "ws_rows", "ws_cols"], do_not_specialize_on_alignment=["ws_ptr"])
def _moe_down_sm90_kernel(
    w_desc, a_desc, ws_ptr, as_ptr, expert_ptr, start_ptr, rows_ptr, num_tiles_ptr, pair_ptr, y_ptr,
    num_rows, ws_rows, ws_cols, C: gl.constexpr,
):  # fmt: skip
    """Items of this program, in order; see the module docstring for formulas and grid.

    as_ptr: fp32 [ceil(I / 128), num_rows]; y_ptr: bf16 [pairs, H].
    """
    STAGES: gl.constexpr = C.STAGES
    wbuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES * C.KS, 1, 128, C.BK], C.W_BOX)
    wtile = wbuf._reinterpret(gl.float8e4nv, [C.STAGES * C.KS, 128, C.BK], C.TILE)
    abuf = gl.allocate_shared_memory(gl.float8e4nv, [C.STAGES * C.KS, C.N, C.BK], C.TILE)
    full_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(i), count=1)
        mbarrier.init(empty_bars.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (wtile, abuf, full_bars, empty_bars, ws_ptr, as_ptr, expert_ptr, start_ptr, rows_ptr,
                         num_tiles_ptr, pair_ptr, y_ptr, num_rows, ws_rows, ws_cols, C)),
            (_producer, (w_desc, a_desc, wbuf, abuf, full_bars, empty_bars, expert_ptr, start_ptr, num_tiles_ptr, C)),
        ],
        [1],
        [C.PRODUCER_REGS],
    )  # fmt: skip
