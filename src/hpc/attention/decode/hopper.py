"""Paged decode attention for SM90 in Gluon.

Grid: (bins * KV_HEADS * ROW_BLOCKS), kv head and row block fastest, so that all heads of the same tokens run side by
side. One CTA drains its bin of 64-token tiles in order, across request boundaries, without emptying the pipeline.

Per tile, with tokens on the M side of `mma.sync` m16n8k16 and query rows on the N side (a group of 8 heads needs no
padding), for the tokens of each of WT warp groups:

    S[tok, r]  = sum_d K[tok, d] Q[r, d]            K by ldmatrix, Q^T held in registers for the whole request
    m', l', a  = online softmax in base 2 over the warp's own tokens: no cross-warp traffic in the loop
    O[d, r]    = a O[d, r] + sum_tok V[tok, d] P[tok, r]     V by ldmatrix.trans, P 16-bit in registers

Warp groups merge (m, l, O) once at the end of a request. e4m3 K and V are viewed in shared memory as int16 pairs, and
`cvt` makes exact f16 of them. For V a `prmt` first brings neighbours along the tokens together: even elements of the
pairs make one operand, odd ones another. For K the order along d is free as long as Q has the same: no `prmt`.

K and V arrive by TMA from the cache as it is, rank 4 [page, token, head, d] with any strides, in boxes of
min(P, 64) tokens by 128 bytes. TMA clips coordinates, so no page id can reach outside the cache.

Tiles without this step's tokens are fetched before `griddepcontrol.wait`: the preceding kernels of a step write the
last S rows of a request, never older pages. Hence the rule of this operator: KV rows older than the last S tokens,
the block table, the lengths and the task map must not be written by a kernel that releases its dependents early.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hpc.attention.decode import plan
from hpc.attention.decode.hopper_common import end_of, first_work, length_of, page_ids, tiles_of
from hpc.attention.decode.hopper_config import Config
from hpc.attention.decode.hopper_merge import M_INIT, finish, merge_last, refuse
from hpc.common.gluon import (
    TensorDescriptor,
    barrier,
    fence_async_shared,
    mbarrier,
    mma_v2,
    pdl_launch,
    pdl_wait,
    split_e4m3_halves,
    split_e4m3_pairs,
    tma_load,
)

__all__ = ["Config", "TensorDescriptor"]

_TILE = gl.constexpr(plan.TILE)
_ENTRY = gl.constexpr(plan.ENTRY_WORDS)
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _fetch(k_desc, v_desc, kbuf, vbuf, bar, stage, pages, h, t, C: gl.constexpr):
    """Start the copies of the step at tile t into `stage`. Boxes without live tokens read page 0; they are masked."""
    NP: gl.constexpr = C.NP
    KH: gl.constexpr = C.KH
    VH: gl.constexpr = C.VH
    mbarrier.expect(bar, NP * C.PB * (KH * C.DBK + VH * C.DBV) * C.BYTES)
    for j in gl.static_range(NP):
        offset = (t * _TILE + j * C.PB) % C.P
        for half in gl.static_range(KH):
            tma_load(
                k_desc, [pages[j], offset, h, half * C.DBK], bar, kbuf.index((stage * KH + half) * NP + j)
            )
        for half in gl.static_range(VH):
            tma_load(
                v_desc, [pages[j], offset, h, half * C.DBV], bar, vbuf.index((stage * VH + half) * NP + j)
            )


@gluon.jit
def _producer(k_desc, v_desc, kbuf, vbuf, full_bars, empty_bars, block_ptr, seq_ptr, map_ptr, batch, extra, max_tokens,
              sig, window, num_splits, min_chunk, stride_block, C: gl.constexpr):  # fmt: skip
    """One warp that walks the bin's steps and keeps STAGES of them in flight, across requests."""
    pid = gl.program_id(0)
    h = pid % (C.HKV * C.RB) % C.HKV
    g = pid // (C.HKV * C.RB)
    b, t, b_end, t_end, length, _ = first_work(
        map_ptr, seq_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk, g, C
    )
    lo, full = tiles_of(length, C.S, window, C.WINDOW)
    hi = gl.where(b < b_end, full, t_end)
    alive = (b < b_end) | (t_end > 0)
    next_length = length_of(seq_ptr, b + 1, batch, extra)
    pages = page_ids(block_ptr, stride_block, b, t, gl.where(alive, end_of(length, hi, max_tokens), 0), 0, C)
    stage = 0
    phase = 1
    waited = False
    while alive:
        if not waited:
            # Old tiles start before the preceding kernel ends; rows of this step's tokens only after it.
            if (not C.PREFETCH) | (t * _TILE + C.STEP > length - C.S) | (phase == 0):
                pdl_wait(C.PDL)
                waited = True
        mbarrier.wait(empty_bars.index(stage), phase)
        _fetch(k_desc, v_desc, kbuf, vbuf, full_bars.index(stage), stage, pages, h, t, C)
        stage += 1
        if stage == C.STAGES:
            stage = 0
            phase ^= 1
        t += C.STEP // _TILE
        if t >= hi:
            b += 1
            length = next_length
            lo, full = tiles_of(length, C.S, window, C.WINDOW)
            t = lo
            hi = gl.where(b < b_end, full, t_end)
            alive = (b < b_end) | ((b == b_end) & (t_end > 0))
            next_length = length_of(seq_ptr, b + 1, batch, extra)
        pages = page_ids(
            block_ptr, stride_block, b, t, gl.where(alive, end_of(length, hi, max_tokens), 0), 0, C
        )


