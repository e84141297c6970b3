"""Plans and scratch as properties: every choice is legal, fits into shared memory, and depends on shapes alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hpc.moe import case_lists, plan, scratch
from hpc.moe.plan import Key

SIZES = [(4096, 192), (4096, 1536), (2048, 768), (512, 80), (192, 16), (7168, 2048), (64, 320), (6144, 64)]


def key(tokens: int, **fields: object) -> Key:
    base: dict[str, object] = {
        "num_tokens": tokens, "top_k": 8, "num_experts": 128, "experts_total": 128, "hidden": 4096, "inter": 192,
        "block_scales": False, "bf16_mul": True, "sms": 132, "sm90": True, "hardware_fp8": True,
    }  # fmt: skip
    return Key(**{**base, **fields})  # type: ignore[arg-type]


KEYS = [
    key(
        tokens,
        hidden=h,
        inter=i,
        block_scales=block,
        num_experts=e,
        experts_total=e * ranks,
        sm90=sm90,
        top_k=k,
    )
    for tokens, (h, i), block, (e, ranks), sm90, k in itertools.product(
        (1, 3, 17, 130, 1024, 5000),
        SIZES,
        (False, True),
        ((1, 1), (24, 8), (1024, 1)),
        (False, True),
        (1, 8, 22),
    )
]


def test_every_choice_is_legal() -> None:
    for each in KEYS:
        chosen = plan.analytic(each)
        assert plan.is_legal(chosen, each) is None, (each, plan.is_legal(chosen, each))


def test_stages_fit_into_shared_memory() -> None:
    for each in KEYS:
        chosen = plan.analytic(each)
        for product, up in ((chosen.up, True), (chosen.down, False)):
            if product is not None:
                used = product.stages * plan.stage_bytes(each, chosen.tile, product, up) + plan.reserve(
                    chosen.tile, up
                )
                assert product.stages >= 2
                assert used * product.per_sm <= plan.SM_SHARED


def test_scratch_fields_do_not_overlap() -> None:
    """Fields follow one another on ALIGN bytes, each as large as what the kernels write."""
    for each in KEYS:
        chosen = plan.analytic(each)
        layout = scratch.layout(each, chosen)
        tiny = chosen.backend == "tiny"
        needed = {
            "counts": 0 if chosen.fused_index else 4 * layout.num_chunks * scratch.expert_bins(each),
            "totals": 4 * scratch.expert_bins(each),
            "expert": 4 * layout.max_tiles, "start": 4 * layout.max_tiles, "rows": 4 * layout.max_tiles,
            "num_tiles": 8, "pair": 4 * each.pairs, "row": 4 * each.pairs, "counters": 4 * layout.num_counters,
            "act": each.pairs * each.inter, "act_scale": 4 * each.pairs * each.groups * each.block_scales,
            "parts": 0, "y": 0 if tiny else 2 * each.pairs * each.hidden,
        }  # fmt: skip
        starts = [getattr(layout, name) for name in needed]
        assert starts == sorted(starts)
        for (name, size), end in zip(needed.items(), [*starts[1:], layout.size], strict=True):
            assert getattr(layout, name) % scratch.ALIGN == 0
            assert end - getattr(layout, name) >= size, (each, name)


def test_tiles_of_any_routing_fit() -> None:
    """ceil(count / tile) summed over experts never exceeds max_tiles, whatever the counts."""
    for each in KEYS:
        chosen = plan.analytic(each)
        layout = scratch.layout(each, chosen)
        for busy in (1, each.num_experts // 2 + 1, each.num_experts):
            ones = min(busy - 1, each.pairs - 1)  # experts with a single row, the rest of the pairs to one
            tiles = ones + plan.ceil_div(each.pairs - ones, chosen.tile)
            assert tiles <= layout.max_tiles


def test_the_sm90_kernels_name_what_they_cannot_do() -> None:
    assert plan.analytic(key(64, sm90=False)).backend == "portable"
    assert plan.analytic(key(64, inter=80)).backend == "sm90"
    assert plan.analytic(key(64, inter=80, block_scales=True)).backend == "portable"
    why = plan.is_legal(plan.analytic(key(64)), key(64, inter=80, block_scales=True))
    assert why is not None and "multiple of 64" in why


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tile": 24}, "tile"),
        ({"backend": "cuda"}, "unknown backend"),
        ({"chunk": 48}, "power of two"),
        ({"up": None}, "no up product"),
        ({"backend": "tiny"}, "no sizes"),
    ],
)
def test_illegal_plans_say_why(change: dict[str, object], text: str) -> None:
    chosen = replace(plan.analytic(key(64)), **change)  # type: ignore[arg-type]
    why = plan.is_legal(chosen, key(64))
    assert why is not None and text in why


def test_long_inputs_run_in_passes_of_bounded_scratch() -> None:
    """Scratch follows the tokens of a pass, not those of the call, and not the number of ranks."""
    for tokens, top_k, hidden, inter in (
        (80000, 8, 7168, 2048),
        (400000, 22, 128, 128),
        (32768, 8, 4096, 192),
    ):
        step = scratch.chunk_tokens(tokens, top_k, hidden, inter)
        part = key(step, top_k=top_k, hidden=hidden, inter=inter, num_experts=16, experts_total=256)
        size = scratch.layout(part, plan.analytic(part)).size
        assert size <= 1.2 * scratch.SCRATCH_LIMIT + part.sms * 4 * 128 * 128 * 4
        assert step % 128 == 0 or step == tokens
        assert plan.ceil_div(tokens, step) * top_k * step < 2**31


def test_plans_do_not_depend_on_the_rank_count_given_as_zero() -> None:
    assert key(64, experts_total=0).rows_per_expert == 64 * 8


def test_measured_shapes_use_the_sm90_kernels() -> None:
    for case in case_lists.target_cases():
        p = case.params
        chosen = plan.analytic(key(p.tokens, num_experts=p.experts, experts_total=p.experts, hidden=p.hidden,
                                 inter=p.inter, block_scales=p.block))  # fmt: skip
        assert chosen.backend == ("tiny" if p.tokens <= 2 and p.inter <= 256 else "sm90")


def test_alternatives_are_legal_and_differ() -> None:
    for each in KEYS:
        for name, other in plan.alternatives(each).items():
            assert name in plan.ALTERNATIVES
            assert plan.is_legal(other, each) is None and other != plan.analytic(each)
    names = set(plan.alternatives(key(4096, num_experts=24, experts_total=24, inter=1536)))
    assert {"two", "shared", "two shared", "half tile", "portable", "pair 64"} <= names


def described(chosen: plan.Plan) -> str:
    """The name that a plan for many rows has among the alternatives."""
    assert chosen.up is not None
    if chosen.up.pair:
        return f"pair {chosen.up.fresh}"
    shared = "shared" if chosen.up.shared_order else "runs"
    return f"two {shared}" if chosen.up.per_sm == 2 else shared


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Hy3 EP8", (*["shared"] * 5, "pair 128", "pair 128", "pair 128")),
        ("Hy3 EP8 block", ("shared", "runs", "runs", *["pair 64"] * 5)),
        ("Hy3 TP8", ["two shared"] * 8),
        ("Qwen3-235B TP8", (*["two shared"] * 6, "pair 64", "pair 128")),
        ("Qwen3-30B", (*["shared"] * 5, "two shared", "pair 128", "pair 128")),
        ("Qwen3-30B block", (*["two shared"] * 5, "pair 64", "pair 64", "pair 64")),
    ],
)
def test_the_choice_is_the_fastest_measured(name: str, expected: Sequence[str]) -> None:
    """What was fastest for 4, 32, 64, 128, 256, 512, 1024 and 4096 tokens of those with an error within 5e-3."""
    experts, hidden, inter, block = case_lists.SHAPES[name]
    for tokens, want in zip((4, 32, 64, 128, 256, 512, 1024, 4096), expected, strict=True):
        chosen = plan.analytic(key(tokens, num_experts=experts, experts_total=experts, hidden=hidden, inter=inter,
                                 block_scales=block))  # fmt: skip
        assert described(chosen) == want, tokens


def test_equal_runs_where_a_second_round_would_be_all_but_empty() -> None:
    """16 tokens of 192 experts: 280 items of uniform routing for 264 programs."""
    for tokens, want in ((8, "two shared"), (16, "two runs"), (32, "two shared")):
        assert described(plan.analytic(key(tokens, num_experts=192, experts_total=192))) == want
