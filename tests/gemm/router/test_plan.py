"""The choice of a plan: legal for every call, measured where there is a measurement, no empty work."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from hpc.gemm.router import cases, plan
from hpc.gemm.router.plan import STEP, Key, Plan

H200 = "NVIDIA H200"
SHAPES = (*cases.SHAPES, *cases.ODD_SHAPES, (2048, 4096), (4096, 16384), (64, 32768), (16, 16))
TOKENS = (
    1,
    2,
    3,
    5,
    8,
    9,
    16,
    17,
    31,
    33,
    64,
    65,
    100,
    128,
    200,
    500,
    1000,
    1024,
    5000,
    8192,
    20000,
    131072,
    1 << 20,
)


@pytest.mark.parametrize("gpu", [H200, "another"])
@pytest.mark.parametrize("terms", [2, 3])
def test_every_call_has_a_legal_plan(gpu: str, terms: int) -> None:
    for (n, k), m, aligned, sm90 in itertools.product(SHAPES, TOKENS, (True, False), (True, False)):
        key = Key(gpu, sm90, 132, m, n, k, terms, aligned)
        chosen = plan.choose(key)
        assert plan.is_legal(chosen, key) is None, (key, chosen, plan.is_legal(chosen, key))


def test_splits_cover_k_and_none_is_empty() -> None:
    for (n, k), m in itertools.product(SHAPES, TOKENS):
        chosen = plan.choose(Key(H200, True, 132, m, n, k))
        if chosen.kernel == "tile":
            steps = plan.ceil(k, STEP)
            bounds = [s * steps // chosen.splits for s in range(chosen.splits + 1)]
            assert bounds[0] == 0 and bounds[-1] == steps
            assert all(a < b for a, b in itertools.pairwise(bounds)), (k, chosen)
        if chosen.kernel == "small":
            span = chosen.warps * chosen.chunks * 32
            assert (chosen.splits - 1) * span < k <= chosen.splits * span


def test_the_table_is_measured_legal_and_sorted() -> None:
    table = plan.table(H200)
    assert set(table) <= set(cases.SHAPES)
    for (n, k), rows in table.items():
        tokens = [m for m, _ in rows]
        assert tokens == sorted(set(tokens)) and set(tokens) <= set(cases.TOKENS)
        for m, chosen in rows:
            key = Key(H200, True, 132, m, n, k)
            assert plan.is_legal(chosen, key) is None
            assert plan.choose(key) == chosen


def test_the_smallest_measured_count_at_or_above_m_decides() -> None:
    table = plan.table(H200)[192, 4096]
    for (below, _), (m, chosen) in itertools.pairwise(table):
        for asked in {below + 1, m}:
            assert plan.choose(Key(H200, True, 132, asked, 192, 4096)) == chosen
    beyond = Key(H200, True, 132, table[-1][0] + 1, 192, 4096)
    assert plan.choose(beyond) == plan.analytic(beyond)


def test_the_table_file_is_what_dump_writes() -> None:
    text = (plan.Path(plan.__file__).parent / "configs" / "NVIDIA_H200.json").read_text(encoding="utf-8")
    entries = {
        (entry["n"], entry["k"]): {r["m"]: (Plan(**r["plan"]), r["time_us"]) for r in entry["plans"]}
        for entry in json.loads(text)
    }
    assert plan.dump(entries) == text


def test_few_tokens_need_no_matrix_unit_and_few_rows_are_split() -> None:
    key = Key("another", True, 132, 1, 192, 4096)
    assert plan.choose(key).kernel == "row"
    assert plan.choose(replace(key, m=16)).kernel == "small" and plan.choose(replace(key, m=16)).splits > 1
    assert plan.choose(replace(key, m=8192)).splits == 1
    assert plan.choose(replace(key, m=64, aligned=False)).kernel == "block"
    assert plan.choose(replace(key, m=64, sm90=False)).kernel == "block"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Plan("row", 1, 1, 2), "one split"),
        (Plan("row", 1, 3), "weight rows"),
        (Plan("small", 8, 16, 3, 8, 2), "cover"),
        (Plan("small", 64, 16, 1, 8, 12), "registers"),
        (Plan("tile", 100, 64, 1, 8, 0, 4), "tiles are"),
        (Plan("tile", 128, 128, 1, 8, 0, 9), "shared memory"),
        (Plan("tile", 64, 32, 33, 4, 0, 4), "splits"),
        (Plan("block", 20, 16), "blocks of"),
        (Plan("block", 16, 16, 1, 3), "warps"),
    ],
)
def test_what_cannot_run_says_why(bad: Plan, why: str) -> None:
    reason = plan.is_legal(bad, Key(H200, True, 132, 1, 192, 4096))
    assert reason is not None and why in reason
