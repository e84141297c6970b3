"""Tiles cover every token and head once; what the analytic choice gives is legal."""

from __future__ import annotations

import itertools

import pytest

from hpc.rope import case_lists, plan


@pytest.mark.parametrize("in_tile", [1, 2, 4, 8, 16, 32, 64])
def test_tiles_are_whole_and_waste_little(in_tile: int) -> None:
    for heads in range(1, 130):
        tokens, block = plan.tile(heads, in_tile)
        assert tokens * block == in_tile
        padded = -(-heads // block) * block
        assert padded < heads + block
        if heads % in_tile == 0 or heads & (heads - 1) == 0:
            assert padded == heads, "nothing is wasted where the sizes allow it"


def test_programs_cover_all() -> None:
    for tokens, heads, in_tile in itertools.product((0, 1, 5, 64, 1000), (1, 5, 8, 64), (1, 16, 64)):
        tile = plan.tile(heads, in_tile)
        count = plan.programs(tokens, heads, *tile)
        assert count * in_tile >= tokens * heads
        assert (count == 0) == (tokens == 0)


@pytest.mark.parametrize("unroll", [1, 2])
def test_every_query_head_has_one_place(unroll: int) -> None:
    for q_heads, in_tile in itertools.product(range(1, 100), (1, 4, 8, 16)):
        (tokens, heads), _ = plan.tiles(plan.Plan(in_tile, 2, unroll), q_heads, 1)
        assert tokens * heads == in_tile
        covered = [
            block * heads * unroll + part * heads + i
            for block in range(plan.programs(1, q_heads, 1, heads * unroll))
            for part in range(unroll)
            for i in range(heads)
        ]
        assert [head for head in covered if head < q_heads] == list(range(q_heads))


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("tokens", [0, 1, 64, 8192, 131072])
def test_the_choice_is_legal(dim: int, tokens: int) -> None:
    for heads in ((1, 1), (8, 1), (64, 8), (28, 4)):
        key = plan.Key(tokens, *heads, dim, dim)
        assert plan.is_legal(plan.choose(key), key) is None


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_sm90_kernel_takes_many_tokens_of_heads_that_a_warp_holds(dim: int) -> None:
    for heads, tokens in itertools.product((8, 12, 16, 28, 40, 64, 96), (1, 64, 8192, 131072)):
        if not plan.fits_warp(heads, dim, dim, dim, True, 1e-6):
            assert heads % (512 // dim)
            continue
        key = plan.Key(tokens, heads, max(1, heads // 8), dim, dim, True)
        chosen = plan.choose(key)
        assert plan.is_legal(chosen, key) is None
        assert bool(chosen.tokens) == (tokens >= 8192)
        if chosen.tokens:
            assert plan.is_legal(chosen, plan.Key(tokens, heads, 1, dim, dim)) is not None


def test_what_the_sm90_kernel_does_not_take() -> None:
    assert plan.fits_warp(8, 128, 128, 128, True, 1e-6)
    for heads, dims in ((5, (128, 128, 128)), (8, (96, 96, 96)), (8, (128, 64, 128)), (8, (128, 128, 64))):
        assert not plan.fits_warp(heads, *dims, True, 1e-6)
    assert not plan.fits_warp(8, 128, 128, 128, False, 1e-6) and not plan.fits_warp(
        8, 128, 128, 128, True, 0.0
    )
    key = plan.Key(8192, 8, 1, 128, 128, True)
    for wrong in (plan.Plan(8, 2, tokens=4), plan.Plan(3, 1, tokens=4), plan.Plan(16, 1, tokens=1),
                  plan.Plan(8, 1, tokens=1, steps=0), plan.Plan(8, 1, tokens=1, registers=32)):  # fmt: skip
        assert plan.is_legal(wrong, key) is not None


@pytest.mark.parametrize("case", case_lists.bench_cases(), ids=lambda case: case.name)
def test_the_choice_for_measured_cases(case: case_lists.Case) -> None:
    p = case.params
    key = plan.Key(p.tokens, p.q_heads, p.kv_heads, p.head_dim, p.value_dim)
    assert plan.is_legal(plan.choose(key), key) is None


@pytest.mark.parametrize(("heads", "warps"), [(0, 4), (3, 4), (16, 3), (512, 4), (64, 1)])
def test_what_is_not_legal(heads: int, warps: int) -> None:
    assert plan.is_legal(plan.Plan(heads, warps), plan.Key(8, 8, 1, 128, 128)) is not None


def test_unroll_is_1_or_2() -> None:
    assert plan.is_legal(plan.Plan(8, 2, 3), plan.Key(8, 8, 1, 128, 128)) is not None


def test_every_pair_of_choices_occurs_in_the_grid() -> None:
    rows = case_lists.covering()
    seen = {(a, row[a], b, row[b]) for row in rows for a, b in itertools.combinations(case_lists.AXES, 2)}
    missing = [
        (a, x, b, y)
        for a, b in itertools.combinations(case_lists.AXES, 2)
        for x in case_lists.AXES[a]
        for y in case_lists.AXES[b]
        if (a, x, b, y) not in seen and not ({a, b} == {"dims", "layout"} and "joint" in (x, y))
    ]
    assert missing == []
