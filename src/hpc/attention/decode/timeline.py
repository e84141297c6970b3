"""The decode schedule laid out in time: which CTA bin reads which tiles, when it ends, what the slowest one
costs.

The time model has two numbers. All CTAs share the measured read rate, `READ_BYTES_PER_US` of 132 SMs, evenly; each pays
`SEGMENT_US` for every request it touches (query and metadata arrive by dependent loads, partial results are written).
The predicted tail is the end of the slowest row; launch and combine are left out. KV heads run side by side with
identical work, so one row stands for `num_kv_heads` CTAs.

Dynamic rows are the bins of `plan.build_bins`. Static rows are CTA slots: the chunks of the static split in
launch order, each taken by the slot that is free first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hpc.attention.decode import choose, plan

READ_BYTES_PER_US = 4.39e6
"""Measured read rate of an H200 (132 SMs) in bytes per microsecond: 4.39 TB/s."""
READ_SMS = 132
SEGMENT_US = 0.5
"""Cost of touching one more request, beyond its bytes."""


@dataclass(frozen=True)
class Machine:
    """What is decoded and on what: head counts, head sizes, bytes of a cache element, SMs and CTAs per SM."""

    num_q_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 128
    v_head_dim: int = 128
    kv_bytes: int = 1
    num_new_tokens: int = 1
    window: int | None = None
    num_sms: int = 132
    ctas_per_sm: int = 1
    min_process_len: int = 512

    def key(self, batch: int) -> choose.Key:
        """The call that the kernels' plan is chosen for."""
        return choose.Key(
            sm90=True,
            sms=self.num_sms,
            batch=batch,
            q_heads=self.num_q_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_dim=self.v_head_dim,
            page_size=plan.TILE,
            max_pages=1,
            num_new_tokens=self.num_new_tokens,
            quant_type=1 if self.kv_bytes == 1 else -1,
            window=self.window is not None,
        )

    def with_kernel_choice(self, batch: int) -> Machine:
        """The same with the CTAs per SM that the Hopper kernels use for a batch of this shape."""
        return replace(self, ctas_per_sm=choose.choose(self.key(batch)).ctas_per_sm)

    @property
    def num_rows(self) -> int:
        """Bins of the schedule, and CTA slots of a static launch, each standing for all KV heads."""
        return plan.num_bins(self.num_sms, self.num_kv_heads, self.ctas_per_sm - 1)

    @property
    def min_tiles(self) -> int:
        """Smallest work of a bin, in tiles."""
        return plan.floor_tiles(self.ctas_per_sm - 1, self.min_process_len)

    @property
    def tile_us(self) -> float:
        """Time in which one CTA reads the K and V of one tile, all CTAs reading at once."""
        tile_bytes = plan.TILE * (self.head_dim + self.v_head_dim) * self.kv_bytes
        rate = READ_BYTES_PER_US * self.num_sms / READ_SMS
        return tile_bytes * self.num_rows * self.num_kv_heads / rate


@dataclass(frozen=True)
class Segment:
    """Tiles [t0, t1) of one request, read by one row from `start_us` to `end_us`."""

    request: int
    t0: int
    t1: int
    start_us: float
    end_us: float

    @property
    def tiles(self) -> int:
        return self.t1 - self.t0


