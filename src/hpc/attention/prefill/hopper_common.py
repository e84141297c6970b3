"""What the BF16 and the FP8 prefill kernels for SM90 share: tiles, the producer warp, masks, the end of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from hpc.attention.prefill import plan
from hpc.common.gluon import fence_async_shared, mbarrier, pdl_wait, tma_load

_HEADER = gl.constexpr(plan.HEADER_WORDS)
_ENTRY = gl.constexpr(plan.ENTRY_WORDS)
LOG2E = gl.constexpr(1.4426950408889634)
_NO_KEY = gl.constexpr(1 << 30)


@gluon.jit
def rounds_of(n_work, num_ctas, C: gl.constexpr):
    if C.SPLIT:
        rounds = 1
    else:
        rounds = (n_work + num_ctas - 1) // num_ctas
    return rounds


@gluon.jit
def work_of(it, cta, num_ctas, n_work, C: gl.constexpr):
    """Work item of a CTA's round: there and back again, so that the heaviest and the lightest tiles of a round meet.

    SPLIT: one round, whose item `first_work` gives in the place of the CTA's number.
    """
    if C.SPLIT:
        w = gl.where(it == 0, cta, n_work)
    else:
        w = it * num_ctas + gl.where((it & 1) == 0, cta, num_ctas - 1 - cta)
    return w


@gluon.jit
def num_work(table_ptr, C: gl.constexpr):
    return gl.load(table_ptr) * C.NH


@gluon.jit
def tile_of(table_ptr, w, n_work, C: gl.constexpr):
    """(first row, tokens, request, first token, start, keys) of a work item, zeros beyond the last one."""
    entry = table_ptr + _HEADER + (w // C.NH) * _ENTRY
    there = w < n_work
    return (
        gl.load(entry, mask=there, other=0), gl.load(entry + 1, mask=there, other=0),
        gl.load(entry + 2, mask=there, other=0), gl.load(entry + 3, mask=there, other=0),
        gl.load(entry + 4, mask=there, other=0), gl.load(entry + 5, mask=there, other=0),
    )  # fmt: skip


@gluon.jit
def item_of(num_ctas, C: gl.constexpr):
    """A CTA's number; SPLIT: its work item, whose `num_ctas` CTAs lie side by side."""
    item = gl.program_id(0)
    if C.SPLIT:
        item = item // num_ctas
    return item


@gluon.jit
def first_work(w, table_ptr, n_work, num_ctas, window, C: gl.constexpr):
    """A CTA's first work item, w of `item_of`; SPLIT: none (`n_work`) where the parts before it have all blocks."""
    if C.SPLIT:
        _, tokens, _, first, start, keys = tile_of(table_ptr, w, n_work, C)
        _, blocks, _, _ = blocks_of(tokens, first, start, keys, window, num_ctas, C)
        w = gl.where(blocks > 0, w, n_work)
    return w


@gluon.jit
def place_tile(table_ptr, cu_ptr, seq_ptr, requests, rows, capacity, num_ctas, C: gl.constexpr):
    """What `schedule` would write for the tile of this CTA, where a CTA has one item at most and no order is needed.

    CTAs of one tile write the same. Request number `requests` stands for the rows behind the last one.
    """
    TILE: gl.constexpr = 2 * C.QT
    tile = item_of(num_ctas, C) // C.NH
    at = gl.minimum(gl.maximum(gl.load(cu_ptr), 0), rows)
    total = 0
    for b in range(requests + 1):
        end = gl.load(cu_ptr + b + 1, mask=b < requests, other=rows)
        end = gl.minimum(gl.maximum(end, at), rows)
        keys = gl.load(seq_ptr + b, mask=b < requests, other=0)
        keys = gl.minimum(gl.maximum(keys, 0), capacity)
        first = (tile - total) * TILE
        if (first >= 0) & (first < end - at):
            entry = table_ptr + _HEADER + tile * _ENTRY
            gl.store(entry, at + first)
            gl.store(entry + 1, gl.minimum(end - at - first, TILE))
            gl.store(entry + 2, b)
            gl.store(entry + 3, first)
            gl.store(entry + 4, keys - (end - at))
            gl.store(entry + 5, keys)
        total += (end - at + TILE - 1) // TILE
        at = end
    gl.store(table_ptr, total)


