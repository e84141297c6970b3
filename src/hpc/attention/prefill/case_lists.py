"""The named inputs of prefill attention: a grid that covers every pair of choices, the measured rows, the tiny ones."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

from hpc.bench import traces
from hpc.common.operator import Case


@dataclass(frozen=True)
class PrefillCase:
    """One call. `lens` are (new tokens, keys with the new ones) of each request."""

    lens: tuple[tuple[int, int], ...]
    q_heads: int = 8
    kv_heads: int = 1
    head_dim: int = 128
    v_dim: int | None = None  # None: head_dim
    page_size: int = 64  # 0: ragged keys, no cache
    dtype: str = "bf16"  # "bf16" or "fp8"
    quant_type: int = 1  # fp8: 1 one scale per tensor, 0 one per key token and per value head
    layout: str = "NHD"  # "NHD", "HND" or "joint"
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    causal: bool = True
    extra_rows: int = 0  # rows of q behind the last request

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of q."""
        return sum(n for n, _ in self.lens) + self.extra_rows


def prompts(*lens: int) -> tuple[tuple[int, int], ...]:
    """Whole prompts: every key is new."""
    return tuple((n, n) for n in lens)


BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "one": prompts(200),
    "mixed": ((100, 357), (1, 65), (63, 64), (64, 64), (129, 500), (7, 7), (0, 40), (1, 1), (0, 0)),
    "chunks": ((128, 640), (130, 131), (1, 700), (16, 333)),
    "short keys": (
        (40, 10),
        (200, 150),
        (3, 0),
        (5, 5),
    ),  # fewer keys than new tokens: the first rows see none
    "many": tuple((i * 13 % 23, i * 13 % 23 + i * 7 % 90) for i in range(70)),
}
TARGETS: dict[str, tuple[tuple[int, int], ...]] = {
    "1x8K": prompts(8192),
    "4x8K": prompts(*[8192] * 4),
    "16x2K": prompts(*[2048] * 16),
    "1x32K": prompts(32768),
    "4x2K over 16K": ((2048, 18432),) * 4,
}
SHORT: dict[str, tuple[tuple[int, int], ...]] = {
    "1x128": prompts(128),
    "1x512": prompts(512),
    "8x512": prompts(*[512] * 8),
    "64x128": prompts(*[128] * 64),
}


@functools.cache
def interpret_cases() -> tuple[Case, ...]:
    """Tiny ones, for Triton's interpreter."""
    mixed = ((20, 77), (1, 33), (7, 7), (0, 5), (40, 90))
    rows = {
        "bf16": PrefillCase(mixed, 4, 1, 32, page_size=16),
        "bf16 12/2 heads, HND, page 8": PrefillCase(mixed, 12, 2, 32, page_size=8, layout="HND"),
        "bf16 joint, page 128, d24": PrefillCase(((30, 140),), 5, 1, 24, page_size=128, layout="joint"),
        "bf16 window": PrefillCase(((70, 200), (1, 90)), 2, 1, 32, window=50),
        "bf16 cap, sinks, extra rows": PrefillCase(mixed, 4, 2, 32, logit_cap=1.5, sinks=True, extra_rows=9),
        "bf16 not causal": PrefillCase(mixed, 2, 1, 32, causal=False),
        "bf16 not causal, window": PrefillCase(((20, 150),), 2, 1, 32, causal=False, window=30),
        "bf16 short keys": PrefillCase(BATCHES["short keys"], 2, 1, 32, page_size=16),
        "bf16 192/128": PrefillCase(((20, 70),), 2, 1, 192, 128),
        "ragged": PrefillCase(prompts(20, 0, 1, 70), 4, 2, 32, page_size=0, extra_rows=3),
        "ragged window sinks": PrefillCase(prompts(20, 90), 4, 2, 32, page_size=0, window=20, sinks=True),
        "fp8": PrefillCase(mixed, 4, 1, 32, page_size=16, dtype="fp8"),
        "fp8 per token": PrefillCase(((10, 70), (3, 40)), 4, 2, dtype="fp8", quant_type=0),
    }
    return tuple(Case(name, frozenset({"interpret", "demo"}), params) for name, params in rows.items())


def _case(text: str, lens: Any, tags: str, heads: tuple[int, int], dtype: str, **rest: Any) -> Case:
    params = PrefillCase(tuple(lens), *heads, dtype=dtype, **rest)
    return Case(f"{dtype} {heads[0]}/{heads[1]} {text}", frozenset(tags.split()), params)


BOTH = tuple(itertools.product(("fp8", "bf16"), ((64, 8), (8, 1))))