@dataclass(frozen=True)
class Timeline:
    """A schedule laid out in time: one list of segments per row."""

    kind: str
    rows: list[list[Segment]]
    num_requests: int
    row_us: list[float]

    @property
    def tail_us(self) -> float:
        """End of the slowest row."""
        return max(self.row_us, default=0.0)

    @property
    def balance(self) -> float:
        """Longest row over mean row: 1.0 is perfect, 2.0 means half of the machine waits."""
        mean = sum(self.row_us) / max(1, len(self.row_us))
        return self.tail_us / mean if mean > 0 else 1.0

    @property
    def tiles(self) -> int:
        return sum(segment.tiles for row in self.rows for segment in row)

    @cached_property
    def chunks(self) -> Counter[int]:
        """Number of pieces of each request."""
        return Counter(segment.request for row in self.rows for segment in row)

    @property
    def num_split(self) -> int:
        """Requests in more than one piece: those that a combine has to merge."""
        return sum(count > 1 for count in self.chunks.values())

    def as_json(self) -> dict[str, Any]:
        """Everything that the picture shows, as plain values; times in microseconds."""
        return {
            "rows": [
                [
                    {
                        "request": s.request,
                        "t0": s.t0,
                        "t1": s.t1,
                        "start_us": round(s.start_us, 3),
                        "end_us": round(s.end_us, 3),
                    }
                    for s in row
                ]
                for row in self.rows
            ],
            "tiles": self.tiles,
            "tail_us": round(self.tail_us, 3),
            "balance": round(self.balance, 4),
            "split_requests": self.num_split,
            "max_chunks": max(self.chunks.values(), default=0),
        }


def dynamic_timeline(lens: Sequence[int], machine: Machine) -> Timeline:
    """Lay out the bins of the dynamic schedule for total KV lengths `lens` (new tokens included)."""
    bins = plan.build_bins(lens, machine.num_new_tokens, machine.num_rows, machine.min_tiles, machine.window)
    rows = []
    for entry in bins:
        pieces = []
        for request in range(entry.b, min(entry.b_end + 1, len(lens))):
            low, high = plan.tile_range(lens[request], machine.num_new_tokens, machine.window)
            t0 = entry.t0 if request == entry.b else low
            t1 = entry.t_end if request == entry.b_end else high
            if t1 > t0:
                pieces.append((request, t0, t1))
        rows.append(_in_time(pieces, 0.0, machine))
    return _timeline("dynamic", rows, len(lens))


def static_timeline(
    lens: Sequence[int], machine: Machine, num_splits: int | None = None, min_chunk_tiles: int | None = None
) -> Timeline:
    """Lay out the static split: every request in up to `num_splits` chunks, launched in request order."""
    default_splits, default_tiles = choose.static_split(machine.key(len(lens)), machine.ctas_per_sm)
    num_splits = default_splits if num_splits is None else num_splits
    min_chunk_tiles = default_tiles if min_chunk_tiles is None else min_chunk_tiles
    rows: list[list[Segment]] = [[] for _ in range(machine.num_rows)]
    slots = [(0.0, row) for row in range(machine.num_rows)]
    for request, length in enumerate(lens):
        low, high = plan.tile_range(length, machine.num_new_tokens, machine.window)
        chunk = plan.static_chunk_tiles(high - low, num_splits, min_chunk_tiles)
        for t0 in range(low, high, chunk):
            free_us, row = heapq.heappop(slots)
            placed = _in_time([(request, t0, min(t0 + chunk, high))], free_us, machine)
            rows[row].extend(placed)
            heapq.heappush(slots, (placed[-1].end_us, row))
    return _timeline("static", rows, len(lens))


def _in_time(pieces: list[tuple[int, int, int]], start_us: float, machine: Machine) -> list[Segment]:
    segments = []
    for request, t0, t1 in pieces:
        end_us = start_us + SEGMENT_US + (t1 - t0) * machine.tile_us
        segments.append(Segment(request, t0, t1, start_us, end_us))
        start_us = end_us
    return segments


def _timeline(kind: str, rows: list[list[Segment]], num_requests: int) -> Timeline:
    return Timeline(kind, rows, num_requests, [row[-1].end_us if row else 0.0 for row in rows])


def headline(timeline: Timeline) -> str:
    """One line of numbers: tail, balance, splits."""
    most = max(timeline.chunks.values(), default=0)
    return (
        f"tail {timeline.tail_us:.1f} us, longest/mean {timeline.balance:.2f}, {timeline.tiles} tiles on "
        f"{len(timeline.rows)} rows, {timeline.num_split} of {timeline.num_requests} requests split "
        f"(at most {most} pieces)"
    )
