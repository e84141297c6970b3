"""Down product and weighted sum for few tokens on SM90 in Gluon: a program owns columns of the output for all tokens.

    grid (H / ROWS): y[row, columns] = bf16(a[row] w2^T * scale) tile by tile, then, after a barrier of the program,
                     out[t] = factor * sum_k weight[t, k] * y[row of (t, k)] + shared[t] in the order of k

So nothing is left for a further launch, and programs exchange nothing. Each one makes the list of tiles itself, by
comparing all pairs, and starts on the weights while the gate-up kernel still runs; all programs write the same list to
the same place. Products as in `few.py`. A visit is TILES tiles at once: a warp takes 16 weight rows of one tile, or a
part of them along I.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hpc.common.facts import KernelFacts
from hpc.common.gluon import barrier, pdl_launch, pdl_wait
from hpc.moe.few import NOBODY, few_experts, few_products


@dataclass(frozen=True, repr=False)
class FewDownConfig(KernelFacts):
    """The down kernel."""

    H: int
    I: int
    TOP_K: int
    PAIRS: int  # a power of two, at least 32 and the number of pairs
    ROWS: int  # columns of the output: 16 or 32
    WARPS: int
    DEPTH: int  # visits under way
    PARTS: int  # warps that share a tile's rows along I
    UNITS: int  # blocks of 64 columns of each; with block scales an even number
    BLOCK: bool
    SHARED: bool
    PDL: bool

    @property
    def GROUPS(self) -> int:
        return -(-self.I // 128)

    @property
    def TILES(self) -> int:
        """Tiles of a visit."""
        return self.WARPS // (self.PARTS * (self.ROWS // 16))

    @property
    def UNROLL(self) -> int:
        return min(8, 1 << (self.TOP_K - 1).bit_length())

    @property
    def FRAGMENT(self):
        return gl.BlockedLayout([1, 4], [32, 1], [self.WARPS, 1], [1, 0])

    @property
    def PRIVATE(self):
        """A thread's four words lie together."""
        return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    @property
    def COMPARE(self):
        """[pairs, pairs]: a warp compares one pair with 32 others."""
        return gl.BlockedLayout([1, 1], [1, 32], [self.WARPS, 1], [1, 0])

    @property
    def LIST(self):
        return gl.BlockedLayout([1], [32], [self.WARPS], [0])

    @property
    def SUM(self):
        """[tokens, ROWS]"""
        return gl.BlockedLayout([1, 1], [32 // self.ROWS, self.ROWS], [self.WARPS, 1], [1, 0])


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _added(a, b):
    return a + b


@gluon.jit
def _list_tiles(ids_ptr, weight_ptr, expert_ptr, start_ptr, rows_ptr, row_ptr, sorted_ptr, num_pairs, num_experts,
                first_expert, C: gl.constexpr):  # fmt: skip
    """Number of tiles; writes (expert, first row, rows) of each and the row of every pair, -1 for nobody's.

    A pair's row is the number of smaller keys (expert, pair); tiles are then found in the experts by row.
    """
    COMPARE: gl.constexpr = C.COMPARE
    PAIRS: gl.constexpr = C.PAIRS
    p = gl.arange(0, PAIRS, gl.SliceLayout(1, COMPARE))
    q = gl.arange(0, PAIRS, gl.SliceLayout(0, COMPARE))
    mine = few_experts(ids_ptr, weight_ptr, p, num_pairs, first_expert, num_experts)
    other = few_experts(ids_ptr, weight_ptr, q, num_pairs, first_expert, num_experts)
    smaller = gl.expand_dims(other * PAIRS + q, 0) < gl.expand_dims(mine * PAIRS + p, 1)
    row = gl.sum(smaller.to(gl.int32), 1)
    gl.store(sorted_ptr + row, mine)
    gl.store(row_ptr + p, gl.where(mine < NOBODY, row, -1), mask=p < num_pairs)
    barrier()
    r = gl.arange(0, PAIRS, C.LIST)
    expert = gl.load(sorted_ptr + r)
    first = gl.load(sorted_ptr + r - 1, mask=r > 0, other=-1) != expert
    rank = r - gl.associative_scan(gl.where(first, r, 0), 0, _larger)
    head = ((expert < NOBODY) & (rank % 8 == 0)).to(gl.int32)
    rows = 0 * r
    for i in gl.static_range(8):
        rows += (gl.load(sorted_ptr + r + i, mask=r + i < PAIRS, other=-1) == expert).to(gl.int32)
    tile = gl.associative_scan(head, 0, _added) - head
    gl.store(expert_ptr + tile, expert, mask=head == 1)
    gl.store(start_ptr + tile, r, mask=head == 1)
    gl.store(rows_ptr + tile, rows, mask=head == 1)
    num_tiles = gl.sum(head, 0)
    barrier()
    return num_tiles


@gluon.jit
def _copy_weights(buffers, slot, w_ptr, expert_ptr, visit, num_tiles, C: gl.constexpr):
    """Start copies of a visit's weights."""
    L: gl.constexpr = C.FRAGMENT
    THREADS: gl.constexpr = 32 * C.WARPS
    UNITS: gl.constexpr = C.UNITS
    r = gl.arange(0, 2 * THREADS, gl.SliceLayout(1, L))
    word = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, L)), 0)
    warp = r % THREADS // 32
    tile = visit * C.TILES + warp // (C.WARPS // C.TILES)
    live = tile < num_tiles
    expert = gl.load(expert_ptr + tile, mask=live, other=0)
    h = gl.program_id(0) * C.ROWS + warp // C.PARTS % (C.ROWS // 16) * 16 + r // THREADS * 8 + r % 32 // 4
    column = gl.expand_dims(warp % C.PARTS * (16 * UNITS) + r % 4 * 4, 1) + word
    at = w_ptr + gl.expand_dims((expert.to(gl.int64) * C.H + h) * (C.I // 4), 1) + column
    for unit in gl.static_range(UNITS):
        inside = gl.expand_dims(live, 1) & (column + unit * 16 < C.I // 4)
        async_copy.async_copy_global_to_shared(buffers[unit].index(slot), at + unit * 16, mask=inside)


@gluon.jit
def _copy_rows(buffers, slot, a_ptr, start_ptr, rows_ptr, visit, num_tiles, C: gl.constexpr):
    """Start copies of a visit's activations."""
    L: gl.constexpr = C.FRAGMENT
    UNITS: gl.constexpr = C.UNITS
    thread = gl.arange(0, 32 * C.WARPS, gl.SliceLayout(1, L))
    word = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, L)), 0)
    warp = thread // 32
    tile = visit * C.TILES + warp // (C.WARPS // C.TILES)
    live = tile < num_tiles
    n = thread % 32 // 4
    start = gl.load(start_ptr + tile, mask=live, other=0)
    live &= n < gl.load(rows_ptr + tile, mask=live, other=0)
    column = gl.expand_dims(warp % C.PARTS * (16 * UNITS) + thread % 4 * 4, 1) + word
    at = a_ptr + gl.expand_dims((start + n) * (C.I // 4), 1) + column
    for unit in gl.static_range(UNITS):
        inside = gl.expand_dims(live, 1) & (column + unit * 16 < C.I // 4)
        async_copy.async_copy_global_to_shared(buffers[unit].index(slot), at + unit * 16, mask=inside)


@gluon.jit
def _weight_scales(ws_ptr, expert_ptr, visit, num_tiles, ws_rows, ws_cols, C: gl.constexpr):
    """The expert's scale, or its block scales for a warp's part along I: a tuple of [threads]."""
    GROUPS: gl.constexpr = C.UNITS // 2 if C.BLOCK else 1
    warp = gl.arange(0, 32 * C.WARPS, gl.SliceLayout(1, C.FRAGMENT)) // 32
    tile = visit * C.TILES + warp // (C.WARPS // C.TILES)
    live = tile < num_tiles
    expert = gl.load(expert_ptr + tile, mask=live, other=0).to(gl.int64)
    out = ()
    if C.BLOCK:
        at = ws_ptr + expert * (ws_rows * ws_cols) + gl.program_id(0) * C.ROWS // 128 * ws_cols
        for i in gl.static_range(GROUPS):
            group = warp % C.PARTS * GROUPS + i
            out = out + (gl.load(at + group, mask=live & (group < C.GROUPS), other=0.0),)
    else:
        out = out + (gl.load(ws_ptr + expert, mask=live, other=0.0),)
    return out


@gluon.jit
def _row_scales(as_ptr, start_ptr, rows_ptr, visit, num_tiles, C: gl.constexpr):
    """Scales of a visit's rows for a warp's part along I, where block scales are: a tuple of [threads, 4 sums]."""
    GROUPS: gl.constexpr = C.UNITS // 2 if C.BLOCK else 0
    thread = gl.arange(0, 32 * C.WARPS, gl.SliceLayout(1, C.FRAGMENT))
    word = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, C.FRAGMENT)), 0)
    warp = thread // 32
    out = ()
    if C.BLOCK:
        tile = visit * C.TILES + warp // (C.WARPS // C.TILES)
        live = tile < num_tiles
        n = gl.expand_dims(thread % 4 * 2, 1) + word % 2
        start = gl.load(start_ptr + tile, mask=live, other=0)
        given = n < gl.expand_dims(gl.load(rows_ptr + tile, mask=live, other=0), 1)
        for i in gl.static_range(GROUPS):
            group = gl.expand_dims(warp % C.PARTS * GROUPS + i, 1)
            at = as_ptr + (gl.expand_dims(start, 1) + n) * C.GROUPS + group
            out = out + (gl.load(at, mask=given & (group < C.GROUPS), other=0.0),)
    return out