@functools.cache
def target_cases() -> tuple[Case, ...]:
    """Rows with a stated target, and the short prompts that decide the time to the first token."""
    return tuple(
        _case(name, lens, "bench target", heads, dtype)
        for dtype, heads in BOTH
        for name, lens in {**TARGETS, **SHORT}.items()
    )


@functools.cache
def bench_cases() -> tuple[Case, ...]:
    """Further measured rows: prompts drawn from production traces, other pages and head dims."""
    rows: list[Case] = []
    for dtype, heads in BOTH:
        for trace in traces.BUILTIN:
            drawn = [request.prompt for request in random.Random(0).choices(traces.load(trace), k=16)]
            rows.append(_case(f"16 from {trace} trace", prompts(*drawn), "bench", heads, dtype))
        rows.append(_case("4x8K page 16", TARGETS["4x8K"], "bench", heads, dtype, page_size=16))
    for dtype, dim in itertools.product(("fp8", "bf16"), (64, 256)):
        rows.append(_case(f"4x8K head_dim {dim}", TARGETS["4x8K"], "bench", (64, 8), dtype, head_dim=dim))
    return tuple(rows)


@functools.cache
def split_cases() -> tuple[Case, ...]:
    """Few new tokens over a long context, which fill few multiprocessors unless keys are cut into parts. In the last
    rows the page table is wide for the sake of a request without a token: what the parts cost a short prompt."""
    rows: list[Case] = []
    for dtype in ("fp8", "bf16"):
        for tokens, keys in ((17, 8192), (17, 32768), (17, 131072), (128, 8192), (128, 32768), (128, 131072)):
            rows.append(_case(f"{tokens} over {keys // 1024}K", ((tokens, keys),), "bench", (8, 1), dtype))
        rows.append(_case("4x17 over 32K", ((17, 32768),) * 4, "bench", (8, 1), dtype))
        rows.append(_case("256 over 32K", ((256, 32768),), "bench", (8, 1), dtype))
        rows.append(_case("17 over 32K", ((17, 32768),), "bench", (64, 8), dtype))
        rows.append(_case("128 over 32K", ((128, 32768),), "bench", (64, 8), dtype))
        rows.append(_case("64, 1 over 32K", ((64, 64), (1, 32768)), "bench", (8, 1), dtype))
        for tokens in (128, 512):
            rows.append(
                _case(f"{tokens}, 0 over 32K", ((tokens, tokens), (0, 32768)), "bench", (8, 1), dtype)
            )
    return tuple(rows)


# values that occur twice are drawn twice as often: the shapes of most models
AXES: dict[str, tuple[Any, ...]] = {
    "group": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64),
    "page_size": (0, 4, 8, 16, 32, 64, 128, 256, 16, 64, 64, 128),
    "dims": ((64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128),
             (64, 64), (128, 128), (128, 128), (128, 128)),
    "kv_heads": (1, 2, 4),
    "batch": tuple(BATCHES),
    "format": ("bf16", "fp8", "fp8 per token"),
    "layout": ("NHD", "HND", "joint"),
    "mask": ("causal", "causal", "window", "cap", "sinks", "window cap sinks", "full", "full window"),
    "extra_rows": (0, 37),
}  # fmt: skip


def _legal(row: dict[str, Any]) -> bool:
    head_dim, v_dim = row["dims"]
    if row["page_size"] == 0 and (row["format"] != "bf16" or row["layout"] != "NHD"):
        return False
    if row["format"] == "fp8 per token" and (head_dim, v_dim, row["layout"], row["page_size"] >= 32) != (
        128, 128, "NHD", True,
    ):  # fmt: skip
        return False  # the scales of this format have a place in such caches only
    if row["layout"] == "joint" and head_dim != v_dim:
        return False
    return bool(row["group"] * row["kv_heads"] <= 64)


