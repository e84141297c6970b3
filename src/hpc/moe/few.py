"""Gate-up product for few tokens on SM90 in Gluon: no index build, no counters, nothing that waits for another program.

Every program finds its rows itself: with at most MAX_PAIRS pairs all ids are one load of a warp. Pair p is the head of
a tile if the number of earlier pairs of its expert is a multiple of 8; programs of other pairs end at once.

    row(p) = pairs of smaller experts + earlier pairs of the same expert
    grid (I / 8, pairs): 8 columns of the activations, that is 16 weight rows, times the 8 rows from the head's row on

The matrix unit multiplies f16, m16n8k16, with fp32 sums: e4m3 widens exactly, so the sums are those of fp32. A thread
loads 16 bytes of a weight row and the same 16 of a token's row; as both operands are read alike, the order of the
columns within 64 does not matter, and neither needs shared memory. A warp takes every WARPS-th block of 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hpc.common.facts import KernelFacts
from hpc.common.gluon import pdl_launch, pdl_wait
from hpc.moe.hopper_math import gated

NOBODY = gl.constexpr(1 << 20)  # greater than any expert, and than any pair


@dataclass(frozen=True, repr=False)
class FewUpConfig(KernelFacts):
    """The gate-up kernel."""

    H: int
    I: int
    TOP_K: int
    PAIRS: int  # a power of two, at least 32 and the number of pairs
    WARPS: int
    DEPTH: int  # blocks of 128 columns that a warp has under way
    BLOCK: bool
    BF16_MUL: bool
    PDL: bool
    ACT: str = "silu"
    LIMIT: float = 0.0
    ALPHA: float = 0.0

    @property
    def STEPS(self) -> int:
        """Blocks of 128 columns of a warp."""
        return -(-self.H // (128 * self.WARPS))

    @property
    def RING(self) -> int:
        return min(self.DEPTH, self.STEPS)

    @property
    def PRIVATE(self):
        return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    @property
    def FRAGMENT(self):
        """[threads, 4 words]: what a thread brings to four products, and its four sums."""
        return gl.BlockedLayout([1, 4], [32, 1], [self.WARPS, 1], [1, 0])

    @property
    def OUT(self):
        """[8 columns, 8 rows] with the columns of a row in a thread."""
        return gl.BlockedLayout([8, 1], [1, 32], [1, self.WARPS], [0, 1])

    @property
    def LIST(self):
        """All pairs in every warp."""
        return gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [1, self.WARPS], [0, 1]))


@gluon.jit
def few_experts(ids_ptr, weight_ptr, p, num_pairs, first_expert, num_experts):
    """Local experts of pairs p; NOBODY for ids of other ranks and none, and for pairs of weight 0."""
    live = p < num_pairs
    local = gl.load(ids_ptr + p, mask=live, other=-1) - first_expert
    weight = gl.load(weight_ptr + p, mask=live, other=0.0)
    return gl.where((local >= 0) & (local < num_experts) & (weight != 0.0), local, NOBODY)


@gluon.jit
def few_products(acc, low, high, tokens):
    """acc += 16 weight rows x 8 tokens over 64 columns.

    Thread 4 g + c holds columns 16 c to 16 c + 15 of rows g (low) and g + 8 (high) and of token g as four words each;
    word s takes part in product s. Its sums: rows g and g + 8 of tokens 2 c and 2 c + 1.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 lo, hi;
            .reg .b32 a<4>, b<2>;
            mov.b32 {lo, hi}, $4;
            cvt.rn.f16x2.e4m3x2 a0, lo;
            cvt.rn.f16x2.e4m3x2 a2, hi;
            mov.b32 {lo, hi}, $8;
            cvt.rn.f16x2.e4m3x2 a1, lo;
            cvt.rn.f16x2.e4m3x2 a3, hi;
            mov.b32 {lo, hi}, $12;
            cvt.rn.f16x2.e4m3x2 b0, lo;
            cvt.rn.f16x2.e4m3x2 b1, hi;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, {b0, b1}, {$16, $17, $18, $19};
            mov.b32 {lo, hi}, $5;
            cvt.rn.f16x2.e4m3x2 a0, lo;
            cvt.rn.f16x2.e4m3x2 a2, hi;
            mov.b32 {lo, hi}, $9;
            cvt.rn.f16x2.e4m3x2 a1, lo;
            cvt.rn.f16x2.e4m3x2 a3, hi;
            mov.b32 {lo, hi}, $13;
            cvt.rn.f16x2.e4m3x2 b0, lo;
            cvt.rn.f16x2.e4m3x2 b1, hi;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, {b0, b1}, {$0, $1, $2, $3};
            mov.b32 {lo, hi}, $6;
            cvt.rn.f16x2.e4m3x2 a0, lo;
            cvt.rn.f16x2.e4m3x2 a2, hi;
            mov.b32 {lo, hi}, $10;
            cvt.rn.f16x2.e4m3x2 a1, lo;
            cvt.rn.f16x2.e4m3x2 a3, hi;
            mov.b32 {lo, hi}, $14;
            cvt.rn.f16x2.e4m3x2 b0, lo;
            cvt.rn.f16x2.e4m3x2 b1, hi;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, {b0, b1}, {$0, $1, $2, $3};
            mov.b32 {lo, hi}, $7;
            cvt.rn.f16x2.e4m3x2 a0, lo;
            cvt.rn.f16x2.e4m3x2 a2, hi;
            mov.b32 {lo, hi}, $11;
            cvt.rn.f16x2.e4m3x2 a1, lo;
            cvt.rn.f16x2.e4m3x2 a3, hi;
            mov.b32 {lo, hi}, $15;
            cvt.rn.f16x2.e4m3x2 b0, lo;
            cvt.rn.f16x2.e4m3x2 b1, hi;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, {b0, b1}, {$0, $1, $2, $3};
        }
        """,  # noqa: E501
        "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
        args=[low, high, tokens, acc],
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def few_pieces(COUNT: gl.constexpr, C: gl.constexpr):
    """(piece, thread) of the COUNT pieces of four words that every thread copies, [COUNT * threads]."""
    r = gl.arange(0, COUNT * 32 * C.WARPS, gl.SliceLayout(1, C.FRAGMENT))
    return r // (32 * C.WARPS), r % (32 * C.WARPS)


@gluon.jit
def _fetch(weights, tokens, w_at, x_at, w_column, x_column, given, step: gl.constexpr,
           C: gl.constexpr):  # fmt: skip
    """Start the copies of a warp's block of 128 columns. Threads read back what they copied themselves."""
    first: gl.constexpr = step * C.WARPS * 32
    async_copy.async_copy_global_to_shared(weights, w_at + first, mask=w_column + first < C.H // 4)
    async_copy.async_copy_global_to_shared(tokens, x_at + first, mask=given & (x_column + first < C.H // 4))
    async_copy.commit_group()


@gluon.jit
def _consume(acc, weights, tokens, step: gl.constexpr, C: gl.constexpr):
    """Wait for a block's copies, and acc += its products."""
    L: gl.constexpr = C.FRAGMENT
    later: gl.constexpr = C.STEPS - 1 - step
    THREADS: gl.constexpr = 32 * C.WARPS
    async_copy.wait_group(later if later < C.RING - 1 else C.RING - 1)
    for half in gl.static_range(2):
        low = weights[step % C.RING].slice(half * THREADS, THREADS).load(L)
        high = weights[step % C.RING].slice((2 + half) * THREADS, THREADS).load(L)
        acc = few_products(acc, low, high, tokens[step % C.RING].slice(half * THREADS, THREADS).load(L))
    return acc


@gluon.jit
def _scales(gate_scale_at, up_scale_at, xs_at, scaled, warp, word, step, C: gl.constexpr):
    """(of the weight rows, of the tokens) of a warp's block of 128 columns, for the four sums of a thread."""
    block = gl.expand_dims(warp + step * C.WARPS, 1) + 0 * word
    inside = block * 128 < C.H
    rows = gl.load(gl.where(word < 2, gate_scale_at + block, up_scale_at + block), mask=inside, other=0.0)
    return rows, gl.load(xs_at + block, mask=inside & scaled, other=0.0)


@gluon.jit
def _tile(x_ptr, xs_ptr, w_ptr, ws_ptr, act_ptr, a_ptr, expert, pair, start, count, ids, q, xs_cols, ws_rows, ws_cols,
          C: gl.constexpr):  # fmt: skip
    """Eight columns of the activations for rows start to start + count, whose pairs begin with `pair`."""
    L: gl.constexpr = C.FRAGMENT
    WORDS: gl.constexpr = C.H // 4
    THREADS: gl.constexpr = 32 * C.WARPS
    RING: gl.constexpr = C.RING
    STEPS: gl.constexpr = C.STEPS
    first = gl.program_id(0) * 8
    thread = gl.arange(0, 32 * C.WARPS, gl.SliceLayout(1, L))
    word = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, L)), 0)
    warp = thread // 32
    n = gl.expand_dims(thread % 4 * 2, 1) + word % 2  # the tokens of a thread's sums
    piece, copier = few_pieces(4, C)
    half, fetcher = few_pieces(2, C)
    token = fetcher % 32 // 4  # of the tile, whose columns a thread copies
    member = 0 * token + pair
    summed = 0 * n + pair
    last = pair
    for i in range(1, count):
        last = gl.min(gl.where((ids == expert) & (q > last), q, NOBODY), 0)
        member = gl.where(token == i, last, member)
        summed = gl.where(n == i, last, summed)
    row = piece // 2 * C.I + copier % 32 // 4
    w_column = gl.expand_dims(copier // 32 * 32 + piece % 2 * 16 + copier % 4 * 4, 1) + word
    x_column = gl.expand_dims(fetcher // 32 * 32 + half * 16 + fetcher % 4 * 4, 1) + word
    w_at = (
        w_ptr + (expert.to(gl.int64) * (2 * C.I) + first) * WORDS + gl.expand_dims(row * WORDS, 1) + w_column
    )
    x_at = x_ptr + gl.expand_dims(member // C.TOP_K * WORDS, 1) + x_column
    given = gl.expand_dims(token < count, 1)
    xs_at = xs_ptr + summed // C.TOP_K * xs_cols
    blocks = ws_ptr + expert.to(gl.int64) * (ws_rows * ws_cols)
    gate_scale_at = blocks + first // 128 * ws_cols
    up_scale_at = blocks + (C.I + first) // 128 * ws_cols
    scale = 1.0
    act = 1.0
    if not C.BLOCK:
        scale = gl.load(ws_ptr + expert)
        act = gl.load(act_ptr)
    acc = gl.full([32 * C.WARPS, 4], 0.0, gl.float32, L)
    zero = acc
    weights = ()
    tokens = ()
    for _ in gl.static_range(RING):  # allocations of their own: copies into one would wait for one another
        weights = weights + (gl.allocate_shared_memory(gl.int32, [4 * THREADS, 4], C.PRIVATE),)
        tokens = tokens + (gl.allocate_shared_memory(gl.int32, [2 * THREADS, 4], C.PRIVATE),)
    scales = ()
    for step in gl.static_range(STEPS + RING - 1):
        if step < STEPS:
            _fetch(weights[step % RING], tokens[step % RING], w_at, x_at, w_column, x_column, given, step, C)
            if C.BLOCK:
                scales = scales + (
                    _scales(gate_scale_at, up_scale_at, xs_at, n < count, warp, word, step, C),
                )
        if step >= RING - 1:
            if C.BLOCK:
                of_rows, of_tokens = scales[step - (RING - 1)]
                acc += _consume(zero, weights, tokens, step - (RING - 1), C) * (of_rows * of_tokens)
            else:
                acc = _consume(acc, weights, tokens, step - (RING - 1), C)
    sums = gl.sum(acc.reshape([C.WARPS, 32, 4]), 0).reshape([8, 4, 2, 2]).permute([0, 1, 3, 2])
    gate, up = gl.split(sums)  # [column, c, token of the two]
    value = gl.convert_layout(gated(gate, up, scale, C).reshape([8, 8]), C.OUT)
    i = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, C.OUT)), 1)
    token = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, C.OUT)), 0)
    at = a_ptr + (start + token) * C.I + (first + i)
    ours = (token < count) & (i >= 0)
    if C.BLOCK:
        gl.store(at, value, mask=ours)
    else:
        gl.store(at, (value * act).to(gl.float8e4nv), mask=ours)


