"""Prefill attention for SM90 in Gluon, e4m3 queries, keys and values with one K and one V scale.

As `hopper`, with a third warpgroup: wgmma takes an e4m3 B operand only with its contraction innermost, so V, which lies
token by token in the cache, is transposed on its way. It is read as int16 pairs by LDSM.T, two byte permutes a register
pair separate the pairs, and STSM writes rows of one d. Tokens are left in the order 0, 1, 8, 9, 2, 3, 10, 11, ... of
each 16, which is how a thread holds the scores of a row: P becomes an A operand by relabelling registers, no shuffles.
Even and odd d land in separate halves, and the last step puts them back in registers.

Probabilities are e4m3, scaled by 2^OFF: 2^8.5 = 362 at most. The running maximum is lazy: it is replaced, by a vote of
the warp, only where a score exceeds it by 2^TAU, so most steps neither exchange maxima across lanes nor rescale O.

The tensor cores keep about 14 bits of a sum of e4m3 products: addends far below the sum lose their low bits, all in one
direction. So every block gets a fresh accumulator, which is added to O in fp32 (O = O * shrink + P V); the same
multiply-add does the rescaling. Registers allow half of d at a time: O takes 64 a thread, scores 64, a half of P V 32,
P 16. A step issues and awaits, beside exponentials of the next block:

    QK of both halves of its keys, P V of even d  |  exponentials of 64 keys
    O += P V of even d  |  P V of odd d           |  exponentials of 64 keys  |  O += P V of odd d
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from hpc.attention.prefill.hopper_common import (
    LOG2E,
    await_tile,
    blocks_of,
    close_no_part,
    close_row,
    first_keys,
    first_work,
    item_of,
    mask,
    num_work,
    place_tile,
    producer,
    rounds_of,
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

# A thread holds 32 values of half a block, $0 to $31, tied to inputs $32 to $63. A branch never taken, whose arm
# rewrites the values: every exponential is issued before it, so ptxas neither weaves the row sums between them nor
# sinks them below the wait for P V.
_N = 32
_TIED = gl.constexpr(",".join(["=r"] * _N + [str(k) for k in range(_N)]))
_PIN = gl.constexpr(
    "{.reg .pred p; setp.lt.f32 p, $0, 0fBF800000; vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni SKIP; "
    + " ".join(f"mul.f32 ${k}, ${k}, ${k};" for k in range(_N))
    + " SKIP: }"
)
# The same for packed probabilities, which have no sign: conversions between the first and the last product of a group
# would make ptxas wait for each of them (C7513).
_PIN_PACKED = gl.constexpr(
    "{.reg .pred p; setp.lt.s32 p, $0, 0; vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni SKIP; "
    + " ".join(f"not.b32 ${k}, ${k};" for k in range(16))
    + " SKIP: }"
)
_PACKED_TIED = gl.constexpr(",".join(["=r"] * 16 + [str(k) for k in range(16)]))
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
    """Four warps: V [keys, d] to V^T [d, keys], block by block, 64 keys at a time: that takes few registers."""
    MMA2: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    LB: gl.constexpr = gl.DotOperandLayout(1, MMA2, 2)
    cta = item_of(num_ctas, C)
    pdl_wait(C.PDL)
    n_work = num_work(table_ptr, C)
    cta = first_work(cta, table_ptr, n_work, num_ctas, window, C)
    vc = 0
    for it in range(rounds_of(n_work, num_ctas, C)):
        w = work_of(it, cta, num_ctas, n_work, C)
        if w < n_work:
            _, tokens, _, first, start, keys = tile_of(table_ptr, w, n_work, C)
            _, blocks, _, _ = blocks_of(tokens, first, start, keys, window, num_ctas, C)
            for _ in range(blocks):
                stage = vc % C.STAGES
                phase = (vc // C.STAGES) & 1
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.wait(t_empty.index(stage), phase ^ 1)
                for half in gl.static_range(2):
                    x = vview.index(stage * 2 + half).load(LB)  # int16 [64 keys, 64 pairs of d]
                    y = _unpair(x).reshape([4, 2, 8, 64]).permute([1, 3, 0, 2]).reshape([128, 32])
                    tview.index(stage).slice(half * 32, 32, dim=1).store(y)
                mbarrier.arrive(v_empty.index(stage), count=1)
                fence_async_shared()
                barrier()
                mbarrier.arrive(t_full.index(stage), count=1)
                vc += 1


@gluon.jit
def _packed(p):
    """[64, 64] fp32 to e4m3, four to an int32 [64, 4, 4], keys in the order that the transposer leaves."""
    even, odd = gl.split(p.reshape([64, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{.reg .b16 a,b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
        "mov.b32 $0, {a,b};}",
        "=r,r,r,r,r", args=[a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _both(pa, pb):
    """Packed probabilities of a block from those of its halves."""
    p = gl.join(pa, pb).permute([0, 3, 1, 2])
    return gl.inline_asm_elementwise(
        _PIN_PACKED, _PACKED_TIED, args=[p], dtype=gl.int32, is_pure=False, pack=16
    )


@gluon.jit
def _p_operand(p, A: gl.constexpr):
    """Packed probabilities as the e4m3 operand [64, 128]: no instruction, the bytes stay."""
    low = gl.join(p.to(gl.int8), (p >> 16).to(gl.int8))
    high = gl.join((p >> 8).to(gl.int8), (p >> 24).to(gl.int8))
    p8 = gl.join(low, high).reshape([64, 128]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(p8, A)


@gluon.jit
def _by_value(x):
    """[64, 4] by lane to [64, 1, 4, 1], to meet values as [64, 8, 4, 2]."""
    return gl.expand_dims(gl.expand_dims(x, 2), 1)


@gluon.jit
def _by_lane(x):
    """[64, 64] as [64, 8, 4, 2]: a lane's values."""
    return x.reshape([64, 8, 4, 2])


