"""Plans and the host's tile table as properties."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hpc.attention.prefill import case_lists, cases, plan


@pytest.mark.parametrize("group", range(1, 65))
def test_every_group_packs_into_whole_tiles(group: int) -> None:
    for most in (16, 64):
        pack = plan.pack_of(group, most)
        assert group % pack == 0 and pack & (pack - 1) == 0 and 1 <= pack <= most
        assert pack == most or group // pack % 2 == 1, "the largest power of two that divides the group"


def test_every_case_has_a_legal_plan() -> None:
    measured = case_lists.target_cases() + case_lists.bench_cases() + case_lists.split_cases()
    for case in case_lists.gpu_cases() + measured:
        for sm90 in (True, False):
            key = cases.key_of(case.params, sm90)
            chosen = plan.choose(key)
            assert plan.is_legal(chosen, key) is None
            assert (chosen.backend == "sm90") == (plan.is_legal(plan.sm90(key), key) is None)
            assert plan.is_legal(plan.portable(key), key) is None


def test_sm90_shapes_are_legal_there() -> None:
    for params in case_lists.sm90_shapes().values():
        key = cases.key_of(params, True)
        assert plan.is_legal(plan.sm90(key), key) is None


def test_overlap_needs_room_for_two_tiles_of_queries() -> None:
    def why(overlap: bool = True, **fields: int) -> str | None:
        given = {"head_dim": 128, "quant_type": -1, **fields}
        key = plan.Key(True, 132, 64, 8, v_dim=given["head_dim"], page_size=64, **given)
        return plan.is_legal(replace(plan.sm90(key), overlap=overlap), key)

    assert why() is None and why(head_dim=64) is None and why(False, head_dim=256) is None
    assert why(head_dim=256) is not None and why(quant_type=1) is not None
    key = plan.Key(True, 132, 8, 8, 128, 128, 64, -1)
    assert plan.sm90(key).overlap and plan.sm90(key).short_kernel
    assert not replace(plan.sm90(key), overlap=False).short_kernel
    assert plan.is_legal(replace(plan.portable(key), overlap=True), key) is not None


def test_a_short_call_has_a_multiprocessor_for_every_item() -> None:
    draw = random.Random(0)
    for _ in range(200):
        heads, group = draw.choice((1, 2, 8)), draw.choice((1, 4, 5, 8, 64))
        key = plan.Key(True, 132, heads * group, heads, 128, 128, 64, draw.choice((-1, 1)))
        q_lens = [draw.choice((0, 1, 5, 64, 200)) for _ in range(draw.randint(1, 12))]
        tokens, chosen = sum(q_lens) + draw.choice((0, 13)), plan.sm90(key)
        if plan.is_short(tokens, len(q_lens), chosen, key):
            table = plan.tile_table(q_lens, q_lens, tokens, chosen.short_tokens, 128)
            assert len(table) * key.q_heads // chosen.short_pack <= key.sms
    one = plan.Key(True, 132, 64, 8, 128, 128, 64, -1)
    assert plan.is_short(128, 1, plan.sm90(one), one) and not plan.is_short(512, 1, plan.sm90(one), one)
    assert not plan.is_short(128, 1, plan.portable(one), one)


@pytest.mark.parametrize("seed", range(20))
def test_a_table_holds_every_token_once_heaviest_first(seed: int) -> None:
    draw = random.Random(seed)
    q_lens = [draw.choice((0, 1, 5, 64, 200)) for _ in range(draw.randint(1, 12))]
    kv_lens = [draw.choice((n, n + draw.randint(0, 400), n // 2)) for n in q_lens]
    tokens = sum(q_lens) + draw.choice((0, 13))
    tile, block = draw.choice((1, 8, 16, 128)), draw.choice((64, 128))
    table = plan.tile_table(q_lens, kv_lens, tokens, tile, block)
    assert sorted(row for first, n, *_ in table for row in range(first, first + n)) == list(range(tokens))
    assert len(table) <= plan.bound(tokens, len(q_lens), tile)
    weights = [-(-min(max(start + first + n, 0), keys) // block) for _, n, _, first, start, keys in table]
    assert weights == sorted(weights, reverse=True)
    assert all(0 < n <= tile for _, n, *_ in table)
