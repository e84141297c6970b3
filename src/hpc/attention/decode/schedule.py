"""The schedule on the device: one small launch a step turns live KV lengths into the task map of `plan.py`.

One program a variant (and one for the header) scans all lengths, so programs never talk to each other. Request b
ends at or before the cuts from e_b = ceil(end_b * per / step) on, so the request of cut g is the number of e_b <= g:
a binary search over the running sum, which never leaves the multiprocessor. Divisions run in float64, exact below 2^52.
"""

import triton
import triton.language as tl

from hpc.attention.decode import plan

_TILE = tl.constexpr(plan.TILE)
_TILE_COST = tl.constexpr(plan.TILE_COST)
_SEGMENT_COST = tl.constexpr(plan.SEGMENT_COST)
_SNAP = tl.constexpr(plan.SNAP)
_LONG = tl.constexpr(plan.LONG)
_LONGEST = tl.constexpr(plan.LONGEST)
_HEADER = tl.constexpr(plan.HEADER_WORDS)
_ENTRY = tl.constexpr(plan.ENTRY_WORDS)
_MERGE = tl.constexpr(plan.MERGE_WORDS)
_VARIANTS = tl.constexpr(plan.NUM_VARIANTS)
_VERSION = tl.constexpr(plan.LAYOUT_VERSION)

CLEAR = 4096  # words a program clears
NUM_WARPS = 8
_CLEAR = tl.constexpr(CLEAR)


@triton.jit
def _lengths(seq_ptr, idx, mask, extra):
    raw = tl.minimum(tl.load(seq_ptr + idx, mask=mask, other=0), _LONGEST)
    return tl.maximum(raw.to(tl.int64) + extra, 0)


@triton.jit
def _first_tile(length, new_tokens, window, WINDOW: tl.constexpr):
    if WINDOW:
        return tl.maximum(length - new_tokens + 1 - window, 0) >> 6
    else:
        return length * 0


@triton.jit
def _num_tiles(length, new_tokens, window, WINDOW: tl.constexpr):
    first = _first_tile(length, new_tokens, window, WINDOW)
    return tl.maximum(((length + _TILE - 1) >> 6) - first, 1)


@triton.jit
def _costs(seq_ptr, idx, batch, extra, new_tokens, window, WINDOW: tl.constexpr):
    """(length, tiles, cost) of a block of requests; cost 0 past the batch."""
    length = _lengths(seq_ptr, idx, idx < batch, extra)
    tiles = _num_tiles(length, new_tokens, window, WINDOW)
    return length, tiles, tl.where(idx < batch, tiles * _TILE_COST + _SEGMENT_COST, 0)


@triton.jit
def _survey(seq_ptr, batch, extra, new_tokens, window, WINDOW: tl.constexpr, REQS: tl.constexpr):
    """(cost of all requests, tiles of the longest)."""
    lane = tl.arange(0, REQS)
    total, longest = tl.zeros([], tl.int64), tl.full([], 1, tl.int64)
    for start in range(0, batch, REQS):
        _, tiles, cost = _costs(seq_ptr, start + lane, batch, extra, new_tokens, window, WINDOW)
        total += tl.sum(cost, 0)
        longest = tl.maximum(longest, tl.max(tl.where(cost > 0, tiles, 1), 0))
    return total, longest


@triton.jit
def _ceil_div(a, b):
    return -tl.floor(-(a.to(tl.float64) / b.to(tl.float64))).to(tl.int64)


@triton.jit
def _inner_cuts(begin, tiles, step, per, n_bins):
    """Cuts [first, past) that fall inside a request; empty if it is too short to be cut."""
    inside = begin + _SEGMENT_COST + _TILE_COST * _SNAP
    beyond = begin + _SEGMENT_COST + _TILE_COST * (tiles - _SNAP + 1)
    return _ceil_div(inside * per, step), tl.minimum(n_bins, _ceil_div(beyond * per, step))