@gluon.jit
def _visit(weights, rows, slot, weight_scales, row_scales, C: gl.constexpr):
    """Products of a visit, scaled: [warps of 16 rows * 32, 4 sums], over all of I."""
    L: gl.constexpr = C.FRAGMENT
    THREADS: gl.constexpr = 32 * C.WARPS
    UNITS: gl.constexpr = C.UNITS
    zero = gl.full([THREADS, 4], 0.0, gl.float32, L)
    acc = zero
    fresh = zero
    for unit in gl.static_range(UNITS):
        buffer = weights[unit].index(slot)
        low = buffer.slice(0, THREADS).load(L)
        high = buffer.slice(THREADS, THREADS).load(L)
        fresh = few_products(fresh, low, high, rows[unit].index(slot).load(L))
        if C.BLOCK and unit % 2 == 1:
            acc += fresh * (row_scales[unit // 2] * gl.expand_dims(weight_scales[unit // 2], 1))
            fresh = zero
    if not C.BLOCK:
        acc = fresh * gl.expand_dims(weight_scales[0], 1)
    if C.PARTS > 1:
        acc = gl.sum(acc.reshape([C.WARPS // C.PARTS, C.PARTS, 32, 4]), 1)
        acc = gl.convert_layout(acc.reshape([THREADS // C.PARTS, 4]), L)
    return acc


@gluon.jit
def _store_rows(acc, y_ptr, start_ptr, rows_ptr, visit, num_tiles, C: gl.constexpr):
    """y of a visit's rows."""
    L: gl.constexpr = C.FRAGMENT
    BLOCKS: gl.constexpr = C.ROWS // 16
    thread = gl.arange(0, 32 * C.TILES * BLOCKS, gl.SliceLayout(1, L))
    word = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, L)), 0)
    tile = visit * C.TILES + thread // (32 * BLOCKS)
    live = tile < num_tiles
    n = gl.expand_dims(thread % 4 * 2, 1) + word % 2
    start = gl.load(start_ptr + tile, mask=live, other=0)
    given = n < gl.expand_dims(gl.load(rows_ptr + tile, mask=live, other=0), 1)
    h = (
        gl.expand_dims(gl.program_id(0) * C.ROWS + thread // 32 % BLOCKS * 16 + thread % 32 // 4, 1)
        + word // 2 * 8
    )
    gl.store(y_ptr + (gl.expand_dims(start, 1) + n) * C.H + h, acc.to(gl.bfloat16), mask=given)


@gluon.jit
def _weighted_sum(
    y_ptr, row_ptr, weight_ptr, shared_ptr, out_ptr, num_tokens, stride_out, factor, C: gl.constexpr
):
    """out of all tokens in this program's columns."""
    LAYOUT: gl.constexpr = C.SUM
    UNROLL: gl.constexpr = C.UNROLL
    TOP_K: gl.constexpr = C.TOP_K
    TOKENS: gl.constexpr = 32 * C.WARPS // C.ROWS
    h = gl.expand_dims(gl.program_id(0) * C.ROWS + gl.arange(0, C.ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    for first in range(0, num_tokens, TOKENS):
        t = first + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
        live = t < num_tokens
        acc = gl.full([TOKENS, C.ROWS], 0.0, gl.float32, LAYOUT)
        for k0 in range(0, TOP_K, UNROLL):
            for j in gl.static_range(UNROLL):
                pair = t * TOP_K + k0 + j
                there = live & (k0 + j < TOP_K)
                row = gl.load(row_ptr + pair, mask=there, other=-1)
                weight = gl.load(weight_ptr + pair, mask=there, other=0.0)
                ours = gl.expand_dims(row >= 0, 1)
                y = gl.load(y_ptr + gl.expand_dims(row, 1) * C.H + h, mask=ours, other=0.0).to(gl.float32)
                acc += gl.where(ours, gl.expand_dims(weight, 1) * y, 0.0)
        acc = acc * factor
        inside = gl.expand_dims(live, 1)
        at = gl.expand_dims(t.to(gl.int64), 1)
        if C.SHARED:
            acc += gl.load(shared_ptr + at * C.H + h, mask=inside, other=0.0).to(gl.float32)
        gl.store(out_ptr + at * stride_out + h, acc.to(gl.bfloat16), mask=inside)


@gluon.jit(
    do_not_specialize=[
        "num_pairs",
        "num_experts",
        "first_expert",
        "ws_rows",
        "ws_cols",
        "num_tokens",
        "factor",
    ],
    do_not_specialize_on_alignment=["ws_ptr", "as_ptr", "ids_ptr", "weight_ptr"],
)
def _moe_few_down_kernel(
    a_ptr, as_ptr, w_ptr, ws_ptr, ids_ptr, weight_ptr, shared_ptr, out_ptr, expert_ptr, start_ptr, rows_ptr, row_ptr,
    sorted_ptr, y_ptr, num_pairs, num_experts, first_expert, ws_rows, ws_cols, num_tokens, stride_out, factor,
    C: gl.constexpr,
):  # fmt: skip
    """See the module docstring. a_ptr [rows, I] and w_ptr: e4m3 as words of four; as_ptr: fp32 [rows, groups of 128];
    y_ptr: bf16 [pairs, H].

    Copies are committed visit by visit: DEPTH - 1 groups are younger than the one that a visit waits for, the weights
    of the first visits, which are committed before their rows, aside.
    """
    DEPTH: gl.constexpr = C.DEPTH
    UNITS: gl.constexpr = C.UNITS
    num_tiles = _list_tiles(ids_ptr, weight_ptr, expert_ptr, start_ptr, rows_ptr, row_ptr, sorted_ptr, num_pairs,
                            num_experts, first_expert, C)  # fmt: skip
    weights = ()
    rows = ()
    for _ in gl.static_range(UNITS):  # allocations of their own: copies into one would wait for one another
        weights = weights + (gl.allocate_shared_memory(gl.int32, [DEPTH, 64 * C.WARPS, 4], C.PRIVATE),)
        rows = rows + (gl.allocate_shared_memory(gl.int32, [DEPTH, 32 * C.WARPS, 4], C.PRIVATE),)
    for visit in gl.static_range(DEPTH):
        _copy_weights(weights, visit, w_ptr, expert_ptr, visit, num_tiles, C)
        async_copy.commit_group()
    next_scales = _weight_scales(ws_ptr, expert_ptr, 0, num_tiles, ws_rows, ws_cols, C)
    pdl_wait(C.PDL)
    pdl_launch(C.PDL)
    for visit in gl.static_range(DEPTH):
        _copy_rows(rows, visit, a_ptr, start_ptr, rows_ptr, visit, num_tiles, C)
        async_copy.commit_group()
    next_row_scales = _row_scales(as_ptr, start_ptr, rows_ptr, 0, num_tiles, C)
    slot = 0
    for visit in range(0, (num_tiles + C.TILES - 1) // C.TILES):
        weight_scales = next_scales
        row_scales = next_row_scales
        next_scales = _weight_scales(ws_ptr, expert_ptr, visit + 1, num_tiles, ws_rows, ws_cols, C)
        next_row_scales = _row_scales(as_ptr, start_ptr, rows_ptr, visit + 1, num_tiles, C)
        async_copy.wait_group(DEPTH - 1)
        acc = _visit(weights, rows, slot, weight_scales, row_scales, C)
        _copy_weights(weights, slot, w_ptr, expert_ptr, visit + DEPTH, num_tiles, C)
        _copy_rows(rows, slot, a_ptr, start_ptr, rows_ptr, visit + DEPTH, num_tiles, C)
        async_copy.commit_group()
        _store_rows(acc, y_ptr, start_ptr, rows_ptr, visit, num_tiles, C)
        slot += 1
        if slot == DEPTH:
            slot = 0
    async_copy.wait_group(0)
    barrier()
    _weighted_sum(y_ptr, row_ptr, weight_ptr, shared_ptr, out_ptr, num_tokens, stride_out, factor, C)
