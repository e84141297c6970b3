"""The named inputs of decode attention: a grid that covers every pair of choices, the measured rows, the tiny ones."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpc.bench import traces
from hpc.common.operator import Case


@dataclass(frozen=True)
class DecodeCase:
    """One call. `lens` are total KV lengths, the new tokens included, whatever `new_kv_included` says."""

    lens: tuple[int, ...]
    q_heads: int = 8
    kv_heads: int = 1
    head_dim: int = 128
    v_dim: int | None = None  # None: head_dim
    page_size: int = 64
    dtype: str = "bf16"  # "bf16" or "fp8"
    quant_type: int = 1  # fp8: 1 one scale per tensor, 0 one per key token and per value head
    num_new_tokens: int = 1
    new_kv_included: bool = True
    layout: str = "NHD"  # "NHD", "HND" or "joint"
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    dynamic: bool = True

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def total_lens(self) -> tuple[int, ...]:
        """Lengths that the call sees: without `new_kv_included` no request is shorter than its new tokens."""
        least = 0 if self.new_kv_included else self.num_new_tokens
        return tuple(max(least, length) for length in self.lens)


# performance targets are stated for these, at 8/1 and 64/8 heads, FP8 and BF16
DISTRIBUTIONS: dict[str, list[int]] = {
    "64x0.5K": [512] * 64,
    "64x4K": [4096] * 64,
    "32x0.125K+32x4K": [128] * 32 + [4096] * 32,
    "2x32K+30x4K": [32768] * 2 + [4096] * 30,
    "1x64K+15x4K": [65536] + [4096] * 15,
    "1x64K+31x4K": [65536] + [4096] * 31,
    "1x128K+31x4K": [131072] + [4096] * 31,
    "1x16K+15x64": [16384] + [64] * 15,
}
BOTH = tuple(itertools.product(("fp8", "bf16"), ((8, 1), (64, 8))))


def _case(text: str, lens: Iterable[int], tags: str, heads: tuple[int, int], dtype: str, **rest: Any) -> Case:
    params = DecodeCase(tuple(lens), q_heads=heads[0], kv_heads=heads[1], dtype=dtype, **rest)
    return Case(f"{dtype} {heads[0]}/{heads[1]} {text}", frozenset(tags.split()), params)


@functools.cache
def target_cases() -> tuple[Case, ...]:
    """Rows with a stated target."""
    return tuple(
        _case(name, lens, "bench target", heads, dtype)
        for dtype, heads in BOTH
        for name, lens in DISTRIBUTIONS.items()
    )


@functools.cache
def bench_cases() -> tuple[Case, ...]:
    """Further measured rows: extreme batches, other pages, groups, head dims, new tokens, production lengths."""
    rows: list[Case] = []

    def add(text: str, lens: list[int], heads: tuple[int, int], dtype: str, **rest: Any) -> None:
        rows.append(_case(text, lens, "bench", heads, dtype, **rest))

    for dtype, heads in BOTH:
        for size in (4, 32, 128):
            add(f"1x{size}K", [size * 1024], heads, dtype)
        for batch in (256, 512):
            add(f"{batch}x2K", [2048] * batch, heads, dtype)
        for page in (16, 128):
            add(f"64x4K page {page}", [4096] * 64, heads, dtype, page_size=page)
        add("64x4K 4 new tokens", [4096] * 64, heads, dtype, num_new_tokens=4)
        for trace in traces.BUILTIN:
            add(f"64 from {trace} trace", _drawn(trace), heads, dtype)
    for dtype in ("fp8", "bf16"):
        for heads in ((8, 8), (32, 8), (96, 8), (64, 4)):
            add(f"64x4K group {heads[0] // heads[1]}", [4096] * 64, heads, dtype)
        for dim in (64, 256):
            add(f"64x4K head_dim {dim}", [4096] * 64, (64, 8), dtype, head_dim=dim)
        for heads in ((8, 1), (12, 1), (16, 1)):
            add("16x8K 4 new tokens", [8192] * 16, heads, dtype, num_new_tokens=4)
        add("1x64K 4 new tokens", [65536], (64, 8), dtype, num_new_tokens=4)
    return tuple(rows)


def _drawn(trace: str) -> list[int]:
    return traces.draw_batch(traces.load(trace), 64, seed=0)


@functools.cache
def interpret_cases() -> tuple[Case, ...]:
    """Tiny calls that touch every feature once; the demo takes the first two."""
    rows = {
        "demo fp8": DecodeCase((200, 1, 65), 4, 1, dtype="fp8"),
        "demo bf16": DecodeCase((200, 1, 65), 4, 1),
        "lengths around a tile": DecodeCase((0, 1, 63, 64, 65, 130), 4, 1, 32),
        "3 new tokens, fewer keys": DecodeCase((70, 2, 5), 4, 2, 32, num_new_tokens=3, new_kv_included=False),
        "group 12, 4 new tokens": DecodeCase((140, 66), 12, 1, 32, num_new_tokens=4, dynamic=False),
        "v dim unlike q dim, HND": DecodeCase((100, 7), 6, 2, 40, 24, layout="HND"),
        "page 1, joint": DecodeCase((80, 3), 4, 1, 32, page_size=1, layout="joint"),
        "page 16, window, cap, sinks": DecodeCase(
            (200, 9, 0), 4, 1, 32, page_size=16, window=70, logit_cap=2.0, sinks=True
        ),
        "page 256, window, 2 new tokens": DecodeCase(
            (400, 64), 4, 1, 32, page_size=256, window=33, num_new_tokens=2
        ),
        "fp8 static, new kv not included": DecodeCase(
            (130, 70), 4, 1, 32, dtype="fp8", new_kv_included=False, dynamic=False
        ),
        "fp8 per token": DecodeCase((100, 65), 4, 2, dtype="fp8", quant_type=0, page_size=32),
    }
    tags = {
        name: frozenset({"interpret", "demo"} if name.startswith("demo") else {"interpret"}) for name in rows
    }
    return tuple(Case(name, tags[name], params) for name, params in rows.items())


BATCHES: dict[str, tuple[int, ...]] = {
    "edges": (0, 1, 2, 3, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513),
    "one": (1500,),
    "long and short": (9000, 10, 0, 100, 64),
    "mixed": (4096, 17, 1, 700, 64, 2049, 33),
    "many": tuple(n * 37 % 301 for n in range(200)),
}

# values that occur twice are drawn twice as often: the shapes of most models
AXES: dict[str, tuple[Any, ...]] = {
    "group": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64),
    "page_size": (1, 2, 4, 8, 16, 32, 64, 128, 256, 16, 32, 64, 128, 256),
    "dims": (
        (64, 64),
        (72, 72),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 192),
        (256, 256),
        (192, 128),
        (64, 128),
        (64, 64),
        (128, 128),
        (128, 128),
        (128, 128),
        (256, 256),
    ),
    "num_new_tokens": (1, 2, 3, 4, 5, 6, 8, 16),
    "kv_heads": (1, 2, 4, 8),
    "batch": tuple(BATCHES),
    "format": ("bf16", "fp8", "fp8 per token"),
    "layout": ("NHD", "HND", "joint"),
    "mask": ("causal", "window", "cap", "sinks", "window cap sinks"),
    "new_kv_included": (True, False),
    "dynamic": (True, False),
}


def _legal(row: dict[str, Any]) -> bool:
    head_dim, v_dim = row["dims"]
    if row["format"] == "fp8 per token" and (head_dim, row["layout"], row["page_size"] >= 32) != (
        128,
        "NHD",
        True,
    ):
        return False  # the scales of this format have a place in such caches only
    if row["layout"] == "joint" and head_dim != v_dim:
        return False
    return bool(row["group"] * row["kv_heads"] <= 128 and row["group"] * row["num_new_tokens"] <= 256)


def covering(
    axes: dict[str, tuple[Any, ...]], legal: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Rows such that every legal pair of values of two axes occurs in one: greedy, the best of some
    random rows at a time, each grown around a pair that is still missing. The same rows on every machine."""
    names, generator = list(axes), random.Random(0)

    def pairs(row: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    missing = [(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]]
    rows: list[dict[str, Any]] = []
    left = set(missing)
    for pair in missing:
        if pair not in left:
            continue
        a, x, b, y = pair
        candidates = ({n: generator.choice(axes[n]) for n in names} | {a: x, b: y} for _ in range(200))
        usable = list(itertools.islice((row for row in candidates if legal(row)), 24))
        if usable:  # else the pair itself is not legal
            rows.append(max(usable, key=lambda row: len(pairs(row) & left)))
            left -= pairs(rows[-1])
    return rows


def _from_row(number: int, row: dict[str, Any]) -> Case:
    (head_dim, v_dim), mask, fmt = row["dims"], row["mask"], row["format"]
    params = DecodeCase(
        BATCHES[row["batch"]], row["group"] * row["kv_heads"], row["kv_heads"], head_dim, v_dim, row["page_size"],
        dtype=fmt[:4].strip(), quant_type=0 if "token" in fmt else 1, num_new_tokens=row["num_new_tokens"],
        new_kv_included=row["new_kv_included"], layout=row["layout"], window=100 if "window" in mask else None,
        logit_cap=5.0 if "cap" in mask else None, sinks="sinks" in mask, dynamic=row["dynamic"],
    )  # fmt: skip
    path = "dynamic" if params.dynamic else "static"
    name = (
        f"{number:03d} {fmt} {params.q_heads}/{params.kv_heads} d{head_dim}/{v_dim} page {params.page_size} "
        f"s{params.num_new_tokens} {row['layout']} {mask} {row['batch']} {path}"
    )
    return Case(name if params.new_kv_included else f"{name} new", frozenset({"gpu"}), params)


def _special() -> dict[str, DecodeCase]:
    """What the grid has no axis for."""
    rows = {
        "batch 512": DecodeCase(tuple(n * 7 % 131 for n in range(512)), 32, 8),
        "batch 512, fp8, 2 new tokens": DecodeCase((130,) * 512, 64, 8, dtype="fp8", num_new_tokens=2),
        "length 131072, fp8": DecodeCase((131072, 1, 64), 8, 1, dtype="fp8"),
        "length 131072, static": DecodeCase((131072,), 8, 1, dynamic=False),
        "window of 1": DecodeCase((300, 64, 1, 0), 8, 1, window=1),
        "window beyond every length": DecodeCase((300, 64, 1, 0), 8, 1, dtype="fp8", window=10000),
        "28/4 heads": DecodeCase(BATCHES["mixed"], 28, 4),
        "40/8 heads, fp8": DecodeCase(BATCHES["mixed"], 40, 8, dtype="fp8"),
        "96/8 heads": DecodeCase(BATCHES["mixed"], 96, 8, num_new_tokens=4),
    }
    for s in (7, 9, 10, 11, 12, 13, 14, 15):
        dtype = "fp8" if s % 2 else "bf16"
        rows[f"{s} new tokens, {dtype}"] = DecodeCase(
            (300, 65, s - 1, 2), 8, 1, num_new_tokens=s, dtype=dtype
        )
    return rows


@functools.cache
def gpu_cases() -> tuple[Case, ...]:
    """The full grid."""
    special = tuple(Case(name, frozenset({"gpu"}), params) for name, params in _special().items())
    return special + tuple(_from_row(number, row) for number, row in enumerate(covering(AXES, _legal)))
