"""The index build as properties, in Triton's interpreter: rows are a permutation, tiles cover them, order is stable."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_support import InterpretedKernel, arguments, words

from hpc.moe import cases, launch, order, plan
from hpc.moe.case_lists import MoeCase
from hpc.moe.cases import key_of

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

pytestmark = pytest.mark.interpret


def build(
    ids: torch.Tensor, weights: torch.Tensor, experts: int, rank: int, tile: int, chunk: int, fused: bool
) -> tuple[torch.Tensor, launch.Call]:
    """Scratch after the index build alone; it held 0xFF bytes before."""
    inputs = cases.make_inputs(
        MoeCase(ids.shape[0], experts, 64, 16, top_k=ids.shape[1], rank=rank), "cpu", 0
    )
    inputs = replace(inputs, topk_ids=ids.to(torch.int32), topk_scale=weights)
    key = key_of(inputs)
    chosen = plan.Plan("portable", tile, chunk, fused)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "Kernel", InterpretedKernel)
        call = launch.Call(key, chosen, 0, rank, False, 64, ((1, 1), (1, 1)), interpret=True)
        scratch = torch.full((call.layout.size,), 255, dtype=torch.uint8)
        call.steps[0](0, arguments(inputs), scratch, 1.0, torch.empty(0))
    return scratch, call


def check(
    ids: torch.Tensor, weights: torch.Tensor, experts: int, rank: int, tile: int, chunk: int, fused: bool
) -> None:
    scratch, call = build(ids, weights, experts, rank, tile, chunk, fused)
    layout, pairs = call.layout, ids.numel()
    local = [i - rank * experts for i in ids.flatten().tolist()]
    ours = [0 <= e < experts and w != 0 for e, w in zip(local, weights.flatten().tolist(), strict=True)]
    expected = sorted((p for p in range(pairs) if ours[p]), key=lambda p: (local[p], p))
    rows = words(scratch, layout.row, pairs)
    assert words(scratch, layout.pair, len(expected)) == expected, "rows are grouped by expert, in pair order"
    assert [rows[p] for p in expected] == list(range(len(expected)))
    assert all(rows[p] == -1 for p in range(pairs) if not ours[p])
    counts = [sum(1 for p in expected if local[p] == e) for e in range(experts)]
    assert words(scratch, layout.totals, experts) == counts
    num_tiles, in_turn = words(scratch, layout.num_tiles, 2)
    assert num_tiles == sum(-(-n // tile) for n in counts) <= layout.max_tiles
    wanted, start = [], 0
    for expert, count in enumerate(counts):
        for first in range(0, count, tile):
            word = order.pack(expert, first // tile, -(-count // tile))
            wanted.append((word, start + first, min(tile, count - first)))
        start += count
    fields = (words(scratch, at, num_tiles) for at in (layout.expert, layout.start, layout.rows))
    assert list(zip(*fields, strict=True)) == wanted
    assert in_turn == order.in_turn([word for word, _, _ in wanted], sum(n > 0 for n in counts))


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    """Ids of other ranks, -1, extreme ids, repeated ids, zero weights; both ways of counting."""
    tokens, top_k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    experts, rank = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 2))
    known = st.integers(rank * experts, rank * experts + experts - 1)
    odd = st.sampled_from([-1, -(2**31), 2**31 - 1, 0, 3 * experts])
    size = tokens * top_k
    ids = data.draw(st.lists(known | odd, min_size=size, max_size=size))
    weights = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=size, max_size=size))
    tile = data.draw(st.sampled_from([16, 32]))
    for fused in (True, False):
        check(
            torch.tensor(ids).view(tokens, top_k),
            torch.tensor(weights).view(tokens, top_k),
            experts,
            rank,
            tile,
            16,
            fused,
        )


@pytest.mark.parametrize("fused", [True, False])
def test_one_expert_takes_all(fused: bool) -> None:
    ids = torch.full((33, 2), 3)
    check(ids, torch.ones(33, 2), 4, 0, 16, 16, fused)


@pytest.mark.parametrize("fused", [True, False])
def test_experts_of_more_tiles_than_a_group(fused: bool) -> None:
    ids = torch.tensor([0] + [1] * (16 * 16 + 1) + [2] * (16 * 32) + [4])[:, None]
    check(ids, torch.ones(ids.shape), 5, 0, 16, 128, fused)


@pytest.mark.parametrize("pairs", [255, 256, 257])
def test_boundaries_of_chunks(pairs: int) -> None:
    generator = torch.Generator().manual_seed(pairs)
    ids = torch.randint(129, (pairs, 1), generator=generator)
    check(ids, torch.ones(pairs, 1), 129, 0, 16, 128, False)