@triton.jit
def _count_not_above(ascending, cut, SIZE: tl.constexpr):
    """For each cut, how many of the SIZE ascending values are <= it."""
    count = cut * 0
    half: tl.constexpr = SIZE // 2
    step = half
    while step > 0:
        probe = tl.gather(ascending, count + (step - 1), 0)
        count = tl.where(probe <= cut, count + step, count)
        step = step // 2
    return count + (tl.gather(ascending, tl.minimum(count, SIZE - 1), 0) <= cut).to(tl.int32)


@triton.jit
def _header(map_ptr, seq_ptr, batch, extra, new_tokens, window, sig, kv_heads, n_bins, floor, size_bytes,
            WINDOW: tl.constexpr, REQS: tl.constexpr):  # fmt: skip
    total, longest = _survey(seq_ptr, batch, extra, new_tokens, window, WINDOW, REQS)
    step, per = _cut_step(total, n_bins, floor, longest)
    tl.store(map_ptr + 0, (_ceil_div(step, per * _TILE_COST) + 1).to(tl.int32))
    tl.store(map_ptr + 1, (n_bins * kv_heads).to(tl.int32))
    tl.store(map_ptr + 2, kv_heads)
    tl.store(map_ptr + 4, size_bytes)
    tl.store(map_ptr + 5, tl.minimum(n_bins, _ceil_div(longest * _TILE_COST * per, step) + 1).to(tl.int32))
    tl.store(map_ptr + 6, sig)
    tl.store(map_ptr + 7, _VERSION)


@triton.jit
def _cut_step(total, n_bins, floor, longest):
    """As `plan.cut_step`."""
    floor_cost = _TILE_COST * floor + tl.where(longest <= _LONG * floor, _SEGMENT_COST, 0)
    enough = total >= n_bins * floor_cost
    return tl.where(enough, total, floor_cost), tl.where(enough, n_bins, 1)


