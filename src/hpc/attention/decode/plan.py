"""Decode plans and the schedule, in pure Python: integers only, no tensors, no Triton.

The schedule. A request of KV length L is a row of 64-token tiles. Every (request, tile) pair has a cost of
`TILE_COST` units and every request a further `SEGMENT_COST` for its set-up and write-back. The costs are laid end
to end and cut into `num_bins` near-equal bins; bin g owns the tiles from cut g up to cut g+1:

    cost     |-- r0 --|---------------- r1 ----------------|-r2-|-r3-|
    cuts     0              1              2              3          4
    bins     [      0      ][      1       ][      2      ][    3    ]

A bin touches at most one request begun in an earlier bin and one that continues in the next, so two partial slots a
bin suffice. Heads do not appear: a CTA is (bin, kv head, row block), so all heads of the same tokens run side by
side and their reads meet in the same DRAM pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TILE = 64  # tokens a tile
TILE_COST = 4  # cost units of a tile
# Cost units of a request inside a bin: its set-up, write-back and arrival at the merge. fp8 64/8 mixed lengths took
# 83.1, 74.7, 68.6 us at 4, 8, 14; fp8 8/1 mixed 13.5, 12.9, 12.7 us at 14, 22, 30, but 1x64K+31x4K 17.6, 18.3, 18.2.
SEGMENT_COST = 20
SNAP = 2  # a cut never leaves fewer tiles than this on either side of a request

HEADER_WORDS = 16
ENTRY_WORDS = 8  # of a bin
MERGE_WORDS = 4  # of a merge entry
NUM_VARIANTS = 2  # schedules for one and for two CTAs an SM, so that the attention kernel may pick either
LAYOUT_VERSION = 1
LONGEST = 2**31 - 1 - 256  # lengths are clipped to it: room for the new tokens and for rounding up to a tile
MAX_ROW_BLOCKS = (
    32  # a request has at most 64 heads x 16 tokens = 1024 rows a kv head, a CTA takes 32 of them
)
FLOOR_TILES = (8, 4)  # minimum work of a bin by variant, unless min_process_len asks for less
LONG = (
    4  # floors; a longer request is split in any case: 9.6 to 8.1 us by smaller chunks (fp8 8/1 1x16K+15x64)
)


@dataclass(frozen=True)
class Bin:
    """One entry of the task map; see the module docstring. `n_chunks` is 0 unless `t0` lies inside request `b`."""

    b: int
    t0: int
    b_end: int
    t_end: int
    length: int
    g0: int
    n_chunks: int


def num_bins(sms: int, num_kv_heads: int, variant: int) -> int:
    """Bins of a variant: the CTAs that are resident at once, divided among the KV heads."""
    return max(1, sms * (variant + 1) // num_kv_heads)


def variant_offset(sms: int, num_kv_heads: int, variant: int) -> int:
    """First word of a variant's bins in the task map; its merge entries follow its bins."""
    return HEADER_WORDS + sum(num_bins(sms, num_kv_heads, v) for v in range(variant)) * (
        ENTRY_WORDS + MERGE_WORDS
    )


def num_merges(batch: int, n_bins: int) -> int:
    """Merge entries in use: one a request, or one a bin when there are more requests than bins."""
    return min(batch, n_bins)


def counter_words(sms: int, num_kv_heads: int) -> int:
    """Arrival counters of the merges: three a bin, kv head and row block. Zero except inside a call."""
    return 3 * num_bins(sms, num_kv_heads, NUM_VARIANTS - 1) * num_kv_heads * MAX_ROW_BLOCKS


def workspace_words(sms: int, num_kv_heads: int) -> int:
    """Exact size of a task map in int32 words. It depends on neither the batch nor the lengths."""
    return variant_offset(sms, num_kv_heads, NUM_VARIANTS) + counter_words(sms, num_kv_heads)