@gluon.jit
def _plus(o, shrink, pv):
    """O * shrink + P V."""
    summed = _by_lane(o) * _by_value(shrink) + _by_lane(pv)
    return gl.convert_layout(summed.reshape([64, 64]), o.type.layout)


@gluon.jit
def _lane_max(s):
    return gl.max(gl.max(_by_lane(s), 1), 2)


@gluon.jit
def _maximum(lane, m, unit, MASKED: gl.constexpr):
    """(running maximum of the unscaled scores, exponent to subtract, factor of the old sums)."""
    m_new = gl.inline_asm_elementwise(
        _LAZY_MAX, "=&r,=&r,r,r,r,r,r,r", args=[lane, m, _TAU / unit], dtype=gl.float32, is_pure=False, pack=2
    )
    top = m_new * unit - _OFF
    shrink = gl.exp2((m - m_new) * unit)
    if MASKED:
        none = m_new == float("-inf")
        top = gl.where(none, 0.0, top)
        shrink = gl.where(none, 1.0, shrink)
    return m_new, top, shrink


@gluon.jit
def _exponentials(s, unit, top):
    """(probabilities times 2^OFF, their sums by lane) of half a block."""
    p4 = gl.exp2(_by_lane(s) * _by_value(unit) - _by_value(top))
    p4 = gl.inline_asm_elementwise(_PIN, _TIED, args=[p4], dtype=gl.float32, is_pure=False, pack=32)
    return _packed(p4), gl.sum(gl.sum(p4, 1), 2)


@gluon.jit
def _scores(s, scale, cap, C: gl.constexpr):
    if C.CAP:
        s4 = softcap(_by_lane(s), _by_value(scale), cap, C)
        s = gl.convert_layout(s4.reshape([64, 64]), s.type.layout)
    return s


