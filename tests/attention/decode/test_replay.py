"""Replays beyond other lengths: other pages, one map under graphs of several batch sizes, what a call leaves behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from decode_support import attend, capture, compare, make, raw, same_bits

import hpc
from hpc.attention.decode import cases, plan
from hpc.attention.decode.cases import DecodeInputs
from hpc.common import arch
from hpc.testing import fill_nan

pytestmark = pytest.mark.gpu


def step(x: DecodeInputs, path: str = "dynamic") -> torch.Tensor:
    if path == "dynamic" and x.task_map is not None:
        cases.assign(x, x.task_map)
    return attend(x, path)


@pytest.mark.parametrize("path", ["dynamic", "static"])
@pytest.mark.parametrize(("dtype", "page"), [("bf16", 64), ("fp8", 64), ("bf16", 8)])
def test_fr_74_pages_and_lengths_of_the_capture_are_forgotten(path: str, dtype: str, page: int) -> None:
    """Captured on two short requests; replayed on long ones of other pages, those of the capture full of NaN."""
    x = make((500, 77), dtype=dtype, page_size=page, num_new_tokens=3)
    later_lens, later_table, pages = x.seq_lens.clone(), x.cache.block_ids.clone(), x.cache.kcache.shape[0]
    used = {int(p) for row, n in zip(later_table, (500, 77), strict=True) for p in row[: -(-n // page)]}
    spare = [p for p in range(pages) if p not in used][:2]
    x.seq_lens.fill_(3)
    x.cache.block_ids[:, 0] = torch.tensor(spare, dtype=torch.int32)
    for cache in (x.cache.kcache, x.cache.vcache):
        raw_rows = cache.view(torch.uint8)
        raw_rows[torch.tensor(spare, device="cuda"), :3] = 0
    graph, out = capture(lambda: step(x, path))
    for cache in (x.cache.kcache, x.cache.vcache):
        for p in spare:
            fill_nan(cache[p])
    before = [raw(c).clone() for c in (x.cache.kcache, x.cache.vcache)]
    x.seq_lens.copy_(later_lens)
    x.cache.block_ids.copy_(later_table)
    x.q.view(torch.uint8).copy_(x.q.view(torch.uint8).roll(1, 0))
    fill_nan(out)
    graph.replay()
    compare(x, out, None, "replay")
    replayed = out.clone()
    assert same_bits(replayed, step(x, path)), "replay and eager call differ"
    after = (raw(c) for c in (x.cache.kcache, x.cache.vcache))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "caches are read only"


def test_graphs_of_many_batch_sizes_replay_in_any_order_over_one_map() -> None:
    """A map holds nothing of the batch it was made for last; results are bit for bit those of eager calls."""
    workspace = hpc.get_attention_decode_task_workspace(1, 64, 8)
    recorded = []
    for batch in (1, 2, 5, 40, 300):
        x = replace(make((2048,) * batch, (64, 8), seed=batch, dtype="fp8"), task_map=workspace)
        recorded.append((x, *capture(lambda x=x: step(x))))
    order = [i for i in range(len(recorded)) for _ in range(4)]
    random.Random(0).shuffle(order)
    for turn, i in enumerate(order):
        x, graph, out = recorded[i]
        lens = torch.randint(0, 2049, x.seq_lens.shape, generator=torch.Generator().manual_seed(turn))
        x.seq_lens.copy_(lens.int())
        fill_nan(out)
        graph.replay()
        replayed = out.clone()
        assert same_bits(replayed, step(x)), f"turn {turn}, batch {len(lens)}"
        if turn < 6:
            compare(x, replayed, None, f"batch {len(lens)}")


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("heads", [(8, 1), (64, 8)])
def test_merge_counters_are_zero_after_every_call(dtype: str, heads: tuple[int, int]) -> None:
    """So that layers share a map, and a replay never meets what the last one left."""
    x = make((131072, 70, 9000, 0), heads, dtype=dtype)
    assert x.task_map is not None
    counters = x.task_map.view(torch.int32)[
        plan.variant_offset(arch.sm_count("cuda"), heads[1], plan.NUM_VARIANTS) :
    ]
    words = x.task_map.clone()
    first = attend(x)
    for _ in range(10):
        assert not bool(counters.any())
        assert same_bits(attend(x), first)
    assert torch.equal(x.task_map, words), "attention leaves the map as it found it"


@pytest.mark.parametrize("path", ["dynamic", "static"])
def test_fr_67_memory_does_not_grow_with_captures(path: str) -> None:
    x = make((4096, 300), dtype="fp8")
    held = []
    for _ in range(5):
        graph, out = capture(lambda: step(x, path))
        graph.replay()
        torch.cuda.synchronize()
        del graph, out
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == held[1:2] * 4, held
    many = []
    out = step(x, path)
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        many.append(step(x, path) is not None)
    assert all(many) and torch.cuda.memory_allocated() == before and out.isfinite().all()