@gluon.jit
def await_tile(w, n_work, it, kc, q_full, k_full, C: gl.constexpr):
    """Wait for Q and the first keys of a CTA's item of round `it`, if there is one; without one nothing is waited for,
    and products of what lies there are never used."""
    if w < n_work:
        mbarrier.wait(q_full.index(it % C.QSTAGES), (it // C.QSTAGES) & 1)
        mbarrier.wait(k_full.index(kc % C.STAGES), (kc // C.STAGES) & 1)


@gluon.jit
def blocks_of(tokens, first, start, keys, window, num_ctas, C: gl.constexpr):
    """(past-the-end block, blocks, masked ones at the top, masked ones at the bottom); at least one, masked.

    SPLIT: those of this CTA's part, which has two or more, or none where the parts before it, from the last block on,
    have all.
    """
    hi_key = keys
    whole = keys
    if C.CAUSAL:
        hi_key = gl.minimum(gl.maximum(start + first + tokens, 0), keys)
        whole = gl.minimum(gl.maximum(start + first + 1, 0), keys)
    hi = gl.maximum((hi_key + C.BN - 1) // C.BN, 1)
    lo = 0
    bottom = 0
    if C.WINDOW:
        lo = gl.minimum(gl.maximum(start + first - window + 1, 0) // C.BN, hi - 1)
        bottom = (gl.maximum(start + first + tokens - window, 0) + C.BN - 1) // C.BN - lo
    blocks = hi - lo
    top = gl.minimum(gl.maximum(hi - whole // C.BN, 1), blocks)
    bottom = gl.minimum(gl.maximum(bottom, 0), blocks - top)
    if C.SPLIT:
        each = gl.maximum((blocks + num_ctas - 1) // num_ctas, 2)
        skip = gl.minimum(gl.program_id(0) % num_ctas * each, blocks)
        whole_end = blocks - bottom - skip
        hi = hi - skip
        blocks = gl.minimum(blocks - skip, each)
        top = gl.minimum(gl.maximum(top - skip, 1), blocks)
        bottom = gl.minimum(gl.maximum(blocks - whole_end, 0), blocks - top)
    return hi, blocks, top, bottom


@gluon.jit
def _pages(row, keys, block, num_pages, C: gl.constexpr):
    """Page ids of a block's boxes. Entries without a live token are not read; their boxes lie outside the cache."""
    NP: gl.constexpr = C.NP
    pages = ()
    for i in gl.static_range(NP):
        token = block * C.BN + i * C.PB
        page = gl.load(row + token // C.P, mask=(token < keys) & (block >= 0), other=num_pages)
        pages = pages + (page,)  # type: ignore[assignment]
    return pages


@gluon.jit
def _fetch(desc, buf, bar, slot, pages, keys, block, h, C: gl.constexpr):
    """Copy a block into the boxes from `slot` on.

    A box with dead rows starts that many tokens early: its live rows end up last, and before them come zeros (what lies
    outside the page) or earlier rows of the page. So no dead row of the cache is ever read; `first_keys` undoes the
    shift.
    """
    NP: gl.constexpr = C.NP
    KH: gl.constexpr = C.KH
    mbarrier.expect(bar, C.BN * C.D * C.BYTES)
    for i in gl.static_range(NP):
        token = block * C.BN + i * C.PB
        offset = token % C.P - gl.maximum(gl.minimum(token + C.PB - keys, C.PB), 0)
        for half in gl.static_range(KH):
            tma_load(desc, [pages[i], offset, h, half * C.DB], bar, buf.index(slot + half * NP + i))


@gluon.jit
def _put(desc, buf, full, empty, count, pages, keys, block, h, C: gl.constexpr):
    """Copy a block into the stage of turn `count`, once its readers have left it."""
    stage = count % C.STAGES
    mbarrier.wait(empty.index(stage), ((count // C.STAGES) & 1) ^ 1)
    _fetch(desc, buf, full.index(stage), stage * C.KH * C.NP, pages, keys, block, h, C)


@gluon.jit
def producer(q_desc, k_desc, v_desc, qbuf, kbuf, vbuf, q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr,
             ids_ptr, stride_ids, num_ctas, num_pages, window, C: gl.constexpr):  # fmt: skip
    """One warp: Q of each tile, then its blocks from the last to the first, K one block ahead of V."""
    KH: gl.constexpr = C.KH
    cta = item_of(num_ctas, C)
    pdl_wait(C.PDL)
    n_work = num_work(table_ptr, C)
    cta = first_work(cta, table_ptr, n_work, num_ctas, window, C)
    kc = 0
    vc = 0
    for it in range(rounds_of(n_work, num_ctas, C)):
        w = work_of(it, cta, num_ctas, n_work, C)
        if w < n_work:
            row0, tokens, b, first, start, keys = tile_of(table_ptr, w, n_work, C)
            head = (w % C.NH) * C.PACK
            h = head // C.G
            hi, blocks, _, _ = blocks_of(tokens, first, start, keys, window, num_ctas, C)
            ids = ids_ptr + b.to(gl.int64) * stride_ids
            pages = _pages(ids, keys, hi - 1, num_pages, C)
            # Triton keeps a variable across turns only if a trial turn leaves it another value than before the loop.
            # Were `old` the same value as `pages` here, V would come from the last block's pages for ever.
            old = _pages(ids, keys, -1, num_pages, C)
            qs = it % C.QSTAGES
            mbarrier.wait(q_empty.index(qs), ((it // C.QSTAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(qs), 128 * C.D * C.BYTES)
            for wg in gl.static_range(2):
                for half in gl.static_range(KH):
                    corner = [row0 + wg * C.QT, head, half * C.DB]
                    tma_load(q_desc, corner, q_full.index(qs), qbuf.index((qs * 2 + wg) * KH + half))
            for i in range(blocks + 1):
                ahead = _pages(ids, keys, hi - 2 - i, num_pages, C)
                if i < blocks:
                    _put(k_desc, kbuf, k_full, k_empty, kc, pages, keys, hi - 1 - i, h, C)
                    kc += 1
                if i > 0:
                    _put(v_desc, vbuf, v_full, v_empty, vc, old, keys, hi - i, h, C)
                    vc += 1
                old = pages
                pages = ahead


@gluon.jit
def first_keys(keys, block, col, C: gl.constexpr):
    """Key of columns `col` of the last block fetched, relative to the block: as `_fetch` shifts its part-filled box."""
    live = gl.maximum(gl.minimum(keys - block * C.BN, C.BN), 0)
    whole = live // C.PB * C.PB
    shift = gl.where(live > whole, whole + C.PB - live, 0)
    moved = gl.where(col - shift < whole, _NO_KEY, col - shift)
    return gl.where(col < whole, col, moved)


@gluon.jit
def mask(s, key, last, first, C: gl.constexpr):
    """-inf where a row must not see a key; `key` [BN], the rows' last and first key [rows] relative to the block."""
    key = gl.expand_dims(key, 0)
    seen = key <= gl.expand_dims(last, 1)
    if C.WINDOW:
        seen = seen & (key >= gl.expand_dims(first, 1))
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def seen_keys(start, first, keys, window, WG: gl.constexpr, L: gl.constexpr, C: gl.constexpr):
    """(last, first) key that each of a consumer's 64 rows sees; the first one counts under a window only."""
    position = gl.arange(0, 64, L) // C.PACK + (start + first + WG * C.QT)
    if C.CAUSAL:
        last = gl.minimum(position, keys - 1)
    else:
        last = gl.full([64], 0, gl.int32, L) + (keys - 1)
    return last, position - (window - 1)


@gluon.jit
def softcap(s, scale, cap, C: gl.constexpr):
    """Scores in log2 units after the cap: cap tanh(s scale / cap) log2(e)."""
    grown = gl.exp2(s * (scale * (2.0 * LOG2E / cap)))
    return (cap * LOG2E) * (1.0 - 2.0 / (grown + 1.0))


@gluon.jit
def out_row(token, num_ctas, C: gl.constexpr):
    """Row of the output and the lse. SPLIT: a token has a row for each of its `num_ctas` parts."""
    row = token.to(gl.int64)
    if C.SPLIT:
        row = row * num_ctas + gl.program_id(0) % num_ctas
    return row


@gluon.jit
def close_no_part(table_ptr, lse_ptr, num_ctas, window, C: gl.constexpr):
    """SPLIT: the lse of a part without blocks, by the warps that a CTA starts with."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    w = item_of(num_ctas, C)
    row0, tokens, _, first, start, keys = tile_of(table_ptr, w, num_work(table_ptr, C), C)
    _, blocks, _, _ = blocks_of(tokens, first, start, keys, window, num_ctas, C)
    if blocks == 0:
        row = gl.arange(0, 128, L)
        token = row // C.PACK
        at = out_row(token + row0, num_ctas, C) * C.HQ + (w % C.NH) * C.PACK + row % C.PACK
        gl.store(lse_ptr + at, gl.full([128], float("-inf"), gl.float32, L), mask=token < tokens)


@gluon.jit
def close_row(
    l, m, row0, tokens, head, WG: gl.constexpr, value_scale, sinks_ptr, lse_ptr, num_ctas, C: gl.constexpr
):
    """Factor of the accumulated output, 0 for a row without a key; stores the lse. `m`: the exponent that l is relative
    to, in log2 units; both [64] in a layout of rows."""
    L: gl.constexpr = l.type.layout
    row = gl.arange(0, 64, L)
    token = row // C.PACK + WG * C.QT
    empty = l == 0.0
    m = gl.where(empty, 0.0, m)
    shrink = gl.full([64], 1.0, gl.float32, L)
    if C.SINKS:
        sink = gl.load(sinks_ptr + head + row % C.PACK) * LOG2E
        top = gl.maximum(m, sink)
        shrink = gl.exp2(m - top)
        l = l * shrink + gl.exp2(sink - top)
        m = top
    safe = gl.where(empty, 1.0, l)
    if C.LSE:
        lse = gl.where(empty, float("-inf"), (m + gl.log2(safe)) / LOG2E)
        at = out_row(row0 + token, num_ctas, C) * C.HQ + head + row % C.PACK
        gl.store(lse_ptr + at, lse, mask=token < tokens)
    return gl.where(empty, 0.0, value_scale * shrink / safe)


@gluon.jit
def store_tile(out, o_desc, o_ptr, oview, obuf, row0, tokens, head, stride_o_tok, stride_o_head, num_ctas,
               WG: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """[64, D] of a consumer to the output: by TMA, or, if it holds rows of no token, row by row."""
    OH: gl.constexpr = C.OH
    if C.O_TMA:
        if tokens >= (WG + 1) * C.QT:
            tma.store_wait(0)
            oview.index(WG).store(out)
            fence_async_shared()
            for half in gl.static_range(OH):
                corner = [row0 + WG * C.QT, head, half * (C.D // OH)]
                tma.async_copy_shared_to_global(o_desc, corner, obuf.index(WG * OH + half))
        else:
            _store_rows(out, o_ptr, row0, tokens, head, stride_o_tok, stride_o_head, num_ctas, WG, C)
    else:
        _store_rows(out, o_ptr, row0, tokens, head, stride_o_tok, stride_o_head, num_ctas, WG, C)


@gluon.jit
def _store_rows(
    out, o_ptr, row0, tokens, head, stride_o_tok, stride_o_head, num_ctas, WG: gl.constexpr, C: gl.constexpr
):
    L: gl.constexpr = out.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    token = row // C.PACK + WG * C.QT
    col = gl.expand_dims(gl.arange(0, C.D, gl.SliceLayout(0, L)), 0)
    at = out_row(row0 + token, num_ctas, C) * stride_o_tok + (head + row % C.PACK) * stride_o_head
    live = gl.expand_dims(token < tokens, 1) & (col >= 0)
    gl.store(o_ptr + gl.expand_dims(at, 1) + col, out, mask=live)