@gluon.jit
def _qk(q, kview, stage, HALF: gl.constexpr, MMA: gl.constexpr):
    """Scores of half a block, under way."""
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    return warpgroup_mma(q, kview.index(stage * 2 + HALF).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _pv(p8, tview, stage, HALF: gl.constexpr, MMA: gl.constexpr):
    """P V of half of d, under way."""
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    return warpgroup_mma(
        p8, tview.index(stage * 2 + HALF).permute([1, 0]), zero, use_acc=False, is_async=True
    )


@gluon.jit
def _step(q, kview, tview, k_full, k_empty, t_full, t_empty, p, even, odd, shrink, m, l, kc, vc, key, last, since,
          base, scale, unit, cap, MASKED: gl.constexpr, MMA: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Scores and exponentials of the next block beside P V of the present one, which `shrink` belongs to."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ks = kc % C.STAGES
    vs = vc % C.STAGES
    p8 = _p_operand(p, A)
    mbarrier.wait(k_full.index(ks), (kc // C.STAGES) & 1)
    sa = _qk(q, kview, ks, 0, MMA)
    sb = _qk(q, kview, ks, 1, MMA)
    mbarrier.wait(t_full.index(vs), (vc // C.STAGES) & 1)
    pv = _pv(p8, tview, vs, 0, MMA)
    sa = warpgroup_mma_wait(2, deps=(sa,))
    sa = _scores(sa, scale, cap, C)
    if MASKED:
        sa = mask(sa, key, last - base, since - base, C)
    lane = _lane_max(sa)
    sb, lane = warpgroup_mma_wait(1, deps=(sb, lane))
    sb = _scores(sb, scale, cap, C)
    if MASKED:
        sb = mask(sb, key, last - base - 64, since - base - 64, C)
    m, top, following = _maximum(gl.maximum(lane, _lane_max(sb)), m, unit, MASKED)
    pa, sum_a = _exponentials(sa, unit, top)
    pv, pa = warpgroup_mma_wait(0, deps=(pv, pa))
    even = _plus(even, shrink, pv)
    pv = _pv(p8, tview, vs, 1, MMA)
    pb, sum_b = _exponentials(sb, unit, top)
    # P V reads the registers of p until here; those of sa stay out of its way too
    pv, _, pb, _ = warpgroup_mma_wait(0, deps=(pv, sa, pb, p))
    mbarrier.arrive(k_empty.index(ks), count=1)
    mbarrier.arrive(t_empty.index(vs), count=1)
    return _both(pa, pb), even, _plus(odd, shrink, pv), following, m, l * following + (sum_a + sum_b)


@gluon.jit
def _row_scale(qs_ptr, key_scale, w, b, first, tokens, keys, stride_qs_req, stride_qs_head, qs_len, WG: gl.constexpr,
               L: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Scale of each row's scores as [64, 4] of layout L, 0 from token qs_len on."""
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    token = row // C.PACK + WG * C.QT
    head = (w % C.NH) * C.PACK + row % C.PACK
    at = b.to(gl.int64) * stride_qs_req + head * stride_qs_head + first + token
    lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, L)), 0)
    live = gl.expand_dims((token < tokens) & (first + token < gl.where(keys > 0, qs_len, 0)), 1) & (lane >= 0)
    return gl.load(qs_ptr + gl.expand_dims(at, 1) + lane * 0, mask=live, other=0.0) * key_scale


@gluon.jit
def _consumer(WG: gl.constexpr, o_desc, o_ptr, qview, kview, tview, oview, obuf, q_full, q_empty, k_full, k_empty,
              t_full, t_empty, table_ptr, sinks_ptr, lse_ptr, qs_ptr, ks_ptr, vs_ptr, num_ctas, window, softmax_scale,
              cap, stride_o_tok, stride_o_head, stride_qs_req, stride_qs_head, qs_len, C: gl.constexpr):  # fmt: skip
    """64 rows of each tile; see the module docstring."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    cta = item_of(num_ctas, C)
    pdl_wait(C.PDL)
    n_work = num_work(table_ptr, C)
    cta = first_work(cta, table_ptr, n_work, num_ctas, window, C)
    key_scale = gl.load(ks_ptr) * softmax_scale
    value_scale = gl.load(vs_ptr)
    none = gl.sum(gl.sum(_by_lane(gl.full([64, 64], 0.0, gl.float32, MMA)), 1), 2)
    LANES: gl.constexpr = none.type.layout
    col = gl.arange(0, 64, COLS)
    w = cta
    it = 0
    kc = 0
    vc = 0
    row0, tokens, b, first, start, keys = tile_of(table_ptr, w, n_work, C)
    scale = _row_scale(qs_ptr, key_scale, w, b, first, tokens, keys, stride_qs_req, stride_qs_head, qs_len, WG, LANES,
                       C)  # fmt: skip
    await_tile(w, n_work, it, kc, q_full, k_full, C)
    q = qview.index(WG)
    sa = _qk(q, kview, 0, 0, MMA)
    sb = _qk(q, kview, 0, 1, MMA)
    sa, sb = warpgroup_mma_wait(0, deps=(sa, sb))
    while w < n_work:
        mbarrier.arrive(k_empty.index(kc % C.STAGES), count=1)
        kc += 1
        q = qview.index(it % 2 * 2 + WG)
        head = (w % C.NH) * C.PACK
        hi, blocks, top, _ = blocks_of(tokens, first, start, keys, window, num_ctas, C)
        last, since = seen_keys(start, first, keys, window, WG, ROWS, C)
        if C.CAP:
            unit = none + 1.0
        else:
            unit = gl.maximum(scale * LOG2E, _TINY)
        base = (hi - 1) * 128
        key_a = col
        key_b = col + 64
        if gl.maximum(gl.minimum(keys - base, 128), 0) % C.PB > 0:  # a box is shifted
            key_a = first_keys(keys, hi - 1, col, C)
            key_b = first_keys(keys, hi - 1, col + 64, C)
        sa = mask(_scores(sa, scale, cap, C), key_a, last - base, since - base, C)
        sb = mask(_scores(sb, scale, cap, C), key_b, last - base, since - base, C)
        lane = gl.maximum(_lane_max(sa), _lane_max(sb))
        m, exponent, shrink = _maximum(lane, none + float("-inf"), unit, True)
        pa, l = _exponentials(sa, unit, exponent)
        pb, sum_b = _exponentials(sb, unit, exponent)
        l += sum_b
        p = _both(pa, pb)
        even = gl.full([64, 64], 0.0, gl.float32, MMA)
        odd = gl.full([64, 64], 0.0, gl.float32, MMA)
        # A window has one loop, all its blocks masked: of three, ptxas sets what they share, such as the descriptors of
        # Q, ahead of the first only, which may be skipped (tests/compile/sass_uniform.py).
        if C.WINDOW:
            top = blocks
        for i in range(1, top):
            p, even, odd, shrink, m, l = _step(
                q, kview, tview, k_full, k_empty, t_full, t_empty, p, even, odd, shrink, m, l, kc, vc,
                col, last, since, (hi - 1 - i) * 128, scale, unit, cap, True, MMA,
                C)  # fmt: skip
            kc += 1
            vc += 1
        if not C.WINDOW:
            for i in range(top, blocks):
                p, even, odd, shrink, m, l = _step(
                    q, kview, tview, k_full, k_empty, t_full, t_empty, p, even, odd, shrink, m, l, kc, vc,
                    col, last, since, 0, scale, unit, cap, False, MMA, C)  # fmt: skip
                kc += 1
                vc += 1
        mbarrier.arrive(q_empty.index(it % 2), count=1)
        p8 = _p_operand(p, A)
        vs = vc % C.STAGES
        mbarrier.wait(t_full.index(vs), (vc // C.STAGES) & 1)
        pv = _pv(p8, tview, vs, 0, MMA)
        it += 1
        w = work_of(it, cta, num_ctas, n_work, C)
        next_row0, next_tokens, b, first, start, keys = tile_of(table_ptr, w, n_work, C)
        pv = warpgroup_mma_wait(0, deps=(pv,))
        even = _plus(even, shrink, pv)
        pv = _pv(p8, tview, vs, 1, MMA)
        await_tile(w, n_work, it, kc, q_full, k_full, C)
        q = qview.index(it % 2 * 2 + WG)
        sa = _qk(q, kview, kc % C.STAGES, 0, MMA)
        sb = _qk(q, kview, kc % C.STAGES, 1, MMA)
        scale = _row_scale(qs_ptr, key_scale, w, b, first, next_tokens, keys, stride_qs_req, stride_qs_head, qs_len, WG,
                           LANES, C)  # fmt: skip
        pv = warpgroup_mma_wait(2, deps=(pv,))
        mbarrier.arrive(t_empty.index(vs), count=1)
        vc += 1
        odd = _plus(odd, shrink, pv)
        total = gl.convert_layout(gl.sum(l, 1), ROWS)
        top_exponent = gl.convert_layout(gl.max(m * unit - _OFF, 1), ROWS)
        factor = close_row(total, top_exponent, row0, tokens, head, WG, value_scale, sinks_ptr, lse_ptr, num_ctas,
                           C)  # fmt: skip
        factor = gl.expand_dims(factor, 1)
        out = gl.join((even * factor).to(C.OUT), (odd * factor).to(C.OUT)).reshape([64, 128])
        store_tile(out, o_desc, o_ptr, oview, obuf, row0, tokens, head, stride_o_tok, stride_o_head, num_ctas, WG,
                   C)  # fmt: skip
        row0 = next_row0
        tokens = next_tokens
        sa, sb = warpgroup_mma_wait(0, deps=(sa, sb))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["requests", "rows", "capacity", "stride_ids", "num_ctas", "num_pages", "window", "softmax_scale",
                       "cap", "stride_qs_req", "stride_qs_head", "qs_len"],
    do_not_specialize_on_alignment=["lse_ptr", "table_ptr", "cu_ptr", "seq_ptr", "ids_ptr", "sinks_ptr", "qs_ptr",
                                    "ks_ptr", "vs_ptr"],
)  # fmt: skip
def _prefill_sm90_fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, table_ptr, cu_ptr, seq_ptr, ids_ptr, sinks_ptr, qs_ptr, ks_ptr,
    vs_ptr, requests, rows, capacity, stride_ids, num_ctas, num_pages, window, softmax_scale, cap, stride_o_tok,
    stride_o_head, stride_qs_req, stride_qs_head, qs_len, C: gl.constexpr,
):  # fmt: skip
    """Grid (num_ctas). As `hopper._prefill_sm90_bf16_kernel` with qs [B, HQ, qs_len], ks [1], vs [1] fp32."""
    STAGES: gl.constexpr = C.STAGES
    QSTAGES: gl.constexpr = C.QSTAGES
    qbuf = gl.allocate_shared_memory(C.T, [2 * C.QSTAGES, C.QT, C.PACK, 128], C.Q_BOX)
    kbuf = gl.allocate_shared_memory(C.T, [C.STAGES * C.NP, 1, C.PB, 1, 128], C.KV_BOX)
    vbuf = gl.allocate_shared_memory(C.T, [C.STAGES * C.NP, 1, C.PB, 1, 128], C.KV_BOX)
    tbuf = gl.allocate_shared_memory(C.T, [C.STAGES, 128, 128], C.TILE)
    obuf = gl.allocate_shared_memory(gl.bfloat16, [4, C.QT, C.PACK, 64], C.O_BOX)
    qview = qbuf._reinterpret(C.T, [2 * C.QSTAGES, 64, 128], C.TILE)
    kview = kbuf._reinterpret(C.T, [C.STAGES * 2, 64, 128], C.TILE)
    vwords = vbuf._reinterpret(gl.int16, [C.STAGES * 2, 64, 64], C.O_TILE)
    tview = tbuf._reinterpret(C.T, [C.STAGES * 2, 64, 128], C.TILE)
    twords = tbuf._reinterpret(gl.int16, [C.STAGES, 128, 64], C.O_TILE)
    oview = obuf._reinterpret(gl.bfloat16, [2, 64, 128], C.O_TILE)
    k_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    t_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    t_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [C.QSTAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [C.QSTAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
        mbarrier.init(t_full.index(i), count=1)
        mbarrier.init(t_empty.index(i), count=2)
    for i in gl.static_range(QSTAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    fence_async_shared()
    pdl_launch(C.PDL)
    if requests > 0:
        pdl_wait(C.PDL)
        place_tile(table_ptr, cu_ptr, seq_ptr, requests, rows, capacity, num_ctas, C)
        barrier()
    if C.SPLIT:
        pdl_wait(C.PDL)
        close_no_part(table_ptr, lse_ptr, num_ctas, window, C)
    gl.warp_specialize(
        [
            (_consumer, (0, o_desc, o_ptr, qview, kview, tview, oview, obuf, q_full, q_empty, k_full, k_empty,
                         t_full, t_empty, table_ptr, sinks_ptr, lse_ptr, qs_ptr, ks_ptr, vs_ptr, num_ctas, window,
                         softmax_scale, cap, stride_o_tok, stride_o_head, stride_qs_req, stride_qs_head, qs_len, C)),
            (_consumer, (1, o_desc, o_ptr, qview, kview, tview, oview, obuf, q_full, q_empty, k_full, k_empty,
                         t_full, t_empty, table_ptr, sinks_ptr, lse_ptr, qs_ptr, ks_ptr, vs_ptr, num_ctas, window,
                         softmax_scale, cap, stride_o_tok, stride_o_head, stride_qs_req, stride_qs_head, qs_len, C)),
            (_transposer, (vwords, twords, v_full, v_empty, t_full, t_empty, table_ptr, num_ctas, window, C)),
            (producer, (q_desc, k_desc, v_desc, qbuf, kbuf, vbuf, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                        table_ptr, ids_ptr, stride_ids, num_ctas, num_pages, window, C)),
        ],
        [4, 4, 1],
        [C.REGS, C.TRANSPOSER_REGS, C.PRODUCER_REGS],
    )  # fmt: skip