@gluon.jit
def _load_q(q_ptr, qs_ptr, b, h, row0, stride_q_tok, stride_q_head, stride_qs_tok, stride_qs_head, ok,
            LB: gl.constexpr, LR: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Q^T as B operands, one [WT, DP, R] piece for each 128-byte half of a row (e4m3: int16 pairs), and its scales."""
    KH: gl.constexpr = C.KH
    d = gl.expand_dims(gl.expand_dims(gl.arange(0, C.DPK, gl.SliceLayout(0, gl.SliceLayout(2, LB))), 0), 2)
    r = (
        gl.expand_dims(gl.expand_dims(gl.arange(0, C.R, gl.SliceLayout(0, gl.SliceLayout(1, LB))), 0), 1)
        + row0
    )
    w = gl.expand_dims(gl.expand_dims(gl.arange(0, C.WT, gl.SliceLayout(1, gl.SliceLayout(2, LB))), 1), 2)
    base = q_ptr + (b * C.S).to(gl.int64) * stride_q_tok
    off = (r // C.G) * stride_q_tok + (h * C.G + r % C.G) * stride_q_head + d + w * 0
    mask = (r < C.ROWS) & (off >= 0) & ok
    pieces = ()
    for half in gl.static_range(KH):
        pieces = pieces + (gl.load(base + off + half * C.DPK, mask=mask, other=0),)
    if C.FP8:
        rr = gl.expand_dims(gl.arange(0, C.R, gl.SliceLayout(0, LR)), 0) + row0
        ww = gl.expand_dims(gl.arange(0, C.WT, gl.SliceLayout(1, LR)), 1)
        qs_base = qs_ptr + (b * C.S).to(gl.int64) * stride_qs_tok
        qs_off = (rr // C.G) * stride_qs_tok + (h * C.G + rr % C.G) * stride_qs_head + ww * 0
        scale = gl.load(qs_base + qs_off, mask=(rr < C.ROWS) & (ww >= 0) & ok, other=0.0)
    else:
        scale = gl.full([C.WT, C.R], 1.0, gl.float32, LR)
    return pieces, scale


@gluon.jit
def _scores(kview, stage, q, LA: gl.constexpr, MMA: gl.constexpr, C: gl.constexpr):
    """S = K Q^T for one step, [WT, STEP // WT, R], in two chains of products: half the latency of one."""
    KH: gl.constexpr = C.KH
    s0 = gl.full([C.WT, C.STEP // C.WT, C.R], 0.0, gl.float32, MMA)
    s1 = gl.full([C.WT, C.STEP // C.WT, C.R], 0.0, gl.float32, MMA)
    for half in gl.static_range(KH):
        k = kview.index(stage * KH + half).load(LA)
        if C.FP8:
            k0, k1 = split_e4m3_halves(k)
            s0 = mma_v2(k0, q[2 * half], s0)
            s1 = mma_v2(k1, q[2 * half + 1], s1)
        else:
            if half % 2 == 0:
                s0 = mma_v2(k, q[half], s0)
            else:
                s1 = mma_v2(k, q[half], s1)
    return s0 + s1


@gluon.jit
def _split_q(pieces, C: gl.constexpr):
    """e4m3 pairs to two f16 operands each, as `_scores` splits K; BF16 pieces as they are."""
    KH: gl.constexpr = C.KH
    out = ()
    for half in gl.static_range(KH):
        if C.FP8:
            out = out + split_e4m3_halves(pieces[half])
        else:
            out = out + (pieces[half],)
    return out


@gluon.jit
def _zero_dead(v, live, LA: gl.constexpr, C: gl.constexpr):
    """A V^T operand [WT, DPV, STEP // WT] with tokens from `live` on zeroed: whatever they hold, 0 * V must be 0."""
    tok = gl.expand_dims(
        gl.expand_dims(gl.arange(0, C.STEP // C.WT, gl.SliceLayout(0, gl.SliceLayout(1, LA))), 0), 1
    )
    grp = gl.expand_dims(gl.expand_dims(gl.arange(0, C.WT, gl.SliceLayout(1, gl.SliceLayout(2, LA))), 1), 2)
    return gl.where(tok + grp * (C.STEP // C.WT) < live, v, gl.zeros_like(v))


@gluon.jit
def _mask_scores(s, n0, length, end, row0, window, MMA: gl.constexpr, C: gl.constexpr):
    """-inf where a row must not see a key: row i of S sees keys j with limit - window <= j < limit = L - S + 1 + i."""
    tok = gl.expand_dims(
        gl.expand_dims(gl.arange(0, C.STEP // C.WT, gl.SliceLayout(0, gl.SliceLayout(2, MMA))), 0), 2
    )
    grp = gl.expand_dims(gl.expand_dims(gl.arange(0, C.WT, gl.SliceLayout(1, gl.SliceLayout(2, MMA))), 1), 2)
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, C.R, gl.SliceLayout(0, gl.SliceLayout(1, MMA))), 0), 1)
    key = tok + grp * (C.STEP // C.WT) + n0
    limit = (row + row0) // C.G + (length - (C.S - 1))
    seen = key < gl.minimum(limit, end)
    if C.WINDOW:
        seen = seen & (key >= limit - window)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _consumer(kview, vview, full_bars, empty_bars, q_ptr, seq_ptr, map_ptr, qs_ptr, ks_ptr, vs_ptr, sinks_ptr,
              o_ptr, lse_ptr, part_ptr, ml_ptr, count_ptr, batch, extra, max_tokens, n_bins, sig, window, scale, cap,
              num_splits, min_chunk, num_q_heads, stride_q_tok, stride_q_head, stride_qs_tok, stride_qs_head,
              stride_o_tok, stride_o_head, C: gl.constexpr):  # fmt: skip
    """The warps that compute; see the module docstring."""
    VH: gl.constexpr = C.VH
    NV: gl.constexpr = C.NV
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [C.WT, 1, C.WR], instr_shape=[1, 16, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LR: gl.constexpr = gl.SliceLayout(1, MMA)
    pid = gl.program_id(0)
    hr = pid % (C.HKV * C.RB)
    g = pid // (C.HKV * C.RB)
    h = hr % C.HKV
    row0 = (hr // C.HKV) * C.R
    b0, t, b_end, t_end, length, ours = first_work(
        map_ptr, seq_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk, g, C
    )
    num_segments = b_end - b0 + gl.where(t_end > 0, 1, 0)
    next_length = length_of(seq_ptr, b0 + 1, batch, extra)
    # Chunks of the request that this bin begins in, and of the one it leaves unfinished.
    if C.STATIC:
        first_g0, first_chunks = g, 0
        last_chunks = 0
    else:
        first_g0 = gl.load(map_ptr + g * _ENTRY + 6)
        first_chunks = gl.load(map_ptr + g * _ENTRY + 7)
        last_chunks = gl.load(map_ptr + (g + 1) * _ENTRY + 7, mask=g + 1 < n_bins, other=0)
    pdl_wait(C.PDL)
    if not ours:
        refuse(g, n_bins, batch, h, row0, o_ptr, lse_ptr, stride_o_tok, stride_o_head, num_q_heads, C)

    factor = scale * _LOG2E
    vs = 1.0
    if C.FP8:
        factor = factor * gl.load(ks_ptr)
        vs = gl.load(vs_ptr)
    if C.CAP:
        factor = factor * 2.0 / cap
    stage = 0
    phase = 0
    q_raw, q_scale = _load_q(q_ptr, qs_ptr, b0, h, row0, stride_q_tok, stride_q_head, stride_qs_tok, stride_qs_head,
                             num_segments > 0, LB, LR, C)  # fmt: skip
    for i in range(num_segments):
        b = b0 + i
        q = _split_q(q_raw, C)
        row_scale = q_scale * factor
        # The next request's operands travel while this one is worked on.
        q_raw, q_scale = _load_q(q_ptr, qs_ptr, b + 1, h, row0, stride_q_tok, stride_q_head, stride_qs_tok,
                                 stride_qs_head, i + 1 < num_segments, LB, LR, C)  # fmt: skip
        lo, full = tiles_of(length, C.S, window, C.WINDOW)
        t_hi = gl.where(b < b_end, full, t_end)
        clipped = gl.minimum(length, max_tokens)
        end = end_of(length, t_hi, max_tokens)
        m = gl.full([C.WT, C.R], M_INIT, gl.float32, LR)
        l = gl.full([C.WT, C.STEP // C.WT, C.R], 0.0, gl.float32, MMA)  # summed over tokens at the end
        acc = ()
        for piece in gl.static_range(NV):
            acc = acc + (gl.full([C.WT, C.DPV, C.R], 0.0, gl.float32, MMA),)
        first_tile = t
        for tile in range(first_tile, t_hi, C.STEP // _TILE):
            mbarrier.wait(full_bars.index(stage), phase)
            n0 = tile * _TILE
            s = _scores(kview, stage, q, LA, MMA, C)
            v = ()
            if not C.LATE_V:
                for half in gl.static_range(VH):
                    v = v + (vview.index(stage * VH + half).permute([0, 2, 1]).load(LA),)
                if n0 + C.STEP > end:
                    # The barrier keeps this a branch: as selects it would cost two instructions a register a tile.
                    barrier()
                    kept = ()
                    for half in gl.static_range(VH):
                        kept = kept + (_zero_dead(v[half], end - n0, LA, C),)
                    v = kept
            s = s * gl.expand_dims(row_scale, 1)
            if C.CAP:
                s = (1.0 - 2.0 / (gl.exp2(s) + 1.0)) * (cap * _LOG2E)
            edge = n0 + C.STEP > gl.minimum(clipped - (C.S - 1), end)
            if C.WINDOW:
                edge = edge | (n0 < length - window)
            if edge:
                s = _mask_scores(s, n0, clipped, end, row0, window, MMA, C)
            m_new = gl.maximum(m, gl.max(s, 1))
            alpha = gl.expand_dims(gl.exp2(m - m_new), 1)
            p = gl.exp2(s - gl.expand_dims(m_new, 1))
            l = l * alpha + p
            m = m_new
            p16 = gl.convert_layout(p.to(C.HALF), LB)
            new = ()
            for half in gl.static_range(VH):
                if C.LATE_V:
                    raw = vview.index(stage * VH + half).permute([0, 2, 1]).load(LA)
                    v = v + (_zero_dead(raw, end - n0, LA, C),)
                if C.FP8:
                    v_even, v_odd = split_e4m3_pairs(v[half])
                    new = new + (
                        mma_v2(v_even, p16, acc[2 * half] * alpha),
                        mma_v2(v_odd, p16, acc[2 * half + 1] * alpha),
                    )
                else:
                    new = new + (mma_v2(v[half], p16, acc[half] * alpha),)
            acc = new
            # Not before every warp has used what it loaded: a barrier does not wait for another warp's `ldmatrix` under
            # way, and the next tile's TMA may overtake it. Freed after the loads, 24 to 64 rows gave wrong elements in
            # nearly every run; the wait costs at most 0.5 % of the time (8/1, eight distributions, both formats).
            mbarrier.arrive(empty_bars.index(stage), count=1)
            stage += 1
            if stage == C.STAGES:
                stage = 0
                phase ^= 1
        if C.STATIC:
            whole = (first_tile == lo) & (t_hi == full)
            slot = g
        else:
            whole = (first_tile == lo) & (t_hi == full)
            slot = 2 * g + gl.where(first_tile == lo, 1, 0)
        finish(acc, m, gl.sum(l, 1), b, h, row0, whole, slot, o_ptr, lse_ptr, part_ptr, ml_ptr, vs, sinks_ptr,
               stride_o_tok, stride_o_head, num_q_heads, C)  # fmt: skip
        if C.FUSED:
            if not whole:
                begins = first_tile == lo
                g0 = gl.where(begins, g, first_g0)
                n_chunks = gl.where(begins, last_chunks, first_chunks)
                merge_last(g - g0, g0, n_chunks, b, h, hr, row0, n_bins, o_ptr, lse_ptr, part_ptr, ml_ptr, count_ptr,
                            vs, sinks_ptr, stride_o_tok, stride_o_head, num_q_heads, C)  # fmt: skip
        length = next_length
        next_length = length_of(seq_ptr, b + 2, batch, extra)
        lo, full = tiles_of(length, C.S, window, C.WINDOW)
        t = lo


@gluon.jit(
    do_not_specialize=["map_offset", "count_offset", "extra", "max_tokens", "batch", "n_bins", "sig", "window",
                       "stride_block", "num_q_heads", "stride_qs_tok", "stride_qs_head", "num_splits", "min_chunk"],
    do_not_specialize_on_alignment=["block_ptr", "seq_ptr", "task_map_ptr", "qs_ptr", "ks_ptr", "vs_ptr", "sinks_ptr",
                                    "lse_ptr"],
)  # fmt: skip
def _decode_sm90_kernel(
    q_ptr, k_desc, v_desc, block_ptr, seq_ptr, task_map_ptr, qs_ptr, ks_ptr, vs_ptr, sinks_ptr,
    o_ptr, lse_ptr, ml_ptr, map_offset, count_offset, part_offset,
    batch, extra, max_tokens, n_bins, sig, window, scale, cap, num_splits, min_chunk, num_q_heads,
    stride_block, stride_q_tok, stride_q_head, stride_qs_tok, stride_qs_head, stride_o_tok, stride_o_head,
    C: gl.constexpr,
):  # fmt: skip
    """Drain one bin (or, static, one chunk of one request). See the module docstring for formulas and grid.

    Query strides count 16-bit words (e4m3: pairs); k_desc, v_desc are rank-4 TMA descriptors of boxes [1, PB, 1, DB].
    `extra` is added to every length; lengths are clipped to max_tokens = max_pages * page_size. `scale` is the softmax
    scale. The task map's bins start at word map_offset, its counters (zero on entry and on exit) at count_offset.
    ml_ptr [slots, HKV, S*G, 2] fp32 is followed, part_offset words on, by the partials [slots, HKV, S*G, DV].
    """
    task_map_ptr = task_map_ptr.to(gl.pointer_type(gl.int32))
    map_ptr = task_map_ptr + map_offset
    count_ptr = task_map_ptr + count_offset
    part_ptr = ml_ptr + part_offset
    q_ptr = q_ptr.to(gl.pointer_type(C.WORD))
    STAGES: gl.constexpr = C.STAGES
    kbuf = gl.allocate_shared_memory(C.KV, [C.STAGES * C.KH * C.NP, 1, C.PB, 1, C.DBK], C.K_BOX)
    vbuf = gl.allocate_shared_memory(C.KV, [C.STAGES * C.VH * C.NP, 1, C.PB, 1, C.DBV], C.V_BOX)
    kview = kbuf._reinterpret(C.WORD, [C.STAGES * C.KH, C.WT, C.STEP // C.WT, C.DPK], C.K_TILE)
    vview = vbuf._reinterpret(C.WORD, [C.STAGES * C.VH, C.WT, C.STEP // C.WT, C.DPV], C.V_TILE)
    full_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(i), count=1)
        mbarrier.init(empty_bars.index(i), count=1)
    fence_async_shared()
    pdl_launch(C.PDL)
    gl.warp_specialize(
        [
            (_consumer, (kview, vview, full_bars, empty_bars, q_ptr, seq_ptr, map_ptr, qs_ptr, ks_ptr, vs_ptr,
                         sinks_ptr, o_ptr, lse_ptr, part_ptr, ml_ptr, count_ptr, batch, extra, max_tokens, n_bins,
                         sig, window, scale, cap, num_splits, min_chunk, num_q_heads, stride_q_tok, stride_q_head,
                         stride_qs_tok, stride_qs_head, stride_o_tok, stride_o_head, C)),
            (_producer, (k_desc, v_desc, kbuf, vbuf, full_bars, empty_bars, block_ptr, seq_ptr, map_ptr, batch, extra,
                         max_tokens, sig, window, num_splits, min_chunk, stride_block, C)),
        ],
        [1],
        [C.PRODUCER_REGS],
    )  # fmt: skip