def covering() -> list[dict[str, Any]]:
    """Rows such that every legal pair of values of two axes occurs in one: greedy, the best of some random rows at a
    time, each grown around a pair that is still missing. The same rows on every machine."""
    names, generator = list(AXES), random.Random(0)

    def pairs(row: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    missing = [(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in AXES[a] for y in AXES[b]]
    rows: list[dict[str, Any]] = []
    left = set(missing)
    for pair in missing:
        if pair not in left:
            continue
        a, x, b, y = pair
        candidates = ({n: generator.choice(AXES[n]) for n in names} | {a: x, b: y} for _ in range(200))
        usable = list(itertools.islice((row for row in candidates if _legal(row)), 24))
        if usable:  # else the pair itself is not legal
            rows.append(max(usable, key=lambda row: len(pairs(row) & left)))
            left -= pairs(rows[-1])
    return rows


def _from_row(number: int, row: dict[str, Any]) -> Case:
    (head_dim, v_dim), mask, fmt, page = row["dims"], row["mask"], row["format"], row["page_size"]
    lens = BATCHES[row["batch"]]
    params = PrefillCase(
        prompts(*(n for n, _ in lens)) if page == 0 else lens, row["group"] * row["kv_heads"], row["kv_heads"],
        head_dim, v_dim, page, dtype=fmt[:4].strip(), quant_type=0 if "token" in fmt else 1, layout=row["layout"],
        window=100 if "window" in mask else None, logit_cap=5.0 if "cap" in mask.split() else None,
        sinks="sinks" in mask, causal="full" not in mask, extra_rows=row["extra_rows"],
    )  # fmt: skip
    name = (
        f"{number:03d} {fmt} {params.q_heads}/{params.kv_heads} d{head_dim}/{v_dim} page {page} {row['layout']} "
        f"{mask} {row['batch']}"
    )
    return Case(name + (" extra rows" if params.extra_rows else ""), frozenset({"gpu"}), params)


def _special() -> dict[str, PrefillCase]:
    """What the grid has no axis for."""
    long = ((129, 4097), (1, 32768), (300, 9000))
    return {
        "long, bf16 64/8": PrefillCase(long, 64, 8),
        "long, fp8 64/8": PrefillCase(long, 64, 8, dtype="fp8"),
        "window of 1": PrefillCase(((300, 300), (64, 90)), 8, 1, window=1),
        "window beyond every length": PrefillCase(((300, 300),), 8, 1, window=10000),
        "28/4 heads": PrefillCase(BATCHES["mixed"], 28, 4),
        "40/8 heads, fp8": PrefillCase(BATCHES["mixed"], 40, 8, dtype="fp8"),
        "17 over 20K, bf16 8/1, sinks": PrefillCase(
            ((17, 20000), (0, 40), (3, 0)), 8, 1, sinks=True, extra_rows=5
        ),
        "17 over 20K, fp8 8/1, window": PrefillCase(((17, 20000), (1, 700)), 8, 1, dtype="fp8", window=5000),
        "500 requests": PrefillCase(tuple((i % 5, i % 5 + i % 60) for i in range(500)), 8, 1),
    }


def sm90_shapes() -> dict[str, PrefillCase]:
    """What the SM90 kernels take: each mask with some heads, page size and layout. Tests put every batch in place of
    the lengths, so that a kernel is compiled once for all of them."""
    masks: dict[str, dict[str, Any]] = {
        "causal": {"q_heads": 64, "kv_heads": 8}, "window": {"window": 100, "page_size": 16},
        "cap": {"logit_cap": 5.0, "q_heads": 12, "kv_heads": 2, "page_size": 128}, "sinks": {"sinks": True,
        "q_heads": 5, "layout": "HND"}, "window cap sinks": {"window": 300, "logit_cap": 5.0, "sinks": True,
        "q_heads": 28, "kv_heads": 4, "page_size": 32, "layout": "joint"}, "full": {"causal": False, "page_size": 256},
        "full window": {"causal": False, "window": 70, "q_heads": 4, "kv_heads": 4},
        "group 64": {"q_heads": 64, "layout": "HND", "page_size": 128},
    }  # fmt: skip
    shapes = {
        f"{dtype} {mask}": PrefillCase(BATCHES["one"], dtype=dtype, **options)
        for dtype, (mask, options) in itertools.product(("bf16", "fp8"), masks.items())
    }
    for page in (16, 32):
        shapes[f"fp8 page {page}"] = PrefillCase(BATCHES["one"], 8, 1, page_size=page, dtype="fp8")
    shapes["fp8 window page 128"] = PrefillCase(BATCHES["one"], 1, 1, page_size=128, dtype="fp8", window=100)
    shapes["bf16 d64"] = PrefillCase(BATCHES["one"], 8, 2, 64)
    shapes["bf16 d256"] = PrefillCase(BATCHES["one"], 16, 2, 256)
    shapes["bf16 d64 window page 16"] = PrefillCase(BATCHES["one"], 12, 4, 64, page_size=16, window=50)
    return shapes


@functools.cache
def gpu_cases() -> tuple[Case, ...]:
    """The full grid."""
    special = tuple(Case(name, frozenset({"gpu"}), params) for name, params in _special().items())
    return special + tuple(_from_row(number, row) for number, row in enumerate(covering()))
