"""What a prefill call is (`Key`), how it may be run (`Plan`), the analytic choice, and the tile table on the host.

Pure Python on integers and flags; nothing here touches a tensor or a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

HEADER_WORDS = 8
ENTRY_WORDS = 8
LONGEST = 2**31 - 1 - 1024  # keys of a request: block ends stay in 32 bits

# Where `Plan.splits` is 0, calls are split whose page table has room for SPLIT_KEYS, if that gains a quarter of the
# time at least: see `parts`. The portable kernel is compiled for each number of parts, so it has few.
SPLIT_KEYS = 4096
MOST_SPLITS = 64
PORTABLE_SPLITS = (32, 8)
PLACED_REQUESTS = 16  # at most, where CTAs find their own tile: each walks all requests
# What a CTA takes beside its blocks of keys, and what joining takes, in the time of a block (1.3 to 1.5 us)
_START, _JOIN = 4, 3

TMA_HEAD_DIMS = (64, 128, 256)
TMA_PAGE_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Key:
    """Everything about a call that may change its plan. Row and request counts do not: they vary in serving."""

    sm90: bool
    sms: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    page_size: int  # 0: ragged keys, no cache
    quant_type: int  # -1 for BF16
    causal: bool = True
    window: bool = False
    logit_cap: bool = False
    sinks: bool = False
    return_lse: bool = False
    tma: bool = True  # addresses and strides of q, caches and output are multiples of 16 bytes
    positive_scale: bool = True

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def fp8(self) -> bool:
        return self.quant_type >= 0


@dataclass(frozen=True)
class Plan:
    """One way to run a call: tiles of `block_m` rows (`block_m / pack` tokens of `pack` heads), keys by `block_n`."""

    backend: Literal["sm90", "portable"]
    pack: int
    block_m: int
    block_n: int
    warps: int
    stages: int
    # Pack of calls whose tiles all run at once, 0 for the same way for all: each CTA then finds its own tile, without
    # the launch of the schedule.
    short_pack: int = 0
    # Parts that the keys of each tile are cut into; their results are joined by one more launch. 0: as `parts` says,
    # call by call.
    splits: int = 1
    # BF16 on SM90: finish a tile while the first scores of the next one are under way.
    overlap: bool = False

    @property
    def tile_tokens(self) -> int:
        return self.block_m // self.pack

    @property
    def short_tokens(self) -> int:
        """Tokens of a tile of a short call."""
        return self.block_m // self.short_pack

    @property
    def split_pack(self) -> int:
        """Heads of a tile that is cut into parts on SM90: as many as of a short call."""
        return self.short_pack or self.pack

    @property
    def split_tokens(self) -> int:
        """Tokens of a tile that is cut into parts."""
        return self.block_m // self.split_pack

    @property
    def short_kernel(self) -> bool:
        """Whether short calls have a kernel of their own. Overlap is of no use to them: a CTA has no next tile."""
        return self.short_pack > 0 and (self.overlap or self.short_pack != self.pack)


def pack_of(group: int, most: int) -> int:
    """Query heads that share a tile: the largest power of two that divides the group, `most` at most.

    Rows that would belong to missing tokens of a short request belong to further heads instead.
    """
    return min(group & -group, most)


def is_legal(plan: Plan, key: Key) -> str | None:
    """Why a plan cannot run a call, or None."""
    if plan.pack < 1 or plan.pack & (plan.pack - 1) or key.group % plan.pack:
        return f"pack {plan.pack}: it must be a power of two that divides the group {key.group}"
    sizes = (plan.block_m, plan.block_n)
    if any(size < 16 or size & (size - 1) for size in sizes) or plan.block_m % plan.pack:
        return f"tile {sizes}: sides must be powers of two from 16 on, and hold the packed heads"
    if plan.splits < 0 or plan.splits > MOST_SPLITS:
        return f"{plan.splits} splits: 0 to {MOST_SPLITS}"
    if plan.backend == "portable":
        return "the portable kernel has no overlap" if plan.overlap else None
    if not key.sm90:
        return "backend sm90 on another GPU"
    if key.page_size not in TMA_PAGE_SIZES:
        return f"page size {key.page_size}: the SM90 kernel reads pages of {TMA_PAGE_SIZES}"
    if key.head_dim not in TMA_HEAD_DIMS or key.v_dim != key.head_dim:
        return f"head dims {key.head_dim}/{key.v_dim}: the SM90 kernel has {TMA_HEAD_DIMS}, keys as values"
    if key.fp8 and (key.head_dim != 128 or key.quant_type != 1):
        return "FP8 on the SM90 kernel needs head_dim 128 and scales per tensor"
    if plan.overlap and (key.fp8 or key.head_dim > 128):
        return "overlap: BF16 with head dims 64 and 128; two tiles of Q must fit into shared memory"
    if not key.tma:
        return "an address or a stride is no multiple of 16 bytes"
    if not key.positive_scale:
        return "the SM90 kernel takes its maximum before scaling: the softmax scale must be positive"
    if plan.short_pack and pack_of(key.group, plan.short_pack) != plan.short_pack:
        return f"short pack {plan.short_pack}: it must be a power of two that divides the group {key.group}"
    keys = 64 if key.head_dim == 256 else 128
    if (plan.block_m, plan.block_n) != (128, keys) or max(plan.pack, plan.short_pack) > 64:
        return f"the SM90 kernel has tiles of 128 by {keys} here and packs 64 heads at most"
    return None


def choose(key: Key) -> Plan:
    """The plan for a call: the SM90 kernel where it is legal."""
    chosen = sm90(key)
    return chosen if is_legal(chosen, key) is None else portable(key)


def parts(tokens: int, batch: int, reach: int, chosen: Plan, key: Key) -> int:
    """Parts that the tiles of a call are cut into. `reach`: keys that a token may see by the page table's width and the
    window; the lengths are on the device, so a short context in a wide table is cut up too."""
    if chosen.splits or reach < SPLIT_KEYS:
        return max(chosen.splits, 1)
    pack = chosen.split_pack
    items = tiles_of(tokens, batch, chosen.split_tokens) * (key.q_heads // pack)
    if chosen.backend == "portable":
        return next((n for n in PORTABLE_SPLITS if items * n <= key.sms), 1)
    return _parts(items, -(-reach // chosen.block_n), key.sms)


@lru_cache(maxsize=4096)
def _parts(items: int, blocks: int, sms: int) -> int:
    """The number of parts with the least estimated time, in blocks, for items of so many blocks on `sms` CTAs at once.

    items * parts <= 2 sms, so scratch in fp32, outputs and lse of an item's `block_m` rows a part, stays below
    2 sms * block_m * (v_dim + 2) * 4 bytes: 17 MB on 132 multiprocessors for 128 columns.
    """

    def time(n: int) -> int:
        each = blocks if n == 1 else max(-(-blocks // n), 2)
        return -(-items * n // sms) * (_START + each) + _JOIN * (n > 1)

    best = min((n for n in range(1, MOST_SPLITS + 1) if n == 1 or items * n <= 2 * sms), key=time)
    return best if 4 * time(best) <= 3 * time(1) else 1


def sm90(key: Key) -> Plan:
    """The SM90 kernel for a call, legal or not: two consumers of 64 rows, two blocks of keys in flight.

    A block has 128 keys; 64 with a head dim of 256, whose output takes 128 registers a thread. Tiles of one head are
    faster in BF16, tiles of a whole group in FP8; those also keep a short call to few multiprocessors.
    """
    most = pack_of(key.group, 64)
    wide = key.head_dim > 128
    overlap = not key.fp8 and not wide
    return Plan("sm90", most if key.fp8 else 1, 128, 64 if wide else 128, 4, 2, most, 0, overlap)


def portable(key: Key) -> Plan:
    """The portable kernel for a call."""
    wide = max(key.head_dim, key.v_dim) > 128
    # 128 rows share each load of K and V; with a head dim over 128 the accumulators allow 64. Three blocks in flight:
    # the next one's copies run under this one's products. GPUs between SM80 and SM90 may have 99 KiB only, too little
    # for three blocks of 64 keys of 256.
    small = wide and not key.sm90
    pack, stages = pack_of(key.group, 16), 2 if small else 3
    return Plan("portable", pack, 64 if wide else 128, 32 if small else 64, 8, stages, splits=0)


def tiles_of(tokens: int, batch: int, tile_tokens: int) -> int:
    """Tiles of so many requests at most: ceil(n / t) = floor((n + t - 1) / t), and a sum of floors is no more than the
    floor of the sum."""
    return (tokens + batch * (tile_tokens - 1)) // tile_tokens


def bound(tokens: int, batch: int, tile_tokens: int) -> int:
    """Tiles of a call at most, the rows behind the last request counted as one request more."""
    return tiles_of(tokens, batch + 1, tile_tokens)


def is_short(tokens: int, batch: int, plan: Plan, key: Key) -> bool:
    """Whether each CTA has one work item at most, so that their order does not matter."""
    if not plan.short_pack or batch > PLACED_REQUESTS:
        return False
    return bound(tokens, batch, plan.short_tokens) * (key.q_heads // plan.short_pack) <= key.sms


def heaviest(window: int | None, tile_tokens: int, block_n: int) -> int:
    """Blocks that a tile visits at most under a window; what the schedule sorts by."""
    if window is None:
        return 1
    return (window + tile_tokens + block_n - 2) // block_n + 1


def tile_table(
    q_lens: Sequence[int], kv_lens: Sequence[int], tokens: int, tile_tokens: int, block_n: int, causal: bool = True,
    window: int | None = None,
) -> list[tuple[int, int, int, int, int, int]]:  # fmt: skip
    """The device's table: (first row, tokens, request, first token, start, keys) a tile, heaviest first."""
    rows = [*q_lens, tokens - sum(q_lens)]
    tiles, row = [], 0
    for b, (n, keys) in enumerate(zip(rows, [*kv_lens, 0], strict=True)):
        for first in range(0, n, tile_tokens):
            count = min(tile_tokens, n - first)
            end = min(max(keys - n + first + count, 0), keys) if causal else keys
            weight = -(-end // block_n)
            if window is not None:
                weight = min(weight, heaviest(window, tile_tokens, block_n))
            tiles.append((-weight, (row + first, count, b, first, keys - n, keys)))
        row += n
    return [entry for _, entry in sorted(tiles, key=lambda tile: tile[0])]