@triton.jit(
    do_not_specialize=["batch", "extra", "new_tokens", "window", "sig", "kv_heads", "n0", "n1", "f0", "f1",
                       "size_bytes", "counters"],
    do_not_specialize_on_alignment=["seq_ptr", "map_ptr"],
)  # fmt: skip
def _assign_kernel(
    seq_ptr, map_ptr, batch, extra, new_tokens, window, sig, kv_heads, n0, n1, f0, f1, size_bytes, counters,
    WINDOW: tl.constexpr, CUTS: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    """Writes the task map. Grid (NUM_VARIANTS + 1 + ceil(counters / CLEAR),): one program a variant, one for the
    header, the rest clear the `counters` words behind the schedule, so that a call cut short leaves no trace.

    seq_ptr [batch] int32 raw lengths, `extra` tokens are added to each; n0, n1 bins and f0, f1 floor tiles of the
    variants; CUTS > max n_v, a power of two; requests are taken REQS at a time.
    """
    map_ptr = map_ptr.to(tl.pointer_type(tl.int32))
    variant = tl.program_id(0)
    v = tl.minimum(variant, 1)
    n_bins = tl.where(v == 0, n0, n1).to(tl.int64)
    floor = tl.where(v == 0, f0, f1).to(tl.int64)
    if variant > _VARIANTS:
        word = (variant - _VARIANTS - 1) * _CLEAR + tl.arange(0, _CLEAR)
        base = map_ptr + _HEADER + (n0 + n1) * (_ENTRY + _MERGE)
        tl.store(base + word, tl.zeros([_CLEAR], tl.int32), mask=word < counters)
    elif variant == _VARIANTS:
        _header(map_ptr, seq_ptr, batch, extra, new_tokens, window, sig, kv_heads, n_bins, floor, size_bytes,
                WINDOW, REQS)  # fmt: skip
    else:
        before = tl.where(v == 0, 0, n0)
        bins_ptr = map_ptr + _HEADER + before * (_ENTRY + _MERGE)
        merge_ptr = bins_ptr + n_bins * _ENTRY
        by_request = batch <= n_bins
        cut = tl.arange(0, CUTS)
        lane = tl.arange(0, REQS)
        total, longest = _survey(seq_ptr, batch, extra, new_tokens, window, WINDOW, REQS)
        step, per = _cut_step(total, n_bins, floor, longest)

        # How many requests end at or before each cut; the merge entries of the requests on the way.
        req = tl.zeros([CUTS], tl.int32)
        carry = tl.zeros([], tl.int64)
        for start in range(0, batch, REQS):
            own = start + lane
            _, tiles, cost = _costs(seq_ptr, own, batch, extra, new_tokens, window, WINDOW)
            ends = carry + tl.cumsum(cost, 0)
            ended = tl.where(own < batch, tl.minimum(_ceil_div(ends * per, step), CUTS), CUTS).to(tl.int32)
            req += _count_not_above(ended, cut, REQS)
            carry += tl.sum(cost, 0)
            if by_request:
                first, past = _inner_cuts(ends - cost, tiles, step, per, n_bins)
                _store_merge(merge_ptr, own, own < batch, sig, own, first, past, past > first)

        # What the scan knows of each cut's request.
        begin = tl.zeros([CUTS], tl.int64)
        length = tl.zeros([CUTS], tl.int64)
        carry = tl.zeros([], tl.int64)
        for start in range(0, batch, REQS):
            own_length, _, cost = _costs(seq_ptr, start + lane, batch, extra, new_tokens, window, WINDOW)
            at = tl.minimum(tl.maximum(req - start, 0), REQS - 1)
            here = (req >= start) & (req < start + REQS)
            begin = tl.where(here, tl.gather(carry + tl.cumsum(cost, 0) - cost, at, 0), begin)
            length = tl.where(here, tl.gather(own_length, at, 0), length)
            carry += tl.sum(cost, 0)
        tiles = _num_tiles(length, new_tokens, window, WINDOW)
        x = tl.floor((cut * step).to(tl.float64) / per.to(tl.float64)).to(tl.int64)
        live = req < batch
        inner = tl.maximum(x - begin - _SEGMENT_COST, 0) >> 2
        inside = live & (inner >= _SNAP) & (tiles - inner >= _SNAP)
        to_next = live & (inner >= _SNAP) & (tiles - inner < _SNAP)
        first, past = _inner_cuts(begin, tiles, step, per, n_bins)
        req = tl.where(to_next, req + 1, req)
        next_length = _lengths(seq_ptr, req, to_next & (req < batch), extra)
        length = tl.where(req < batch, tl.where(to_next, next_length, length), 0)
        t0 = tl.where(req < batch, _first_tile(length, new_tokens, window, WINDOW), 0) + tl.where(
            inside, inner, 0
        )

        own = cut < n_bins
        entry = bins_ptr + cut * _ENTRY
        tl.store(entry + 0, tl.zeros([CUTS], tl.int32) + sig, mask=own)
        tl.store(entry + 1, req, mask=own)
        tl.store(entry + 2, t0.to(tl.int32), mask=own)
        tl.store(entry + 5, length.to(tl.int32), mask=own)
        tl.store(entry + 6, tl.where(inside, (first - 1).to(tl.int32), cut), mask=own)
        tl.store(entry + 7, tl.where(inside, (past - first + 1).to(tl.int32), 0), mask=own)
        is_end = (cut >= 1) & (cut <= n_bins)
        tl.store(entry - _ENTRY + 3, req, mask=is_end)
        tl.store(entry - _ENTRY + 4, tl.where(inside, t0, 0).to(tl.int32), mask=is_end)
        if not by_request:
            due = inside & (cut == first)
            _store_merge(merge_ptr, cut, own, sig, tl.where(due, req, cut), first, past, due)


@triton.jit
def _store_merge(merge_ptr, index, mask, sig, req, first, past, due):
    """Merge entries as `plan.merge_entries`."""
    entry = merge_ptr + index * _MERGE
    tl.store(entry + 0, index * 0 + sig, mask=mask)
    tl.store(entry + 1, req, mask=mask)
    tl.store(entry + 2, tl.where(due, first - 1, 0).to(tl.int32), mask=mask)
    tl.store(entry + 3, tl.where(due, past - first + 1, 0).to(tl.int32), mask=mask)
