"""Prefill attention for SM90 in Gluon, BF16.

Grid: as many CTAs as multiprocessors, each walks its share of (tile, head block) pairs, longest first, heads innermost,
so that CTAs side by side read the same keys. Three roles:

    producer (1 warp)     Q of a tile and its blocks of 128 keys by TMA, page by page, K one block ahead of V
    consumers (2 x 4)     64 rows each, row = token * PACK + head; from the last block to the first:
                          S' = Q K'^T  |  O += P V  |  softmax of S' while O += P V runs  |  O *= shrink

so the tensor cores work on O += P V while the exponentials of the next block are taken. Masks are applied in the blocks
on the diagonal, at the window's edge and at the end of the keys only. With `OVERLAP` a tile's end, from its last
O += P V to its store, runs beside the first Q K'^T of the next tile, whose Q is in a second buffer.

ptxas would sink the exponentials below the wait for O += P V; the second wait on a barrier already complete is a block
boundary that keeps them above it.
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
from hpc.attention.prefill.hopper_config import Config
from hpc.common.gluon import TensorDescriptor, barrier, fence_async_shared, mbarrier, pdl_launch, pdl_wait

__all__ = ["Config", "TensorDescriptor"]


@gluon.jit
def _bf16_pairs(x):
    """fp32 to bf16 two at a time, nearest even: one instruction and no byte permutes."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", args=[x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _lane_sum(p, C: gl.constexpr):
    """[64, BN] to [64, 4]: each lane sums its own columns, no shuffles."""
    return gl.sum(gl.sum(p.reshape([64, C.BN // 8, 4, 2]), 1), 2)


@gluon.jit
def _softmax(s, m, l, scale, MASKED: gl.constexpr, C: gl.constexpr):
    """(probabilities, running maximum of the unscaled scores, lane sums, factor of the old sums)."""
    m_new = gl.maximum(m, gl.max(s, 1))
    top = m_new * scale
    if MASKED:
        top = gl.where(m_new == float("-inf"), 0.0, top)
    shrink = gl.exp2(m * scale - top)
    p = gl.exp2(s * scale - gl.expand_dims(top, 1))
    by_lane = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout)), 1)
    return p, m_new, l * by_lane + _lane_sum(p, C), shrink


@gluon.jit
def _scores(s, scale, cap, C: gl.constexpr):
    if C.CAP:
        s = softcap(s, scale, cap, C)
    return s


@gluon.jit
def _step(q, kview, vview, k_full, k_empty, v_full, v_empty, p, o, m, l, kc, vc, key, last, since, base,
          scale, unit, cap,
          masked, MMA: gl.constexpr, MMO: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Scores of the next block beside O += P V of the present one; `masked` is a number of the run with one loop."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMO, 2)
    ks = kc % C.STAGES
    vs = vc % C.STAGES
    mbarrier.wait(k_full.index(ks), (kc // C.STAGES) & 1)
    zero = gl.full([64, C.BN], 0.0, gl.float32, MMA)
    s = warpgroup_mma(q, kview.index(ks).permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(vs), (vc // C.STAGES) & 1)
    o = warpgroup_mma(p, vview.index(vs), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    s = _scores(s, scale, cap, C)
    if masked:
        s = mask(s, key, last - base, since - base, C)
    p32, m, l, shrink = _softmax(s, m, l, unit, True if C.ONE_LOOP else masked, C)
    mbarrier.wait(v_full.index(vs), (vc // C.STAGES) & 1)  # complete already: see the module docstring
    o, p32 = warpgroup_mma_wait(0, deps=(o, p32))
    mbarrier.arrive(k_empty.index(ks), count=1)
    mbarrier.arrive(v_empty.index(vs), count=1)
    o = o * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, o.type.layout)), 1)
    return gl.convert_layout(_bf16_pairs(p32), A), o, m, l


@gluon.jit
def _consumer(WG: gl.constexpr, o_desc, o_ptr, qview, kview, vview, oview, obuf, q_full, q_empty, k_full, k_empty,
              v_full, v_empty, table_ptr, sinks_ptr, lse_ptr, num_ctas, window, softmax_scale, cap, stride_o_tok,
              stride_o_head, C: gl.constexpr):  # fmt: skip
    """64 rows of each tile; see the module docstring."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    MMO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMO, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    cta = item_of(num_ctas, C)
    pdl_wait(C.PDL)
    n_work = num_work(table_ptr, C)
    cta = first_work(cta, table_ptr, n_work, num_ctas, window, C)
    scale = softmax_scale
    unit = softmax_scale * LOG2E
    if C.CAP:
        unit = 1.0  # capped scores are in log2 units already
    q = qview.index(WG)
    kc = 0
    vc = 0
    for it in range(rounds_of(n_work, num_ctas, C)):
        w = work_of(it, cta, num_ctas, n_work, C)
        if w < n_work:
            row0, tokens, _, first, start, keys = tile_of(table_ptr, w, n_work, C)
            head = (w % C.NH) * C.PACK
            hi, blocks, top, bottom = blocks_of(tokens, first, start, keys, window, num_ctas, C)
            last, since = seen_keys(start, first, keys, window, WG, ROWS, C)
            col = gl.arange(0, C.BN, COLS)

            mbarrier.wait(q_full.index(0), it & 1)
            ks = kc % C.STAGES
            mbarrier.wait(k_full.index(ks), (kc // C.STAGES) & 1)
            zero = gl.full([64, C.BN], 0.0, gl.float32, MMA)
            s = warpgroup_mma(q, kview.index(ks).permute([1, 0]), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_empty.index(ks), count=1)
            kc += 1
            base = (hi - 1) * C.BN
            key = first_keys(keys, hi - 1, col, C)
            s = mask(_scores(s, scale, cap, C), key, last - base, since - base, C)
            m = gl.full([64], float("-inf"), gl.float32, ROWS)
            l = _lane_sum(gl.full([64, C.BN], 0.0, gl.float32, MMA), C)
            p32, m, l, _ = _softmax(s, m, l, unit, True, C)
            p = gl.convert_layout(_bf16_pairs(p32), A)
            o = gl.full([64, C.D], 0.0, gl.float32, MMO)
            if C.SPLIT:
                for i in range(1, blocks):
                    masked = (i < top) | (i >= blocks - bottom)
                    p, o, m, l = _step(q, kview, vview, k_full, k_empty, v_full, v_empty, p, o, m, l, kc, vc, col,
                                       last, since, (hi - 1 - i) * C.BN, scale, unit, cap, masked, MMA, MMO,
                                       C)  # fmt: skip
                    kc += 1
                    vc += 1
            else:
                for i in range(1, top):
                    p, o, m, l = _step(q, kview, vview, k_full, k_empty, v_full, v_empty, p, o, m, l, kc, vc, col,
                                       last, since, (hi - 1 - i) * C.BN, scale, unit, cap, True, MMA, MMO,
                                       C)  # fmt: skip
                    kc += 1
                    vc += 1
                for i in range(top, blocks - bottom):
                    p, o, m, l = _step(q, kview, vview, k_full, k_empty, v_full, v_empty, p, o, m, l, kc, vc, col,
                                       last, since, 0, scale, unit, cap, False, MMA, MMO, C)  # fmt: skip
                    kc += 1
                    vc += 1
            if C.WINDOW and not C.SPLIT:
                for i in range(blocks - bottom, blocks):
                    p, o, m, l = _step(q, kview, vview, k_full, k_empty, v_full, v_empty, p, o, m, l, kc, vc, col,
                                       last, since, (hi - 1 - i) * C.BN, scale, unit, cap, True, MMA, MMO,
                                       C)  # fmt: skip
                    kc += 1
                    vc += 1
            mbarrier.arrive(q_empty.index(0), count=1)
            vs = vc % C.STAGES
            mbarrier.wait(v_full.index(vs), (vc // C.STAGES) & 1)
            o = warpgroup_mma(p, vview.index(vs), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(v_empty.index(vs), count=1)
            vc += 1
            total = gl.convert_layout(gl.sum(l, 1), ROWS)
            factor = close_row(total, m * unit, row0, tokens, head, WG, 1.0, sinks_ptr, lse_ptr, num_ctas, C)
            factor = gl.convert_layout(factor, gl.SliceLayout(1, MMO))
            out = (o * gl.expand_dims(factor, 1)).to(C.OUT)
            store_tile(
                out,
                o_desc,
                o_ptr,
                oview,
                obuf,
                row0,
                tokens,
                head,
                stride_o_tok,
                stride_o_head,
                num_ctas,
                WG,
                C,
            )
    tma.store_wait(0)


@gluon.jit
def _first_scores(qview, kview, it, kc, WG: gl.constexpr, MMA: gl.constexpr, C: gl.constexpr):
    """Scores of the first keys of round `it`, under way."""
    zero = gl.full([64, C.BN], 0.0, gl.float32, MMA)
    q = qview.index(it % C.QSTAGES * 2 + WG)
    return warpgroup_mma(q, kview.index(kc % C.STAGES).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _mask_first(s, keys, block, col, last, since, C: gl.constexpr):
    """Scores of the last block, which is fetched first. Where no box is shifted, keys are numbered as columns are."""
    base = block * C.BN
    key = col
    if gl.maximum(gl.minimum(keys - base, C.BN), 0) % C.PB > 0:
        key = first_keys(keys, block, col, C)
    return mask(s, key, last - base, since - base, C)


@gluon.jit
def _consumer_ahead(WG: gl.constexpr, o_desc, o_ptr, qview, kview, vview, oview, obuf, q_full, q_empty, k_full,
                    k_empty, v_full, v_empty, table_ptr, sinks_ptr, lse_ptr, num_ctas, window, softmax_scale, cap,
                    stride_o_tok, stride_o_head, C: gl.constexpr):  # fmt: skip
    """As `_consumer`; the first scores of the next tile are under way while this one is finished.

    One loop over a tile's blocks: of several, ptxas sets descriptors that they share ahead of the first only, which may
    be skipped (tests/compile/sass_uniform.py).
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    MMO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMO, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    cta = item_of(num_ctas, C)
    pdl_wait(C.PDL)
    n_work = num_work(table_ptr, C)
    cta = first_work(cta, table_ptr, n_work, num_ctas, window, C)
    scale = softmax_scale
    unit = softmax_scale * LOG2E
    if C.CAP:
        unit = 1.0
    col = gl.arange(0, C.BN, COLS)
    w = cta
    it = 0
    kc = 0
    vc = 0
    row0, tokens, _, first, start, keys = tile_of(table_ptr, w, n_work, C)
    await_tile(w, n_work, it, kc, q_full, k_full, C)
    s = _first_scores(qview, kview, it, kc, WG, MMA, C)
    s = warpgroup_mma_wait(0, deps=(s,))
    while w < n_work:
        mbarrier.arrive(k_empty.index(kc % C.STAGES), count=1)
        kc += 1
        q = qview.index(it % C.QSTAGES * 2 + WG)
        head = (w % C.NH) * C.PACK
        hi, blocks, top, bottom = blocks_of(tokens, first, start, keys, window, num_ctas, C)
        last, since = seen_keys(start, first, keys, window, WG, ROWS, C)
        s = _mask_first(_scores(s, scale, cap, C), keys, hi - 1, col, last, since, C)
        m = gl.full([64], float("-inf"), gl.float32, ROWS)
        l = _lane_sum(gl.full([64, C.BN], 0.0, gl.float32, MMA), C)
        p32, m, l, _ = _softmax(s, m, l, unit, True, C)
        p = gl.convert_layout(_bf16_pairs(p32), A)
        o = gl.full([64, C.D], 0.0, gl.float32, MMO)
        for i in range(1, blocks):
            masked = (i < top) | (i >= blocks - bottom)
            p, o, m, l = _step(q, kview, vview, k_full, k_empty, v_full, v_empty, p, o, m, l, kc, vc, col,
                               last, since, (hi - 1 - i) * C.BN, scale, unit, cap, masked, MMA, MMO, C)  # fmt: skip
            kc += 1
            vc += 1
        mbarrier.arrive(q_empty.index(it % C.QSTAGES), count=1)
        vs = vc % C.STAGES
        mbarrier.wait(v_full.index(vs), (vc // C.STAGES) & 1)
        o = warpgroup_mma(p, vview.index(vs), o, is_async=True)
        it += 1
        w = work_of(it, cta, num_ctas, n_work, C)
        next_row0, next_tokens, _, first, start, keys = tile_of(table_ptr, w, n_work, C)
        await_tile(w, n_work, it, kc, q_full, k_full, C)
        s = _first_scores(qview, kview, it, kc, WG, MMA, C)
        o = warpgroup_mma_wait(1, deps=(o,))
        mbarrier.arrive(v_empty.index(vs), count=1)
        vc += 1
        total = gl.convert_layout(gl.sum(l, 1), ROWS)
        factor = close_row(total, m * unit, row0, tokens, head, WG, 1.0, sinks_ptr, lse_ptr, num_ctas, C)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, MMO))
        out = (o * gl.expand_dims(factor, 1)).to(C.OUT)
        store_tile(
            out, o_desc, o_ptr, oview, obuf, row0, tokens, head, stride_o_tok, stride_o_head, num_ctas, WG, C
        )
        row0 = next_row0
        tokens = next_tokens
        s = warpgroup_mma_wait(0, deps=(s,))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["requests", "rows", "capacity", "stride_ids", "num_ctas", "num_pages", "window", "softmax_scale",
                       "cap"],
    do_not_specialize_on_alignment=["lse_ptr", "table_ptr", "cu_ptr", "seq_ptr", "ids_ptr", "sinks_ptr"],
)  # fmt: skip
def _prefill_sm90_bf16_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, table_ptr, cu_ptr, seq_ptr, ids_ptr, sinks_ptr,
    requests, rows, capacity, stride_ids, num_ctas, num_pages, window, softmax_scale, cap, stride_o_tok, stride_o_head,
    C: gl.constexpr,
):  # fmt: skip
    """Grid (num_ctas). See the module docstring for roles, `schedule` for the table.

    requests: 0 where the table is there, otherwise their number, for `place_tile`; num_ctas is then no less than there
    are work items. rows: of q; capacity: most keys of a request. SPLIT: num_ctas are the parts of an item, the grid is
    (items * num_ctas), o_ptr is fp32 [total * num_ctas, HQ, D], lse_ptr [total * num_ctas, HQ].

    q_desc, o_desc [total, HQ, D] in boxes [QT, PACK, 64]; k_desc, v_desc [pages, P, HKV, D] in boxes [1, PB, 1, 64];
    o_ptr bf16 with strides, lse_ptr fp32 [total, HQ], ids_ptr int32 [B, max_pages], sinks_ptr fp32 [HQ].
    """
    STAGES: gl.constexpr = C.STAGES
    QSTAGES: gl.constexpr = C.QSTAGES
    qbuf = gl.allocate_shared_memory(C.T, [C.QSTAGES * 2 * C.KH, C.QT, C.PACK, C.DB], C.Q_BOX)
    kbuf = gl.allocate_shared_memory(C.T, [C.STAGES * C.KH * C.NP, 1, C.PB, 1, C.DB], C.KV_BOX)
    vbuf = gl.allocate_shared_memory(C.T, [C.STAGES * C.KH * C.NP, 1, C.PB, 1, C.DB], C.KV_BOX)
    obuf = gl.allocate_shared_memory(gl.bfloat16, [C.O_TILES * C.OH, C.QT, C.PACK, C.O_COLS // C.OH], C.O_BOX)
    qview = qbuf._reinterpret(C.T, [C.QSTAGES * 2, 64, C.D], C.TILE)
    kview = kbuf._reinterpret(C.T, [C.STAGES, C.BN, C.D], C.TILE)
    vview = vbuf._reinterpret(C.T, [C.STAGES, C.BN, C.D], C.TILE)
    oview = obuf._reinterpret(gl.bfloat16, [C.O_TILES, 64, C.O_COLS], C.O_TILE)
    k_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [C.QSTAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [C.QSTAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
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
            (_consumer_ahead if C.OVERLAP else _consumer,
             (0, o_desc, o_ptr, qview, kview, vview, oview, obuf, q_full, q_empty, k_full, k_empty, v_full, v_empty,
              table_ptr, sinks_ptr, lse_ptr, num_ctas, window, softmax_scale, cap, stride_o_tok, stride_o_head, C)),
            (_consumer_ahead if C.OVERLAP else _consumer,
             (1, o_desc, o_ptr, qview, kview, vview, oview, obuf, q_full, q_empty, k_full, k_empty, v_full, v_empty,
              table_ptr, sinks_ptr, lse_ptr, num_ctas, window, softmax_scale, cap, stride_o_tok, stride_o_head, C)),
            (producer, (q_desc, k_desc, v_desc, qbuf, kbuf, vbuf, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                        table_ptr, ids_ptr, stride_ids, num_ctas, num_pages, window, C)),
        ],
        [4, 1],
        [C.REGS, C.PRODUCER_REGS],
    )  # fmt: skip
