"""Prefill attention for SM90 in Gluon, e4m3 queries, keys and values with one K and one V scale.

As `hopper`, with a third warpgroup: wgmma takes an e4m3 B operand only with its contraction innermost, so V, which lies
token by token in the cache, is transposed on its way. It is read as int16 pairs by LDSM.T, two byte permutes a register
pair separate the pairs, and STSM writes rows of one d. Tokens are left in the order 0, 1, 8, 9, 2, 3, 10, 11, ... of
each 16, which is how a thread holds the scores of a row: P becomes an A operand by relabelling registers, no shuffles.
Even and odd d land in separate halves, and the last step puts them back in registers.

Probabilities are e4m3, scaled by 2^OFF: 2^8.5 = 362 at most. The running maximum is lazy: it is replaced, by a vote of
the warp, only where a score exceeds it by 2^TAU, so most steps neither exchange maxima across lanes nor rescale O.

The tensor cores add e4m3 products with about 14 bits. O therefore moves to an fp32 sum in shared memory every FLUSH
blocks; without it a uniform softmax over 128K keys would lose most of each block's contribution.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from hpc.attention.prefill.hopper_common import (
    LOG2E,
    blocks_of,
    close_row,
    first_keys,
    mask,
    num_work,
    producer,
    seen_keys,
    softcap,
    store_tile,
    tile_of,
    work_of,
)
from hpc.common.gluon import barrier, fence_async_shared, mbarrier, pdl_launch, pdl_wait

_TAU = gl.constexpr(4.5)
_OFF = gl.constexpr(4.0)  # 8.5 - TAU
_TINY = gl.constexpr(1e-30)  # least scale of a row: an all-zero query may carry 0, and TAU / 0 has no use

# Whole-thread blocks of inline assembly: a thread holds 64 values of two rows, two columns of one row, then two of the
# other. $0 to $63 are outputs tied to inputs $64 to $127; from $128 on the operand of a row, repeated for each value.
_N = 64
_TIED = gl.constexpr(",".join(["=r"] * _N + [str(k) for k in range(_N)]))
_RESCALE = gl.constexpr(
    "{.reg .pred p,q; setp.neu.f32 p, $128, 0f3F800000; setp.neu.f32 q, $130, 0f3F800000; or.pred p,p,q; "
    "vote.sync.any.pred p, p, 0xffffffff; @!p bra SKIP; "
    + " ".join(f"mul.f32 ${k}, ${k}, ${128 + k};" for k in range(_N))
    + " SKIP: }"
)
_RESCALE_TIED = gl.constexpr(",".join(["=r"] * _N + [str(k) for k in range(_N)] + ["r"] * _N))
# A branch never taken, whose arm rewrites the values: every exponential is issued before it, so ptxas neither weaves
# the row sums between them nor sinks them below the wait for O += P V.
_PIN = gl.constexpr(
    "{.reg .pred p; setp.lt.f32 p, $0, 0fBF800000; vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni SKIP; "
    + " ".join(f"mul.f32 ${k}, ${k}, ${k};" for k in range(_N))
    + " SKIP: }"
)
# $2, $3: lane maxima of the two rows; $4, $5: running maxima; $6, $7: by how much they must be exceeded
_LAZY_MAX = gl.constexpr(
    "{.reg .pred p,q; .reg .f32 t; add.f32 t, $4, $6; setp.gt.f32 p, $2, t; add.f32 t, $5, $7; setp.gt.f32 q, $3, t; "
    "or.pred p,p,q; vote.sync.any.pred p, p, 0xffffffff; mov.b32 $0, $4; mov.b32 $1, $5; @!p bra SKIP; "
    "max.f32 $0, $2, $4; max.f32 $1, $3, $5; "
    "shfl.sync.bfly.b32 t, $0, 2, 31, -1; max.f32 $0, $0, t; shfl.sync.bfly.b32 t, $1, 2, 31, -1; max.f32 $1, $1, t; "
    "shfl.sync.bfly.b32 t, $0, 1, 31, -1; max.f32 $0, $0, t; shfl.sync.bfly.b32 t, $1, 1, 31, -1; max.f32 $1, $1, t; "
    "SKIP: }"
)


@gluon.jit
def _unpair(x):
    """Four int16 (tokens t, t + 1, t + 8, t + 9; each two neighbouring d) to four bytes of d and four of d + 1."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=&r,=r,r,r", args=[x], dtype=gl.int16,
        is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _transposer(vview, tview, v_full, v_empty, t_full, t_empty, table_ptr, num_ctas, window, C: gl.constexpr):
    """Four warps: V [keys, d] to V^T [d, keys], block by block."""
    MMA2: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    LB: gl.constexpr = gl.DotOperandLayout(1, MMA2, 2)
    cta = gl.program_id(0)
    pdl_wait(C.PDL)
    n_work = num_work(table_ptr, C)
    vc = 0
    for it in range((n_work + num_ctas - 1) // num_ctas):
        w = work_of(it, cta, num_ctas)
        if w < n_work:
            _, tokens, _, first, start, keys = tile_of(table_ptr, w, C)
            _, blocks, _, _ = blocks_of(tokens, first, start, keys, window, C)
            for _ in range(blocks):
                stage = vc % C.STAGES
                phase = (vc // C.STAGES) & 1
                mbarrier.wait(v_full.index(stage), phase)
                x = vview.index(stage).load(LB)  # int16 [128 keys, 64 pairs of d]
                mbarrier.arrive(v_empty.index(stage), count=1)
                y = _unpair(x).reshape([8, 2, 8, 64]).permute([1, 3, 0, 2]).reshape([128, 64])
                mbarrier.wait(t_empty.index(stage), phase ^ 1)
                tview.index(stage).store(y)
                fence_async_shared()
                barrier()
                mbarrier.arrive(t_full.index(stage), count=1)
                vc += 1


@gluon.jit
def _p_operand(p, A: gl.constexpr):
    """[64, 128] probabilities to e4m3 in the order of keys that the transposer leaves."""
    p = p.reshape([64, 8, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 128])
    p = gl.convert_layout(p, A)
    return gl.inline_asm_elementwise(
        "{.reg .b16 a,b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
        "mov.b32 $0, {a,b};}",
        "=r,r,r,r,r", args=[p], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _by_value(x):
    """[64, 4] by lane to [64, 1, 4, 1], to meet values as [64, 16, 4, 2]."""
    return gl.expand_dims(gl.expand_dims(x, 2), 1)


@gluon.jit
def _rescale(o, shrink):
    """O *= shrink, skipped by the warp where all factors are 1."""
    o4 = gl.inline_asm_elementwise(
        _RESCALE, _RESCALE_TIED, args=[o.reshape([64, 16, 4, 2]), _by_value(shrink)], dtype=gl.float32, is_pure=False,
        pack=64,
    )  # fmt: skip
    return gl.convert_layout(o4.reshape([64, 128]), o.type.layout)


@gluon.jit
def _softmax(s, m, l, unit, MASKED: gl.constexpr):
    """(probabilities times 2^OFF, running maximum of the unscaled scores, lane sums, factor of the old sums)."""
    s4 = s.reshape([64, 16, 4, 2])
    lane = gl.max(gl.max(s4, 1), 2)
    m_new = gl.inline_asm_elementwise(
        _LAZY_MAX, "=&r,=&r,r,r,r,r,r,r", args=[lane, m, _TAU / unit], dtype=gl.float32, is_pure=False, pack=2
    )
    top = m_new * unit - _OFF
    shrink = gl.exp2((m - m_new) * unit)
    if MASKED:
        none = m_new == float("-inf")
        top = gl.where(none, 0.0, top)
        shrink = gl.where(none, 1.0, shrink)
    p4 = gl.exp2(s4 * _by_value(unit) - _by_value(top))
    p4 = gl.inline_asm_elementwise(_PIN, _TIED, args=[p4], dtype=gl.float32, is_pure=False, pack=64)
    l = l * shrink + gl.sum(gl.sum(p4, 1), 2)
    return gl.convert_layout(p4.reshape([64, 128]), s.type.layout), m_new, l, shrink


@gluon.jit
def _scores(s, scale, cap, C: gl.constexpr):
    if C.CAP:
        s4 = softcap(s.reshape([64, 16, 4, 2]), _by_value(scale), cap, C)
        s = gl.convert_layout(s4.reshape([64, 128]), s.type.layout)
    return s


@gluon.jit
def _step(q, kview, tview, k_full, k_empty, t_full, t_empty, p, o, m, l, kc, vc, key, last, since, base,
          scale, unit, cap,
          MASKED: gl.constexpr, MMA: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Scores of the next block beside O += P V of the present one."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ks = kc % C.STAGES
    vs = vc % C.STAGES
    p8 = _p_operand(p, A)
    mbarrier.wait(k_full.index(ks), (kc // C.STAGES) & 1)
    zero = gl.full([64, 128], 0.0, gl.float32, MMA)
    s = warpgroup_mma(q, kview.index(ks).permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(t_full.index(vs), (vc // C.STAGES) & 1)
    o = warpgroup_mma(p8, tview.index(vs).permute([1, 0]), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    s = _scores(s, scale, cap, C)
    if MASKED:
        s = mask(s, key, last - base, since - base, C)
    p, m, l, shrink = _softmax(s, m, l, unit, MASKED)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    mbarrier.arrive(k_empty.index(ks), count=1)
    mbarrier.arrive(t_empty.index(vs), count=1)
    return p, _rescale(o, shrink), m, l


@gluon.jit
def _row_scale(qs_ptr, ks, softmax_scale, b, first, tokens, head, stride_qs_req, stride_qs_head, qs_len,
               WG: gl.constexpr, L: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Scale of each row's scores as [64, 4] of layout L, 0 from token qs_len on."""
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    token = row // C.PACK + WG * C.QT
    at = b.to(gl.int64) * stride_qs_req + (head + row % C.PACK) * stride_qs_head + first + token
    lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, L)), 0)
    live = gl.expand_dims((token < tokens) & (first + token < qs_len), 1) & (lane >= 0)
    scale = gl.load(qs_ptr + gl.expand_dims(at, 1) + lane * 0, mask=live, other=0.0)
    return scale * (ks * softmax_scale)


@gluon.jit
def _consumer(WG: gl.constexpr, o_desc, o_ptr, qview, kview, tview, oview, obuf, fbuf, q_full, q_empty, k_full, k_empty,
              t_full, t_empty, table_ptr, sinks_ptr, lse_ptr, qs_ptr, ks_ptr, vs_ptr, num_ctas, window, softmax_scale,
              cap, stride_o_tok, stride_o_head, stride_qs_req, stride_qs_head, qs_len, C: gl.constexpr):  # fmt: skip
    """64 rows of each tile; see the module docstring."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    cta = gl.program_id(0)
    pdl_wait(C.PDL)
    n_work = num_work(table_ptr, C)
    key_scale = gl.load(ks_ptr)
    value_scale = gl.load(vs_ptr)
    q = qview.index(WG)
    held = fbuf.index(WG)
    kc = 0
    vc = 0
    for it in range((n_work + num_ctas - 1) // num_ctas):
        w = work_of(it, cta, num_ctas)
        if w < n_work:
            row0, tokens, b, first, start, keys = tile_of(table_ptr, w, C)
            head = (w % C.NH) * C.PACK
            hi, blocks, top, bottom = blocks_of(tokens, first, start, keys, window, C)
            last, since = seen_keys(start, first, keys, window, WG, ROWS, C)
            col = gl.arange(0, 128, COLS)
            l = gl.sum(gl.sum(gl.full([64, 128], 0.0, gl.float32, MMA).reshape([64, 16, 4, 2]), 1), 2)
            LANES: gl.constexpr = l.type.layout
            scale = _row_scale(qs_ptr, key_scale, softmax_scale, b, first, tokens, head, stride_qs_req, stride_qs_head,
                               gl.where(keys > 0, qs_len, 0), WG, LANES, C)  # fmt: skip
            if C.CAP:
                unit = gl.full([64, 4], 1.0, gl.float32, LANES)
            else:
                unit = gl.maximum(scale * LOG2E, _TINY)

            mbarrier.wait(q_full, it & 1)
            ks = kc % C.STAGES
            mbarrier.wait(k_full.index(ks), (kc // C.STAGES) & 1)
            zero = gl.full([64, 128], 0.0, gl.float32, MMA)
            s = warpgroup_mma(q, kview.index(ks).permute([1, 0]), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_empty.index(ks), count=1)
            kc += 1
            base = (hi - 1) * 128
            key = first_keys(keys, hi - 1, COLS, C)
            s = mask(_scores(s, scale, cap, C), key, last - base, since - base, C)
            m = gl.full([64, 4], float("-inf"), gl.float32, LANES)
            p, m, l, _ = _softmax(s, m, l, unit, True)
            o = gl.full([64, 128], 0.0, gl.float32, MMA)
            m_held = m
            for i in range(1, top):
                p, o, m, l = _step(q, kview, tview, k_full, k_empty, t_full, t_empty, p, o, m, l, kc, vc, col,
                                   last, since, (hi - 1 - i) * 128, scale, unit, cap, True, MMA, C)  # fmt: skip
                kc += 1
                vc += 1
            rest = blocks - bottom - top
            flushes = 0
            while rest > 0:
                for i in range(gl.minimum(rest, C.FLUSH)):
                    p, o, m, l = _step(q, kview, tview, k_full, k_empty, t_full, t_empty, p, o, m, l, kc, vc, col,
                                       last, since, 0, scale, unit, cap, False, MMA, C)  # fmt: skip
                    kc += 1
                    vc += 1
                rest -= C.FLUSH
                if rest > 0:
                    if flushes > 0:
                        o = _rescale(held.load(MMA), gl.exp2((m_held - m) * unit)) + o
                    held.store(o)
                    o = gl.full([64, 128], 0.0, gl.float32, MMA)
                    m_held = m
                    flushes += 1
            if C.WINDOW:
                for i in range(blocks - bottom, blocks):
                    p, o, m, l = _step(q, kview, tview, k_full, k_empty, t_full, t_empty, p, o, m, l, kc, vc, col,
                                       last, since, (hi - 1 - i) * 128, scale, unit, cap, True, MMA, C)  # fmt: skip
                    kc += 1
                    vc += 1
            mbarrier.arrive(q_empty, count=1)
            p8 = _p_operand(p, A)
            vs = vc % C.STAGES
            mbarrier.wait(t_full.index(vs), (vc // C.STAGES) & 1)
            o = warpgroup_mma(p8, tview.index(vs).permute([1, 0]), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(t_empty.index(vs), count=1)
            vc += 1
            if flushes > 0:
                o = _rescale(held.load(MMA), gl.exp2((m_held - m) * unit)) + o
            total = gl.convert_layout(gl.sum(l, 1), ROWS)
            exponent = gl.convert_layout(gl.max(m * unit - _OFF, 1), ROWS)
            factor = close_row(total, exponent, row0, tokens, head, WG, value_scale, sinks_ptr, lse_ptr, C)
            out = (o * gl.expand_dims(factor, 1)).to(gl.bfloat16)
            out = out.reshape([64, 2, 64]).permute([0, 2, 1]).reshape([64, 128])  # even and odd d
            store_tile(
                out, o_desc, o_ptr, oview, obuf, row0, tokens, head, stride_o_tok, stride_o_head, WG, C
            )
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["stride_ids", "num_ctas", "num_pages", "window", "softmax_scale", "cap", "stride_qs_req",
                       "stride_qs_head", "qs_len"],
    do_not_specialize_on_alignment=["lse_ptr", "table_ptr", "ids_ptr", "sinks_ptr", "qs_ptr", "ks_ptr", "vs_ptr"],
)  # fmt: skip
def _prefill_sm90_fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, table_ptr, ids_ptr, sinks_ptr, qs_ptr, ks_ptr, vs_ptr,
    stride_ids, num_ctas, num_pages, window, softmax_scale, cap, stride_o_tok, stride_o_head, stride_qs_req,
    stride_qs_head, qs_len, C: gl.constexpr,
):  # fmt: skip
    """Grid (num_ctas). As `hopper._prefill_sm90_bf16_kernel` with qs [B, HQ, qs_len], ks [1], vs [1] fp32."""
    STAGES: gl.constexpr = C.STAGES
    qbuf = gl.allocate_shared_memory(C.T, [2, C.QT, C.PACK, 128], C.Q_BOX)
    kbuf = gl.allocate_shared_memory(C.T, [C.STAGES * C.NP, 1, C.PB, 1, 128], C.KV_BOX)
    vbuf = gl.allocate_shared_memory(C.T, [C.STAGES * C.NP, 1, C.PB, 1, 128], C.KV_BOX)
    tview = gl.allocate_shared_memory(C.T, [C.STAGES, 128, 128], C.TILE)
    obuf = gl.allocate_shared_memory(gl.bfloat16, [4, C.QT, C.PACK, 64], C.O_BOX)
    fbuf = gl.allocate_shared_memory(gl.float32, [2, 64, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    qview = qbuf._reinterpret(C.T, [2, 64, 128], C.TILE)
    kview = kbuf._reinterpret(C.T, [C.STAGES, 128, 128], C.TILE)
    vwords = vbuf._reinterpret(gl.int16, [C.STAGES, 128, 64], C.O_TILE)
    twords = tview._reinterpret(gl.int16, [C.STAGES, 128, 64], C.O_TILE)
    oview = obuf._reinterpret(gl.bfloat16, [2, 64, 128], C.O_TILE)
    k_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    t_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    t_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
        mbarrier.init(t_full.index(i), count=1)
        mbarrier.init(t_empty.index(i), count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    fence_async_shared()
    pdl_launch(C.PDL)
    gl.warp_specialize(
        [
            (_consumer, (0, o_desc, o_ptr, qview, kview, tview, oview, obuf, fbuf, q_full, q_empty, k_full, k_empty,
                         t_full, t_empty, table_ptr, sinks_ptr, lse_ptr, qs_ptr, ks_ptr, vs_ptr, num_ctas, window,
                         softmax_scale, cap, stride_o_tok, stride_o_head, stride_qs_req, stride_qs_head, qs_len, C)),
            (_consumer, (1, o_desc, o_ptr, qview, kview, tview, oview, obuf, fbuf, q_full, q_empty, k_full, k_empty,
                         t_full, t_empty, table_ptr, sinks_ptr, lse_ptr, qs_ptr, ks_ptr, vs_ptr, num_ctas, window,
                         softmax_scale, cap, stride_o_tok, stride_o_head, stride_qs_req, stride_qs_head, qs_len, C)),
            (_transposer, (vwords, twords, v_full, v_empty, t_full, t_empty, table_ptr, num_ctas, window, C)),
            (producer, (q_desc, k_desc, v_desc, qbuf, kbuf, vbuf, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                        table_ptr, ids_ptr, stride_ids, num_ctas, num_pages, window, C)),
        ],
        [4, 4, 1],
        [C.REGS, 72, C.PRODUCER_REGS],
    )  # fmt: skip
