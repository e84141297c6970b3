"""The order of the tile list: every item once, a group's tiles of one column block together, every stage once."""

from __future__ import annotations

from itertools import groupby

import pytest

from hpc.moe import order, plan

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def tile_words(tiles: list[int]) -> list[int]:
    """The tile list's words of experts with so many tiles."""
    return [order.pack(expert, index, n) for expert, n in enumerate(tiles) for index in range(n)]


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 9))
def test_every_item_is_one_tile_and_column_block(tiles: list[int], blocks: int) -> None:
    words = tile_words(tiles)
    experts = [expert for expert, n in enumerate(tiles) for _ in range(n)]
    found = [order.place(item, blocks, words) for item in range(len(words) * blocks)]
    assert sorted(found) == [(tile, block) for tile in range(len(words)) for block in range(blocks)]
    assert [order.unpack(word)[0] for word in words] == experts
    for item, (tile, _) in enumerate(found):
        assert experts[tile] == experts[item // blocks], "the slot's expert is the item's"
    # a block of weights is met once for every GROUP tiles
    met = [key for key, _ in groupby((experts[tile], block) for tile, block in found)]
    times = {key: met.count(key) for key in met}
    assert all(count <= -(-tiles[expert] // order.GROUP) for (expert, _), count in times.items())


@pytest.mark.parametrize("blocks", [1, 24])
def test_lone_tiles_stay_where_they_are(blocks: int) -> None:
    words = tile_words([1] * 5)
    assert words == list(range(5)), "the word is the expert"
    assert [order.place(item, blocks, words) for item in range(5 * blocks)] == [
        divmod(item, blocks) for item in range(5 * blocks)
    ]


def test_words_fit() -> None:
    word = order.pack(plan.MAX_EXPERTS - 1, order.GROUP - 1, 65536)
    assert 0 < word < 2**31
    assert order.unpack(word) == (plan.MAX_EXPERTS - 1, order.GROUP - 1, order.GROUP)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 9), st.integers(0, 60), st.integers(1, 8), st.booleans())
def test_programs_share_all_stages(programs: int, items: int, units: int, whole: bool) -> None:
    runs = [list(order.stages(p, programs, items, units, whole)) for p in range(programs)]
    done = sorted((i, k) for run in runs for i, first, last in run for k in range(first, last))
    assert done == [(i, k) for i in range(items) for k in range(units)]
    counts = [sum(last - first for _, first, last in run) for run in runs]
    assert max(counts) <= -(-items * units // programs), "no program has more than its share"
    for run in runs:  # parts of at most two items: the room that a program has for sums
        assert sum((first, last) != (0, units) for _, first, last in run) <= 2


def test_order_in_turn_needs_enough_experts_of_several_tiles() -> None:
    assert not order.in_turn([], 0)
    assert not order.in_turn([1] * 24, 24)
    assert not order.in_turn([1] * 25, 24), "one of 25"
    assert order.in_turn([1] * 24, 21)
    assert order.in_turn([1] * 2, 1)
