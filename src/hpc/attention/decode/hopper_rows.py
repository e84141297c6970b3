"""Paged decode attention for SM90 in Gluon where a KV head has more than 16 query rows.

`hopper` has tokens on the M side of `mma.sync`: every group of 16 rows loads and converts all of K and V anew. Here 64
rows, padded, are the M side of `wgmma` (row = new token * group + head), and keys and values are operands in shared
memory as the copy engine left them, read once for all rows. Grid, bins, task map and merge are those of `hopper`.

    producer (1 warp)       K and V of each step of 128 tokens by TMA, page by page, across requests
    converter (4 warps)     FP8 only: V to f16, each element once, into a ring of its own
    consumer (4 warps)      S' = Q K'^T  |  O += P V  |  softmax of S' while O += P V runs  |  O *= shrink

Operands of 16 bits may lie along either axis, e4m3 ones along the contraction only. So K serves as it is in both
formats; V as bf16 too; e4m3 V would have to be transposed, and P rounded to e4m3, hence f16. Q stays in shared memory
for a request; the next one's travels while this one is written out.

A box of the copy engine with dead rows starts that many rows earlier in its page, and one without a live row lies
outside the cache: no thread touches V, and 0 * NaN is NaN. Live rows end up last, before them lie zeros or older rows.

e4m3 scores come from the tensor cores' sums of about 14 bits: 2e-4 RMS where scores have a deviation of 1.5. The
probabilities' 16 bits and fp32 sums are those of `hopper`.

From 65 rows on a CTA has two consumers, which share K, V and the conversion.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from hpc.attention.decode import plan
from hpc.attention.decode.hopper_common import end_of, first_work, length_of, page_ids, tiles_of
from hpc.attention.decode.hopper_merge import M_INIT, finish_rows, merge_last, refuse
from hpc.attention.decode.hopper_rows_config import Config
from hpc.common.gluon import (
    TensorDescriptor,
    barrier,
    fence_async_shared,
    mbarrier,
    pdl_launch,
    pdl_wait,
    tma_load,
)

__all__ = ["Config", "TensorDescriptor"]

_TILE = gl.constexpr(plan.TILE)
_ENTRY = gl.constexpr(plan.ENTRY_WORDS)
_LOG2E = gl.constexpr(1.4426950408889634)
_NO_KEY = gl.constexpr(1 << 30)


@gluon.jit
def _fetch(desc, buf, full, stage, pages, h, t, end, H: gl.constexpr, DB: gl.constexpr, C: gl.constexpr):
    """Start the copies of K or V of the step at tile t, their dead rows first: see the module docstring."""
    NP: gl.constexpr = C.NP
    bar = full.index(stage)
    mbarrier.expect(bar, C.STEP * H * DB * C.BYTES)
    for j in gl.static_range(NP):
        token = t * _TILE + j * C.PB
        offset = token % C.P - gl.maximum(gl.minimum(token + C.PB - end, C.PB), 0)
        for half in gl.static_range(H):
            tma_load(desc, [pages[j], offset, h, half * DB], bar, buf.index((stage * H + half) * NP + j))


@gluon.jit
def _producer(fetched, work, C: gl.constexpr):
    """One warp that walks the bin's steps and keeps STAGES of them in flight, across requests."""
    k_desc, v_desc, kbuf, vbuf, k_full, k_empty, v_full, v_empty, block_ptr, stride_block, num_pages = fetched
    seq_ptr, map_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk = work
    pid = gl.program_id(0)
    h = pid % (C.HKV * C.CTAS) % C.HKV
    g = pid // (C.HKV * C.CTAS)
    b, t, b_end, t_end, length, _ = first_work(
        map_ptr, seq_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk, g, C
    )
    lo, full = tiles_of(length, C.S, window, C.WINDOW)
    hi = gl.where(b < b_end, full, t_end)
    alive = (b < b_end) | (t_end > 0)
    next_length = length_of(seq_ptr, b + 1, batch, extra)
    end = gl.where(alive, end_of(length, hi, max_tokens), 0)
    pages = page_ids(block_ptr, stride_block, b, t, end, num_pages, C)
    stage = 0
    phase = 1
    waited = False
    while alive:
        if not waited:
            # Old tiles start before the preceding kernel ends; rows of this step's tokens only after it.
            if (not C.PREFETCH) | (t * _TILE + C.STEP > length - C.S) | (phase == 0):
                pdl_wait(C.PDL)
                waited = True
        mbarrier.wait(k_empty.index(stage), phase)
        _fetch(k_desc, kbuf, k_full, stage, pages, h, t, end, C.KH, C.DBK, C)
        mbarrier.wait(v_empty.index(stage), phase)
        _fetch(v_desc, vbuf, v_full, stage, pages, h, t, end, C.VH, C.DBV, C)
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
            end = gl.where(alive, end_of(length, hi, max_tokens), 0)
        pages = page_ids(block_ptr, stride_block, b, t, end, num_pages, C)


