"""What the SM90 decode kernels write: outputs, partials, and the merge of a split request's partials.

    out = sum_c 2^(m_c - m) O_c / sum_c 2^(m_c - m) l_c,   m = max_c m_c

over the warp groups of a CTA (`finish`), then over the chunks of a request (`merge_last`), by the CTA that finishes
the last chunk. Its counters live in the task map and are back at zero when the call ends. Compared with a merge kernel
behind the attention kernel this saves a launch and lets the next kernel start while the last bins still run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hpc.common.gluon import barrier

_LOG2E = gl.constexpr(1.4426950408889634)
M_INIT = gl.constexpr(-1.0e30)  # finite, so that a row without visible keys keeps p = exp2(-inf - m) = 0


@gluon.jit
def add_sink(m, l, sink):
    """(m, l, factor of the sums) with the sink in the denominator; a row without keys stays without."""
    m_new = gl.where(l > 0, gl.maximum(m, sink * _LOG2E), m)
    shrink = gl.exp2(m - m_new)
    return m_new, gl.where(l > 0, l * shrink + gl.exp2(sink * _LOG2E - m_new), l), shrink


@gluon.jit
def finish(acc, m, l, b, h, row0, whole, slot, o_ptr, lse_ptr, part_ptr, ml_ptr, vs, sinks_ptr,
           stride_o_tok, stride_o_head, num_q_heads, C: gl.constexpr):  # fmt: skip
    """Merge the warp groups of a finished request; write its output, or its partial when it has other chunks."""
    NV: gl.constexpr = C.NV
    # All groups of a row, and of an element below, in one thread.
    LG: gl.constexpr = gl.SliceLayout(1, C.MERGE)
    m = gl.convert_layout(m, LG)
    l = gl.convert_layout(l, LG)
    m_all = gl.max(m, 0)
    weight = gl.exp2(m - gl.expand_dims(m_all, 0))
    l_all = gl.sum(l * weight, 0)
    LM: gl.constexpr = gl.SliceLayout(0, LG)
    rr = gl.arange(0, C.R, LM) + row0
    head = h * C.G + rr % C.G
    if whole:
        if C.SINKS:
            sink = gl.load(sinks_ptr + head, mask=rr < C.ROWS, other=float("-inf"))
            m_all, l_all, shrink = add_sink(m_all, l_all, sink)
            weight = weight * gl.expand_dims(shrink, 0)
        if C.LSE:
            lse = gl.where(l_all > 0, (m_all + gl.log2(l_all)) / _LOG2E, float("-inf"))
            gl.store(lse_ptr + (b * C.S + rr // C.G) * num_q_heads + head, lse, mask=rr < C.ROWS)
        weight = weight * gl.expand_dims(gl.where(l_all > 0, vs / l_all, 0.0), 0)
    else:
        ml = ml_ptr + ((slot.to(gl.int64) * C.HKV + h) * C.ROWS + rr) * 2
        gl.store(ml, m_all, mask=rr < C.ROWS)
        gl.store(ml + 1, l_all, mask=rr < C.ROWS)
    i = gl.expand_dims(gl.arange(0, C.DPV, gl.SliceLayout(1, gl.SliceLayout(0, C.MERGE))), 1)
    r = gl.expand_dims(gl.arange(0, C.R, gl.SliceLayout(0, gl.SliceLayout(0, C.MERGE))), 0) + row0
    mask = (r < C.ROWS) & (i >= 0)
    out = o_ptr + (b * C.S).to(gl.int64) * stride_o_tok
    out = out + (r // C.G) * stride_o_tok + (h * C.G + r % C.G) * stride_o_head
    part = part_ptr + ((slot.to(gl.int64) * C.HKV + h) * C.ROWS + r) * C.DV
    weight = gl.expand_dims(weight, 1)
    for piece in gl.static_range(NV):
        o = gl.sum(gl.convert_layout(acc[piece], C.MERGE) * weight, 0)
        if C.FP8:
            d = i * 2 + (piece // 2) * C.DBV + piece % 2
        else:
            d = i + piece * C.DBV
        if whole:
            gl.store(out + d, o.to(gl.bfloat16), mask=mask)
        else:
            gl.store(part + d, o, mask=mask)


@gluon.jit
def finish_rows(o, m, l, b, h, row0, whole, slot, o_ptr, lse_ptr, part_ptr, ml_ptr, vs, sinks_ptr, stride_o_tok,
                stride_o_head, num_q_heads, C: gl.constexpr):  # fmt: skip
    """As `finish`, of one warpgroup that has seen all tokens: `o` [M, DV] in the layout C.MMO, m and l of its rows."""
    L: gl.constexpr = gl.SliceLayout(1, C.MMA)
    LO: gl.constexpr = gl.SliceLayout(1, C.MMO)
    r = gl.arange(0, C.M, LO) + row0
    d = gl.expand_dims(gl.arange(0, C.DV, gl.SliceLayout(0, C.MMO)), 0)
    mask = gl.expand_dims(r < C.ROWS, 1) & (d >= 0)
    rr = gl.arange(0, C.M, L) + row0
    if whole:
        head = h * C.G + rr % C.G
        shrink = gl.full([C.M], 1.0, gl.float32, L)
        if C.SINKS:
            sink = gl.load(sinks_ptr + head, mask=rr < C.ROWS, other=float("-inf"))
            m, l, shrink = add_sink(m, l, sink)
        if C.LSE:
            lse = gl.where(l > 0, (m + gl.log2(l)) / _LOG2E, float("-inf"))
            gl.store(lse_ptr + (b * C.S + rr // C.G) * num_q_heads + head, lse, mask=rr < C.ROWS)
        factor = gl.convert_layout(shrink * gl.where(l > 0, vs / l, 0.0), LO)
        out = o_ptr + (b * C.S).to(gl.int64) * stride_o_tok
        at = (r // C.G) * stride_o_tok + (h * C.G + r % C.G) * stride_o_head
        value = (o * gl.expand_dims(factor, 1)).to(gl.bfloat16)
        gl.store(out + gl.expand_dims(at, 1) + d, value, mask=mask)
    else:
        base = (slot.to(gl.int64) * C.HKV + h) * C.ROWS
        gl.store(ml_ptr + (base + rr) * 2, m, mask=rr < C.ROWS)
        gl.store(ml_ptr + (base + rr) * 2 + 1, l, mask=rr < C.ROWS)
        gl.store(part_ptr + gl.expand_dims((base + r) * C.DV, 1) + d, o, mask=mask)


@gluon.jit
def refuse(
    g, n_bins, batch, h, row0, o_ptr, lse_ptr, stride_o_tok, stride_o_head, num_q_heads, C: gl.constexpr
):
    """The task map was built for another call: NaN to every row, loud and in bounds."""
    LN: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [C.WARPS, 1], [1, 0])
    r = gl.expand_dims(gl.arange(0, C.R, gl.SliceLayout(1, LN)), 1) + row0
    d = gl.expand_dims(gl.arange(0, C.DV, gl.SliceLayout(0, LN)), 0)
    head = h * C.G + r % C.G
    for b in range(g, batch, n_bins):
        out = o_ptr + (b * C.S).to(gl.int64) * stride_o_tok
        out = out + (r // C.G) * stride_o_tok + head * stride_o_head + d
        nan = gl.full([C.R, C.DV], float("nan"), gl.bfloat16, LN)
        gl.store(out, nan, mask=(r < C.ROWS) & (d >= 0))
        if C.LSE:
            lse = lse_ptr + (b * C.S + r // C.G) * num_q_heads + head
            gl.store(lse, gl.full([C.R, 1], float("nan"), gl.float32, LN), mask=r < C.ROWS)


@gluon.jit
def _gather(part_ptr, ml_ptr, g0, first, stride, count, h, row0, C: gl.constexpr):
    """Merge `count` partials, chunks first, first + stride, ... of the request begun in bin g0: (m, l, O [R, DV])."""
    L3: gl.constexpr = C.GATHER
    LC: gl.constexpr = gl.SliceLayout(2, L3)
    LV: gl.constexpr = gl.SliceLayout(0, L3)
    LM: gl.constexpr = gl.SliceLayout(1, LV)
    r = gl.expand_dims(gl.arange(0, C.R, gl.SliceLayout(0, LC)), 0) + row0
    d = gl.expand_dims(gl.expand_dims(gl.arange(0, C.DV, gl.SliceLayout(0, LV)), 0), 0)
    m = gl.full([C.R], M_INIT, gl.float32, LM)
    l = gl.full([C.R], 0.0, gl.float32, LM)
    acc = gl.full([C.R, C.DV], 0.0, gl.float32, LV)
    for i0 in range(0, count, C.GATHER_CHUNKS):
        i = gl.expand_dims(gl.arange(0, C.GATHER_CHUNKS, gl.SliceLayout(1, LC)), 1) + i0
        c = first + i * stride
        slot = 2 * (g0 + c) + gl.where(c == 0, 1, 0)
        row = (slot * C.HKV + h) * C.ROWS + r
        mask = (i < count) & (r < C.ROWS)
        # From the L2: other SMs wrote these in this launch.
        m_c = gl.load(ml_ptr + row * 2, mask=mask, other=M_INIT, cache_modifier=".cg")
        l_c = gl.load(ml_ptr + row * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        offs = gl.expand_dims(row, 2) * C.DV + d
        o_c = gl.load(
            part_ptr + offs, mask=gl.expand_dims(mask, 2) & (d >= 0), other=0.0, cache_modifier=".cg"
        )
        m_new = gl.maximum(m, gl.convert_layout(gl.max(m_c, 0), LM))
        keep = gl.exp2(m - m_new)
        weight = gl.exp2(m_c - gl.expand_dims(gl.convert_layout(m_new, gl.SliceLayout(0, LC)), 0))
        l = l * keep + gl.convert_layout(gl.sum(l_c * weight, 0), LM)
        acc = acc * gl.expand_dims(keep, 1) + gl.sum(o_c * gl.expand_dims(weight, 2), 0)
        m = m_new
    return m, l, acc


@gluon.jit
def _arrive_last(count_ptr, expected):
    """Count this CTA in; True for the last of `expected`, which leaves the counter at zero again."""
    barrier()
    last = gl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        gl.store(count_ptr, 0)
    barrier()
    return last


@gluon.jit
def merge_last(j, g0, n_chunks, b, h, hr, row0, n_bins, o_ptr, lse_ptr, part_ptr, ml_ptr, count_ptr, vs, sinks_ptr,
                stride_o_tok, stride_o_head, num_q_heads, C: gl.constexpr):  # fmt: skip
    """The CTA that finishes the last chunk of a request merges all; many chunks in two levels of FAN.

    Chunks are summed by index, whoever comes last, so equal inputs give equal bits.
    """
    LV: gl.constexpr = gl.SliceLayout(0, C.GATHER)
    LM: gl.constexpr = gl.SliceLayout(1, LV)
    fan = gl.where((n_chunks <= C.FAN) | (n_chunks > C.FAN * C.NARROW), C.FAN, C.NARROW)
    group = j // fan
    in_group = gl.minimum(fan, n_chunks - group * fan)
    groups = (n_chunks + fan - 1) // fan
    # Two counters a bin: one request may start its second group where another starts its first.
    counter = count_ptr + (2 * (g0 + group * fan) + gl.where(group == 0, 1, 0)) * (C.HKV * C.RB) + hr
    if _arrive_last(counter, in_group):
        m, l, acc = _gather(part_ptr, ml_ptr, g0, group * fan, 1, in_group, h, row0, C)
        r = gl.arange(0, C.R, LM) + row0
        d = gl.expand_dims(gl.arange(0, C.DV, gl.SliceLayout(0, LV)), 0)
        rr = gl.expand_dims(r, 1)
        done = groups == 1
        if groups > 1:
            # This group's sum takes the place of its first chunk.
            first = group * fan
            slot = 2 * (g0 + first) + gl.where(first == 0, 1, 0)
            base = (slot * C.HKV + h) * C.ROWS
            barrier()
            gl.store(part_ptr + (base + rr) * C.DV + d, acc, mask=(rr < C.ROWS) & (d >= 0))
            gl.store(ml_ptr + (base + r) * 2, m, mask=r < C.ROWS)
            gl.store(ml_ptr + (base + r) * 2 + 1, l, mask=r < C.ROWS)
            top = count_ptr + (2 * n_bins + g0) * (C.HKV * C.RB) + hr
            done = _arrive_last(top, groups)
            if done:
                m, l, acc = _gather(part_ptr, ml_ptr, g0, 0, fan, groups, h, row0, C)
        if done:
            head = h * C.G + r % C.G
            if C.SINKS:
                sink = gl.load(sinks_ptr + head, mask=r < C.ROWS, other=float("-inf"))
                m, l, shrink = add_sink(m, l, sink)
                acc = acc * gl.expand_dims(shrink, 1)
            if C.LSE:
                lse = gl.where(l > 0, (m + gl.log2(l)) / _LOG2E, float("-inf"))
                gl.store(lse_ptr + (b * C.S + r // C.G) * num_q_heads + head, lse, mask=r < C.ROWS)
            o = acc * gl.expand_dims(gl.where(l > 0, vs / l, 0.0), 1)
            out = o_ptr + (b * C.S).to(gl.int64) * stride_o_tok
            out = out + (rr // C.G) * stride_o_tok + (h * C.G + rr % C.G) * stride_o_head + d
            gl.store(out, o.to(gl.bfloat16), mask=(rr < C.ROWS) & (d >= 0))
