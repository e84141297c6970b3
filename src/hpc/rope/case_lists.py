"""The named inputs of the prologue: a grid that covers every pair of choices, the measured rows, the tiny ones."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

from hpc.common.operator import Case


@dataclass(frozen=True)
class RopeCase:
    """One call. `lens` are total KV lengths and `new` the new tokens of each request; a length of 0 with new tokens is
    a padded request."""

    lens: tuple[int, ...]
    new: tuple[int, ...]
    q_heads: int = 8
    kv_heads: int = 1
    head_dim: int = 128
    v_dim: int | None = None  # None: head_dim
    rotary_dim: int | None = None  # None: head_dim
    page_size: int = 64
    dtype: str = "bf16"  # "bf16" or "fp8"
    quant_policy: int = 1  # fp8: 1 dynamic query scales, 2 a fixed one
    norm_policy: int = 2
    is_prefill: bool = False
    neox: bool = True
    bf16_table: bool = False
    layout: str = "NHD"  # "NHD", "HND" or "joint"
    spare_rows: int = 0  # rows behind the last request's
    eps: float = 1e-6
    upper_max: float | None = None
    keep_k: bool = False
    keep_v: bool = False
    max_pos: int | None = None  # None: every position has its row

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def tokens(self) -> int:
        return sum(self.new) + self.spare_rows


HEADS = ((8, 1), (64, 8))
BOTH = tuple(itertools.product(("fp8", "bf16"), HEADS))


def decode_lens(batch: int) -> tuple[int, ...]:
    """Lengths that end at places spread over a page of 64, so that half a page is cleared on average."""
    return tuple(65 + i * 37 % 64 for i in range(batch))


def _case(text: str, tags: str, dtype: str, heads: tuple[int, int], lens: Any, new: Any, **rest: Any) -> Case:
    params = RopeCase(tuple(lens), tuple(new), *heads, dtype=dtype, **rest)
    return Case(f"{dtype} {heads[0]}/{heads[1]} {text}", frozenset(tags.split()), params)


@functools.cache
def bench_cases() -> tuple[Case, ...]:
    """Measured rows; norm, then rotation, as most models with QK-norm do."""
    rows: list[Case] = []
    for dtype, heads in BOTH:
        for batch in (1, 8, 16, 32, 64, 256):
            tags = "bench target" if batch in (1, 16, 64) else "bench"
            rows.append(_case(f"decode {batch}", tags, dtype, heads, decode_lens(batch), (1,) * batch))
        for text, lens, tags in (
            ("prefill 1x1K", (1024,), "bench"),
            ("prefill 1x8K", (8192,), "bench target"),
            ("prefill 8x1K", (1024,) * 8, "bench"),
            ("prefill 64x128", (128,) * 64, "bench"),
            ("prefill 4x8K", (8192,) * 4, "bench target"),
            ("prefill 16x8K", (8192,) * 16, "bench"),
        ):
            rows.append(_case(text, tags, dtype, heads, lens, lens, is_prefill=True))
        rows.append(_case("prefill 1x8K no norm", "bench", dtype, heads, (8192,), (8192,), is_prefill=True,
                          norm_policy=0))  # fmt: skip
        rows.append(_case("decode 64, 4 tokens", "bench", dtype, heads, decode_lens(64), (4,) * 64))
    for dtype in ("fp8", "bf16"):
        for dim in (64, 256):
            rows.append(_case(f"prefill 1x8K head_dim {dim}", "bench", dtype, (32, 8), (8192,), (8192,),
                              head_dim=dim, is_prefill=True))  # fmt: skip
        rows.append(_case("prefill 1x8K interleaved, 64 rotated", "bench", dtype, (32, 8), (8192,), (8192,),
                          rotary_dim=64, neox=False, is_prefill=True))  # fmt: skip
    return tuple(rows)


RAGGED = {"lens": (70, 33, 5, 0, 64, 17), "new": (3, 33, 0, 2, 1, 4)}  # the fourth is a padded request


@functools.cache
def interpret_cases() -> tuple[Case, ...]:
    """Tiny calls that touch every feature once; the demo takes the first two."""
    small: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 16, **RAGGED}
    rows = {
        "demo fp8 decode": RopeCase((200, 1, 65), (1, 1, 1), 4, 1, dtype="fp8"),
        "demo bf16 prefill": RopeCase((20, 3), (20, 2), 4, 1, is_prefill=True),
        "bf16 ragged, rotate then norm": RopeCase(**small, norm_policy=1, spare_rows=3),
        "bf16 interleaved, HND, no norm": RopeCase(**small, neox=False, layout="HND", norm_policy=0),
        "bf16 half rotated, kept K and V": RopeCase(**small, rotary_dim=16, keep_k=True, keep_v=True, spare_rows=1),
        "bf16 interleaved, half rotated, joint": RopeCase(**small, rotary_dim=16, neox=False, layout="joint"),
        "bf16 short bf16 table": RopeCase(**small, bf16_table=True, max_pos=20, norm_policy=1),
        "fp8 prefill, ragged": RopeCase(**small, dtype="fp8", is_prefill=True, spare_rows=3),
        "fp8 fixed query scale, kept K": RopeCase(**small, dtype="fp8", quant_policy=2, keep_k=True, norm_policy=0),
        "fp8 decode, 5 query heads, HND": RopeCase(
            **{**small, "q_heads": 5, "kv_heads": 1}, dtype="fp8", layout="HND", norm_policy=1, upper_max=240.0
        ),
        "fp8 3 rotated pairs of dim 24, v dim 40": RopeCase(
            **{**small, "head_dim": 24}, v_dim=40, rotary_dim=6, dtype="fp8", eps=1e-5
        ),
        "fp8 page 1, kept V": RopeCase(**{**small, "page_size": 1}, dtype="fp8", keep_v=True, neox=False),
        "fp8 page 100": RopeCase(**{**small, "page_size": 100}, dtype="fp8", is_prefill=True, norm_policy=0),
    }  # fmt: skip
    tags = {n: frozenset({"interpret", "demo"} if n.startswith("demo") else {"interpret"}) for n in rows}
    return tuple(Case(name, tags[name], params) for name, params in rows.items())


BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "decode": ((300, 1, 65, 64, 63, 1000, 128, 4097), (1,) * 8),
    "decode padded": ((300, 77, 0, 64, 0, 0, 0, 9), (1,) * 8),
    "decode 3 tokens": ((300, 3, 65, 0, 63, 1000), (3,) * 6),
    "one prompt": ((1500,), (1500,)),
    "chunk": ((1500, 1), (37, 1)),
    "ragged": ((100, 357, 65, 64, 4097, 7, 5, 0), (100, 257, 1, 0, 129, 7, 2, 3)),
    "many": (tuple(1 + n * 37 % 301 for n in range(200)), tuple(min(1 + n * 37 % 301, n % 5) for n in range(200))),
}  # fmt: skip

# values that occur twice are drawn twice as often: the shapes of most models
AXES: dict[str, tuple[Any, ...]] = {
    "heads": (
        (8, 1),
        (64, 8),
        (1, 1),
        (5, 1),
        (6, 2),
        (12, 4),
        (28, 4),
        (40, 8),
        (96, 8),
        (7, 3),
        (32, 32),
        (64, 8),
    ),
    "dims": (
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 128),
        (256, 256),
        (128, 64),
        (128, 128),
        (128, 128),
    ),
    "rotated": ("all", "all", "half", "a quarter"),
    "page_size": (1, 16, 32, 64, 128, 256, 48, 64),
    "batch": tuple(BATCHES),
    "format": ("bf16", "fp8", "fp8 fixed"),
    "norm_policy": (0, 1, 2),
    "is_prefill": (True, False),
    "neox": (True, False),
    "layout": ("NHD", "HND", "joint"),
    "bf16_table": (True, False),
    "keep": ("", "k", "v", "kv"),
}


def covering() -> list[dict[str, Any]]:
    """Rows such that every legal pair of values of two axes occurs in one: greedy over random rows, each grown around a
    pair that is still missing. The same rows on every machine."""
    names, generator = list(AXES), random.Random(0)

    def pairs(row: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    def legal(row: dict[str, Any]) -> bool:
        return row["layout"] != "joint" or row["dims"][0] == row["dims"][1]

    missing = [(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in AXES[a] for y in AXES[b]]
    rows: list[dict[str, Any]] = []
    left = set(missing)
    for pair in missing:
        if pair not in left:
            continue
        a, x, b, y = pair
        candidates = ({n: generator.choice(AXES[n]) for n in names} | {a: x, b: y} for _ in range(100))
        usable = list(itertools.islice((row for row in candidates if legal(row)), 16))
        if usable:  # else the pair itself is not legal
            rows.append(max(usable, key=lambda row: len(pairs(row) & left)))
            left -= pairs(rows[-1])
    return rows


def _from_row(number: int, row: dict[str, Any]) -> Case:
    (q_heads, kv_heads), (head_dim, v_dim), (lens, new) = row["heads"], row["dims"], BATCHES[row["batch"]]
    rotary = {"all": head_dim, "half": head_dim // 2, "a quarter": head_dim // 4}[row["rotated"]]
    params = RopeCase(
        lens, new, q_heads, kv_heads, head_dim, v_dim, rotary, row["page_size"], dtype=row["format"][:4].strip(),
        quant_policy=2 if "fixed" in row["format"] else 1, norm_policy=row["norm_policy"],
        is_prefill=row["is_prefill"], neox=row["neox"], bf16_table=row["bf16_table"], layout=row["layout"],
        spare_rows=number % 4, keep_k="k" in row["keep"], keep_v="v" in row["keep"],
    )  # fmt: skip
    name = (
        f"{number:03d} {row['format']} {q_heads}/{kv_heads} d{head_dim}/{v_dim} rotated {rotary} "
        f"page {row['page_size']} norm {row['norm_policy']} {'neox' if row['neox'] else 'pairs'} {row['layout']} "
        f"{row['batch']}"
    )
    return Case(name, frozenset({"gpu"}), params)


@functools.cache
def gpu_cases() -> tuple[Case, ...]:
    """The full grid."""
    return tuple(_from_row(number, row) for number, row in enumerate(covering()))