@gluon.jit
def _converter(converted, work, C: gl.constexpr):
    """Four warps: e4m3 V [tokens, d] to f16, exact, 64 tokens at a time: that takes few registers."""
    vview, cview, v_full, v_empty, c_full, c_empty = converted
    seq_ptr, map_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk = work
    g = gl.program_id(0) // (C.HKV * C.CTAS)
    b, t, b_end, t_end, length, _ = first_work(
        map_ptr, seq_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk, g, C
    )
    lo, full = tiles_of(length, C.S, window, C.WINDOW)
    hi = gl.where(b < b_end, full, t_end)
    alive = (b < b_end) | (t_end > 0)
    next_length = length_of(seq_ptr, b + 1, batch, extra)
    n = 0
    # Not a `for` over requests around one over steps: of an outer loop Triton 3.6 drops the variables that only the
    # bounds of an inner one depend on, and every request would have as many steps as the first.
    while alive:
        stage = n % C.STAGES
        slot = n % C.CONVERTED
        mbarrier.wait(v_full.index(stage), (n // C.STAGES) & 1)
        mbarrier.wait(c_empty.index(slot), ((n // C.CONVERTED) & 1) ^ 1)
        for half in gl.static_range(2):
            x = vview.index(stage * 2 + half).load(C.V_LOAD)
            cview.index(slot).slice(half * 64, 64).store(x.to(gl.float16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(v_empty.index(stage), count=1)
        mbarrier.arrive(c_full.index(slot), count=1)
        n += 1
        t += C.STEP // _TILE
        if t >= hi:
            b += 1
            length = next_length
            lo, full = tiles_of(length, C.S, window, C.WINDOW)
            t = lo
            hi = gl.where(b < b_end, full, t_end)
            alive = (b < b_end) | ((b == b_end) & (t_end > 0))
            next_length = length_of(seq_ptr, b + 1, batch, extra)


@gluon.jit
def _load_q(q_ptr, b, h, row0, stride_q_tok, stride_q_head, ok, C: gl.constexpr):
    """Q of a request as 16-bit words [M, QW]; zeros beyond its rows."""
    L: gl.constexpr = C.Q_LOAD
    r = gl.expand_dims(gl.arange(0, C.M, gl.SliceLayout(1, L)), 1) + row0
    w = gl.expand_dims(gl.arange(0, C.QW, gl.SliceLayout(0, L)), 0)
    base = q_ptr + (b * C.S).to(gl.int64) * stride_q_tok
    off = (r // C.G) * stride_q_tok + (h * C.G + r % C.G) * stride_q_head + w
    return gl.load(base + off, mask=(r < C.ROWS) & (w >= 0) & ok, other=0)


@gluon.jit
def _load_row_scale(qs_ptr, b, h, row0, stride_qs_tok, stride_qs_head, ok, L: gl.constexpr, C: gl.constexpr):
    """Scales of the query rows; 1 for BF16."""
    if C.FP8:
        r = gl.arange(0, C.M, L) + row0
        base = qs_ptr + (b * C.S).to(gl.int64) * stride_qs_tok
        off = (r // C.G) * stride_qs_tok + (h * C.G + r % C.G) * stride_qs_head
        return gl.load(base + off, mask=(r < C.ROWS) & ok, other=0.0)
    else:
        return gl.full([C.M], 1.0, gl.float32, L)


@gluon.jit
def _scaled(s, row_scale, cap, C: gl.constexpr):
    """Scores in log2 units, capped."""
    s = s * gl.expand_dims(row_scale, 1)
    if C.CAP:
        s = (1.0 - 2.0 / (gl.exp2(s) + 1.0)) * (cap * _LOG2E)
    return s


@gluon.jit
def _by_lane(s, C: gl.constexpr):
    """[M, STEP] as [M, STEP // 8, 4, 2]: axes 1 and 3 lie in one thread, which reduces them in four chains, not two."""
    return s.reshape([C.M, C.STEP // 8, 4, 2])


@gluon.jit
def _anew(x):
    """x, as something that the compiler has to work out anew in each turn of a loop: addresses of a request's output
    and merge, or numbers of columns, kept over all steps, would take the registers that are left."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", args=[x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _mask_scores(s, n0, length, end, row0, window, C: gl.constexpr):
    """-inf where a row must not see a key: row i of S sees keys j with limit - window <= j < limit = L - S + 1 + i.

    Columns of a box with dead rows are `_fetch`'s: its keys start `shift` columns late.
    """
    s4 = _by_lane(s, C)
    L: gl.constexpr = s4.type.layout
    block = gl.arange(0, C.STEP // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    lane = _anew(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    block = gl.expand_dims(gl.expand_dims(gl.expand_dims(block, 0), 2), 3)
    lane = gl.expand_dims(gl.expand_dims(gl.expand_dims(lane, 0), 1), 3)
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 1), 2)
    col = lane * 2 + (block * 8 + pair)
    row = gl.arange(0, C.M, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    live = gl.maximum(gl.minimum(end - n0, C.STEP), 0)
    whole = live // C.PB * C.PB
    shift = gl.where(live > whole, whole + C.PB - live, 0)
    moved = gl.where(col - shift < whole, _NO_KEY, col - shift)
    key = gl.where(col < whole, col, moved)
    limit = (row + row0) // C.G + (length - (C.S - 1)) - n0
    limit = gl.expand_dims(gl.expand_dims(gl.expand_dims(limit, 1), 2), 3)
    seen = key < gl.minimum(limit, end - n0)
    if C.WINDOW:
        seen = seen & (key >= limit - window)
    s4 = gl.where(seen, s4, float("-inf"))
    return gl.convert_layout(s4.reshape([C.M, C.STEP]), C.MMA)


@gluon.jit
def _pairs(p, C: gl.constexpr):
    """fp32 to 16 bits two at a time, nearest even: one instruction and no byte permutes."""
    if C.FP8:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", args=[p], dtype=gl.float16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", args=[p], dtype=gl.bfloat16, is_pure=True, pack=2
        )


@gluon.jit
def _softmax(s, m, l, C: gl.constexpr):
    """(probabilities, running maximum, running sum, factor of the old sums)."""
    L: gl.constexpr = gl.SliceLayout(1, C.MMA)
    top = gl.max(gl.max(gl.max(_by_lane(s, C), 1), 2), 1)
    m_new = gl.maximum(m, gl.convert_layout(top, L))
    shrink = gl.exp2(m - m_new)
    p = gl.exp2(s - gl.expand_dims(m_new, 1))
    total = gl.sum(gl.sum(gl.sum(_by_lane(p, C), 1), 2), 1)
    return p, m_new, l * shrink + gl.convert_layout(total, L), shrink


@gluon.jit
def _step(q, kview, vview, k_full, k_empty, v_full, v_empty, p, o, m, l, n, n0, clipped, end, row0, window, row_scale,
          cap, MASKED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Scores of step n beside O += P V of the one before it."""
    A: gl.constexpr = gl.DotOperandLayout(0, C.MMO, 2)
    ks = n % C.STAGES
    vs = (n - 1) % C.V_STAGES
    v_phase = ((n - 1) // C.V_STAGES) & 1
    mbarrier.wait(k_full.index(ks), (n // C.STAGES) & 1)
    zero = gl.full([C.M, C.STEP], 0.0, gl.float32, C.MMA)
    s = warpgroup_mma(q, kview.index(ks).permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(vs), v_phase)
    o = warpgroup_mma(p, vview.index(vs), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    s = _scaled(s, row_scale, cap, C)
    if MASKED:
        s = _mask_scores(s, n0, clipped, end, row0, window, C)
    p32, m, l, shrink = _softmax(s, m, l, C)
    # Complete already: the block boundary keeps ptxas from sinking the exponentials below the wait for O += P V.
    mbarrier.wait(v_full.index(vs), v_phase)
    o, p32, _ = warpgroup_mma_wait(0, deps=(o, p32, p))
    mbarrier.arrive(k_empty.index(ks), count=1)
    mbarrier.arrive(v_empty.index(vs), count=1)
    o = o * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, C.MMO)), 1)
    return gl.convert_layout(_pairs(p32, C), A), o, m, l


@gluon.jit
def _consumer(WG: gl.constexpr, read, computed, work, C: gl.constexpr):
    """A warpgroup that computes 64 rows; see the module docstring."""
    qview, qwords, kview, vview, k_full, k_empty, v_full, v_empty = read
    (
        q_ptr, qs_ptr, ks_ptr, vs_ptr, sinks_ptr, o_ptr, lse_ptr, part_ptr, ml_ptr, count_ptr, n_bins, scale, cap,
        num_q_heads, stride_q_tok, stride_q_head, stride_qs_tok, stride_qs_head, stride_o_tok, stride_o_head,
    ) = computed  # fmt: skip
    seq_ptr, map_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk = work
    A: gl.constexpr = gl.DotOperandLayout(0, C.MMO, 2)
    L: gl.constexpr = gl.SliceLayout(1, C.MMA)
    pid = gl.program_id(0)
    h = pid % (C.HKV * C.CTAS) % C.HKV
    g = pid // (C.HKV * C.CTAS)
    block = pid % (C.HKV * C.CTAS) // C.HKV * C.CONSUMERS + WG
    hr = block * C.HKV + h
    row0 = block * C.M
    b0, t, b_end, t_end, length, ours = first_work(
        map_ptr, seq_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk, g, C
    )
    segments = b_end - b0 + gl.where(t_end > 0, 1, 0)
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
    if C.FP8:
        factor = factor * gl.load(ks_ptr)
    if C.CAP:
        factor = factor * 2.0 / cap
    q = qview.index(WG)
    n = 0
    q_next = _load_q(q_ptr, b0, h, row0, stride_q_tok, stride_q_head, segments > 0, C)
    q_scale = _load_row_scale(qs_ptr, b0, h, row0, stride_qs_tok, stride_qs_head, segments > 0, L, C)
    for i in range(segments):
        b = b0 + i
        qwords.index(WG).store(q_next)
        row_scale = q_scale * factor
        fence_async_shared()
        barrier()
        lo, full = tiles_of(length, C.S, window, C.WINDOW)
        t_hi = gl.where(b < b_end, full, t_end)
        clipped = gl.minimum(length, max_tokens)
        end = end_of(length, t_hi, max_tokens)
        steps = (t_hi - t + C.STEP // _TILE - 1) // (C.STEP // _TILE)
        n0 = t * _TILE
        # Steps that every row sees all of, once past a window's edge, which lies in the first step of a chunk.
        plain = gl.minimum(gl.maximum((gl.minimum(clipped - (C.S - 1), end) - n0) // C.STEP, 1), steps)

        mbarrier.wait(k_full.index(n % C.STAGES), (n // C.STAGES) & 1)
        zero = gl.full([C.M, C.STEP], 0.0, gl.float32, C.MMA)
        s = warpgroup_mma(q, kview.index(n % C.STAGES).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(n % C.STAGES), count=1)
        s = _mask_scores(_scaled(s, row_scale, cap, C), n0, clipped, end, row0, window, C)
        m = gl.full([C.M], M_INIT, gl.float32, L)
        l = gl.full([C.M], 0.0, gl.float32, L)
        p32, m, l, _ = _softmax(s, m, l, C)
        p = gl.convert_layout(_pairs(p32, C), A)
        o = gl.full([C.M, C.DV], 0.0, gl.float32, C.MMO)
        n += 1
        for j in range(1, plain):
            p, o, m, l = _step(q, kview, vview, k_full, k_empty, v_full, v_empty, p, o, m, l, n, n0 + j * C.STEP,
                               clipped, end, row0, window, row_scale, cap, False, C)  # fmt: skip
            n += 1
        for j in range(plain, steps):
            p, o, m, l = _step(q, kview, vview, k_full, k_empty, v_full, v_empty, p, o, m, l, n, n0 + j * C.STEP,
                               clipped, end, row0, window, row_scale, cap, True, C)  # fmt: skip
            n += 1
        v_last = (n - 1) % C.V_STAGES
        mbarrier.wait(v_full.index(v_last), ((n - 1) // C.V_STAGES) & 1)
        o = warpgroup_mma(p, vview.index(v_last), o, is_async=True)
        o, _ = warpgroup_mma_wait(0, deps=(o, p))
        mbarrier.arrive(v_empty.index(v_last), count=1)

        # The next request's queries travel while this one is written out.
        more = i + 1 < segments
        row = _anew(row0)
        q_next = _load_q(q_ptr, b + 1, h, row, stride_q_tok, stride_q_head, more, C)
        q_scale = _load_row_scale(qs_ptr, b + 1, h, row, stride_qs_tok, stride_qs_head, more, L, C)
        vs = 1.0
        if C.FP8:
            vs = gl.load(vs_ptr)
        whole = (t == lo) & (t_hi == full)
        if C.STATIC:
            slot = g
        else:
            slot = 2 * g + gl.where(t == lo, 1, 0)
        finish_rows(o, m, l, b, h, row, whole, slot, o_ptr, lse_ptr, part_ptr, ml_ptr, vs, sinks_ptr, stride_o_tok,
                    stride_o_head, num_q_heads, C)  # fmt: skip
        if C.FUSED:
            if not whole:
                begins = t == lo
                g0 = gl.where(begins, g, first_g0)
                n_chunks = gl.where(begins, last_chunks, first_chunks)
                merge_last(g - g0, g0, n_chunks, b, h, hr, _anew(row0), n_bins, o_ptr, lse_ptr, part_ptr, ml_ptr,
                           count_ptr, vs, sinks_ptr, stride_o_tok, stride_o_head, num_q_heads, C)  # fmt: skip
        length = next_length
        next_length = length_of(seq_ptr, b + 2, batch, extra)
        lo, full = tiles_of(length, C.S, window, C.WINDOW)
        t = lo


@gluon.jit(
    do_not_specialize=["map_offset", "count_offset", "extra", "max_tokens", "batch", "n_bins", "sig", "window",
                       "stride_block", "num_q_heads", "stride_qs_tok", "stride_qs_head", "num_splits", "min_chunk",
                       "num_pages"],
    do_not_specialize_on_alignment=["block_ptr", "seq_ptr", "task_map_ptr", "qs_ptr", "ks_ptr", "vs_ptr", "sinks_ptr",
                                    "lse_ptr"],
)  # fmt: skip
def _decode_rows_sm90_kernel(
    q_ptr, k_desc, v_desc, block_ptr, seq_ptr, task_map_ptr, qs_ptr, ks_ptr, vs_ptr, sinks_ptr,
    o_ptr, lse_ptr, ml_ptr, map_offset, count_offset, part_offset,
    batch, extra, max_tokens, n_bins, sig, window, scale, cap, num_splits, min_chunk, num_q_heads,
    stride_block, stride_q_tok, stride_q_head, stride_qs_tok, stride_qs_head, stride_o_tok, stride_o_head, num_pages,
    C: gl.constexpr,
):  # fmt: skip
    """Arguments as `hopper._decode_sm90_kernel`; num_pages: of the caches, a page number outside of them."""
    task_map_ptr = task_map_ptr.to(gl.pointer_type(gl.int32))
    map_ptr = task_map_ptr + map_offset
    count_ptr = task_map_ptr + count_offset
    part_ptr = ml_ptr + part_offset
    q_ptr = q_ptr.to(gl.pointer_type(C.WORD))
    STAGES: gl.constexpr = C.STAGES
    CONVERTED: gl.constexpr = C.CONVERTED
    qview = gl.allocate_shared_memory(C.KV, [C.CONSUMERS, C.M, C.D], C.K_TILE)
    kbuf = gl.allocate_shared_memory(C.KV, [C.STAGES * C.KH * C.NP, 1, C.PB, 1, C.DBK], C.K_BOX)
    vbuf = gl.allocate_shared_memory(C.KV, [C.STAGES * C.VH * C.NP, 1, C.PB, 1, C.DBV], C.V_BOX)
    qwords = qview._reinterpret(C.WORD, [C.CONSUMERS, C.M, C.QW], C.Q_WORDS)
    kview = kbuf._reinterpret(C.KV, [C.STAGES, C.STEP, C.D], C.K_TILE)
    k_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=C.CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1 if C.FP8 else C.CONSUMERS)
    work = (seq_ptr, map_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk)
    fetched = (k_desc, v_desc, kbuf, vbuf, k_full, k_empty, v_full, v_empty, block_ptr, stride_block,
               num_pages)  # fmt: skip
    computed = (q_ptr, qs_ptr, ks_ptr, vs_ptr, sinks_ptr, o_ptr, lse_ptr, part_ptr, ml_ptr, count_ptr, n_bins, scale,
                cap, num_q_heads, stride_q_tok, stride_q_head, stride_qs_tok, stride_qs_head, stride_o_tok,
                stride_o_head)  # fmt: skip
    if C.FP8:
        vbytes = vbuf._reinterpret(C.KV, [C.STAGES * 2, C.STEP // 2, C.DV], C.V_TILE)
        cview = gl.allocate_shared_memory(gl.float16, [C.CONVERTED, C.STEP, C.DV], C.C_TILE)
        c_full = gl.allocate_shared_memory(gl.int64, [C.CONVERTED, 1], mbarrier.MBarrierLayout())
        c_empty = gl.allocate_shared_memory(gl.int64, [C.CONVERTED, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(CONVERTED):
            mbarrier.init(c_full.index(i), count=1)
            mbarrier.init(c_empty.index(i), count=C.CONSUMERS)
        fence_async_shared()
        pdl_launch(C.PDL)
        read = (qview, qwords, kview, cview, k_full, k_empty, c_full, c_empty)
        converted = (vbytes, cview, v_full, v_empty, c_full, c_empty)
        if C.CONSUMERS == 2:
            gl.warp_specialize(
                [
                    (_consumer, (0, read, computed, work, C)),
                    (_consumer, (1, read, computed, work, C)),
                    (_converter, (converted, work, C)),
                    (_producer, (fetched, work, C)),
                ],
                [4, 4, 1],
                [C.CONSUMER_REGS, C.CONVERTER_REGS, C.PRODUCER_REGS],
            )
        else:
            gl.warp_specialize(
                [
                    (_consumer, (0, read, computed, work, C)),
                    (_converter, (converted, work, C)),
                    (_producer, (fetched, work, C)),
                ],
                [4, 1],
                [C.CONVERTER_REGS, C.PRODUCER_REGS],
            )
    else:
        vview = vbuf._reinterpret(C.KV, [C.STAGES, C.STEP, C.DV], C.V_TILE)
        fence_async_shared()
        pdl_launch(C.PDL)
        read = (qview, qwords, kview, vview, k_full, k_empty, v_full, v_empty)
        if C.CONSUMERS == 2:
            gl.warp_specialize(
                [
                    (_consumer, (0, read, computed, work, C)),
                    (_consumer, (1, read, computed, work, C)),
                    (_producer, (fetched, work, C)),
                ],
                [4, 1],
                [C.CONSUMER_REGS, C.PRODUCER_REGS],
            )
        else:
            gl.warp_specialize(
                [(_consumer, (0, read, computed, work, C)), (_producer, (fetched, work, C))],
                [1],
                [C.PRODUCER_REGS],
            )