@gluon.jit(
    do_not_specialize=["num_pairs", "num_experts", "first_expert", "xs_cols", "ws_rows", "ws_cols"],
    do_not_specialize_on_alignment=["xs_ptr", "ws_ptr", "act_ptr", "ids_ptr", "weight_ptr"],
)
def _moe_few_up_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, act_ptr, ids_ptr, weight_ptr, a_ptr, num_pairs, num_experts, first_expert, xs_cols,
    ws_rows, ws_cols, C: gl.constexpr,
):  # fmt: skip
    """See the module docstring. x_ptr, w_ptr: e4m3 as words of four; a_ptr: e4m3 [rows, I], with block scales fp32
    values that `_moe_few_quantise_kernel` rounds."""
    pdl_wait(C.PDL)
    pdl_launch(C.PDL)
    pair = gl.program_id(1)
    q = gl.arange(0, C.PAIRS, C.LIST)
    ids = few_experts(ids_ptr, weight_ptr, q, num_pairs, first_expert, num_experts)
    expert = few_experts(ids_ptr, weight_ptr, pair, num_pairs, first_expert, num_experts)
    same = ids == expert
    rank = gl.sum((same & (q < pair)).to(gl.int32), 0)
    if (expert != NOBODY) & (rank % 8 == 0):
        start = rank + gl.sum((ids < expert).to(gl.int32), 0)
        count = gl.minimum(gl.sum(same.to(gl.int32), 0) - rank, 8)
        _tile(x_ptr, xs_ptr, w_ptr, ws_ptr, act_ptr, a_ptr, expert, pair, start, count, ids, q, xs_cols, ws_rows,
              ws_cols, C)  # fmt: skip