def floor_tiles(variant: int, min_process_len: int) -> int:
    """Minimum tiles of a bin: the measured floor of the variant, or less if the caller asks for less."""
    return max(1, min(FLOOR_TILES[variant], min_process_len // TILE))


def signature(
    num_kv_heads: int, num_new_tokens: int, batch: int, window: int | None, new_kv_included: bool
) -> int:
    """Positive int32 that ties a schedule to the call it was built for; a mismatch gives NaN, never stray reads."""
    mixed = 0x9E3779B1
    for part in (num_kv_heads, num_new_tokens, batch, 0 if window is None else window, int(new_kv_included)):
        mixed = ((mixed ^ (part & 0xFFFFFFFF)) * 0x01000193 + 0x7F4A7C15) & 0xFFFFFFFF
        mixed ^= mixed >> 15
    return (mixed & 0x3FFFFFFF) | 0x40000000


def tile_range(length: int, num_new_tokens: int, window: int | None) -> tuple[int, int]:
    """Tiles [t_lo, t_hi) that hold keys some row of the request sees; never empty, so zeros get written too."""
    length = max(0, length)
    lowest = 0 if window is None else max(0, length - num_new_tokens + 1 - window)
    t_lo = lowest // TILE
    return t_lo, max(t_lo + 1, (length + TILE - 1) // TILE)


def build_bins(
    lens: Sequence[int], num_new_tokens: int, n_bins: int, min_tiles: int, window: int | None = None
) -> list[Bin]:
    """The planner; the device kernel in `schedule.py` computes the same integers."""
    ranges = [tile_range(length, num_new_tokens, window) for length in lens]
    tiles = [hi - lo for lo, hi in ranges]
    prefix = [0]
    for n in tiles:
        prefix.append(prefix[-1] + TILE_COST * n + SEGMENT_COST)
    total, batch = prefix[-1], len(lens)
    step, per = cut_step(total, n_bins, min_tiles, max(tiles, default=1))

    def locate(g: int) -> tuple[int, int]:
        """(request, tile relative to its first) at which bin g starts."""
        x = g * step // per
        if x >= total:
            return batch, 0
        b = max(i for i in range(batch) if prefix[i] <= x)
        t = max(0, x - prefix[b] - SEGMENT_COST) // TILE_COST
        if t < SNAP:
            return b, 0
        return (b, t) if tiles[b] - t >= SNAP else (b + 1, 0)

    def first_cut_at(cost: int) -> int:
        return -(-cost * per // step)

    starts = [locate(g) for g in range(n_bins)] + [(batch, 0)]
    bins = []
    for g in range(n_bins):
        (b, t), (b_end, t_end) = starts[g], starts[g + 1]
        if b == batch:
            bins.append(Bin(batch, 0, batch, 0, 0, g, 0))
            continue
        g0, n_chunks = g, 0
        if t > 0:
            inside = prefix[b] + SEGMENT_COST + TILE_COST * SNAP
            beyond = prefix[b] + SEGMENT_COST + TILE_COST * (tiles[b] - SNAP + 1)
            first = first_cut_at(inside)
            g0, n_chunks = first - 1, min(n_bins, first_cut_at(beyond)) - first + 1
        end_tile = ranges[b_end][0] + t_end if t_end else 0
        bins.append(Bin(b, ranges[b][0] + t, b_end, end_tile, max(0, lens[b]), g0, n_chunks))
    return bins


def merge_entries(bins: Sequence[Bin], batch: int, sig: int) -> list[int]:
    """Words [signature, request, first bin, chunks] for the merge of split requests; chunks 0 where none is due.

    Entry i speaks of request i, or, with more requests than bins, of the request whose second chunk is bin i.
    """
    entries = [[sig, i, 0, 0] for i in range(num_merges(batch, len(bins)))]
    for g, bin_ in enumerate(bins):
        if bin_.n_chunks and g == bin_.g0 + 1:
            entries[bin_.b if batch <= len(bins) else g] = [sig, bin_.b, bin_.g0, bin_.n_chunks]
    return [word for entry in entries for word in entry] + [0] * (MERGE_WORDS * (len(bins) - len(entries)))


def cut_step(total: int, n_bins: int, min_tiles: int, longest: int) -> tuple[int, int]:
    """Cut g lies at cost g * step // per: equal shares, or the floor when the shares would be smaller.

    The floor lets a request of `min_tiles` stay whole: a merge costs about what five tiles do. Where some request has
    more than LONG * min_tiles tiles a merge is due anyway, and smaller chunks end sooner.
    """
    floor = TILE_COST * min_tiles + (SEGMENT_COST if longest <= LONG * min_tiles else 0)
    return (total, n_bins) if total >= n_bins * floor else (floor, 1)


def static_chunk_tiles(n_tiles: int, num_splits: int, min_chunk: int) -> int:
    """Tiles of one chunk of the static path: a request's tiles over `num_splits`, at least `min_chunk`."""
    return max(min_chunk, -(-n_tiles // num_splits))


def build_task_map(
    lens: Sequence[int],
    *,
    sms: int,
    num_kv_heads: int,
    num_new_tokens: int,
    sig: int,
    min_process_len: int,
    max_num_batch: int,
    window: int | None = None,
) -> list[int]:
    """All words of the task map for total lengths `lens`: what the device kernel writes, from Python."""
    words = [0] * HEADER_WORDS
    for v in range(NUM_VARIANTS):
        n = num_bins(sms, num_kv_heads, v)
        bins = build_bins(lens, num_new_tokens, n, floor_tiles(v, min_process_len), window)
        for bin_ in bins:
            words += [sig, bin_.b, bin_.t0, bin_.b_end, bin_.t_end, bin_.length, bin_.g0, bin_.n_chunks]
        words += merge_entries(bins, len(lens), sig)
    words += [0] * counter_words(sms, num_kv_heads)
    words[:8] = header(lens, sms, num_kv_heads, num_new_tokens, sig, min_process_len, max_num_batch, window)
    return words


def header(
    lens: Sequence[int],
    sms: int,
    num_kv_heads: int,
    num_new_tokens: int,
    sig: int,
    min_process_len: int,
    max_num_batch: int,
    window: int | None,
) -> list[int]:
    """Words 0-7: (tile budget of a bin + 1, CTAs) of variant 1, heads, batch limit, bytes, max chunks, signature."""
    n = num_bins(sms, num_kv_heads, 1)
    tiles = [hi - lo for lo, hi in (tile_range(length, num_new_tokens, window) for length in lens)]
    total = sum(TILE_COST * t + SEGMENT_COST for t in tiles)
    step, per = cut_step(total, n, floor_tiles(1, min_process_len), max(tiles, default=1))
    budget = -(-step // (per * TILE_COST))
    most = -(-max(tiles, default=1) * TILE_COST * per // step) + 1
    size = 4 * (variant_offset(sms, num_kv_heads, NUM_VARIANTS) - HEADER_WORDS)
    return [
        budget + 1,
        n * num_kv_heads,
        num_kv_heads,
        max_num_batch,
        size,
        min(n, most),
        sig,
        LAYOUT_VERSION,
    ]
