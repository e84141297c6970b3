"""CUDA graphs and streams: replay with other lengths and pages, padding, concurrent calls, kernels launched early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rope_support import assert_same, capture, expected, make, outputs, same_bits

import hpc
from hpc.rope import cases
from hpc.rope.cases import RopeInputs
from hpc.testing import fill_nan

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ["fp8", "bf16"])


def roomy(batch: int, new: int, dtype: str, pages: int = 16, **rest: Any) -> RopeInputs:
    """Inputs whose page table and rotary table have room for `pages` pages a request."""
    return make((pages * 64,) * batch, (new,) * batch, (8, 1), "cuda", dtype=dtype, **rest)


@DTYPES
@pytest.mark.parametrize("new", [1, 3])
def test_fr_74_replay_reads_lengths_and_pages_again(dtype: str, new: int) -> None:
    """Captured with short lengths on pages 0 and 1; replayed elsewhere, those pages keep their bytes."""
    inputs = roomy(4, new, dtype)
    lens, ids = inputs.seq_lens, inputs.cache.block_ids
    lens.fill_(new)
    original = ids.clone()
    graph, result = capture(lambda: cases.prologue(inputs))
    for step, now in enumerate(((500, 77, 64, 1024), (65, 0, new, 128), (1000, 1001, 1002, 1003))):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        ids.copy_(original.roll(step, 0))
        inputs.qkv.copy_(torch.randn_like(inputs.qkv, dtype=torch.float32))
        want = expected(inputs)
        fill_nan(cases.queries(result))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(outputs(inputs, result), want, f"step {step}")


def test_graphs_padded_with_requests_on_one_page() -> None:
    """What engines do: the batch is filled up with requests of length 1 whose pages are all page 0."""
    batch, live = 16, 11
    inputs = roomy(batch, 1, "fp8")
    owned = set(inputs.cache.block_ids.flatten().tolist())
    dummy = next(page for page in range(inputs.cache.kcache.shape[0]) if page not in owned)
    inputs.seq_lens[:live] = torch.arange(70, 70 + live, dtype=torch.int32, device="cuda")
    inputs.seq_lens[live:] = 1
    inputs.cache.block_ids[live:, 0] = dummy
    graph, result = capture(lambda: cases.prologue(inputs))
    want = expected(inputs)
    fill_nan(result[0]), fill_nan(result[1]), fill_nan(result[2])
    graph.replay()
    have = outputs(inputs, result)
    for name in ("key_cache", "value_cache"):
        for found in (have, want):
            found[name].view(torch.uint8)[dummy, 0] = 0  # which of the padded rows lands there is left open
    assert_same(have, want)


def test_two_graphs_of_different_batch_sizes_interleaved() -> None:
    made = []
    for batch in (1, 5, 32):
        inputs = roomy(batch, 1, "fp8", seed=batch)
        made.append((inputs, *capture(lambda inputs=inputs: cases.prologue(inputs))))  # type: ignore[misc]
    for round_ in range(3):
        for inputs, graph, result in made:
            inputs.seq_lens.copy_((torch.arange(len(inputs.seq_lens)) * 97 + round_ * 131) % 1024 + 1)
            want = expected(inputs)
            graph.replay()
            assert_same(outputs(inputs, result), want, f"round {round_}")


@DTYPES
def test_two_streams_at_once(dtype: str) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [roomy(64, 1, dtype, pages=2, seed=seed) for seed in (1, 2)]
    want = [expected(x) for x in inputs]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(100):
        for s in (0, 1):
            with torch.cuda.stream(streams[s]):
                results[s].append(cases.prologue(inputs[s]))
    torch.cuda.synchronize()
    for s in (0, 1):
        for result in results[s]:
            assert_same(outputs(inputs[s], result), want[s], f"stream {s}")


@DTYPES
def test_fr_66_inputs_changed_by_the_kernel_before(dtype: str) -> None:
    """Lengths, projection and weights written right before each call, no synchronisation: the kernel starts early and
    must still wait before it reads anything."""
    inputs = roomy(8, 1, dtype)
    assert inputs.q_weight is not None
    generator = torch.Generator("cuda").manual_seed(3)
    variants = [
        (
            torch.randint(1, 1024, (8,), dtype=torch.int32, device="cuda", generator=generator),
            torch.randn(inputs.qkv.shape, device="cuda", generator=generator).bfloat16(),
            torch.rand(128, device="cuda", generator=generator),
        )
        for _ in range(8)
    ]

    def step(i: int) -> torch.Tensor:
        lens, qkv, weight = variants[i % 8]
        torch.mul(qkv, 1, out=inputs.qkv)
        torch.mul(weight, 1, out=inputs.q_weight)
        torch.mul(lens, 1, out=inputs.seq_lens)
        return cases.queries(cases.prologue(inputs)).clone()

    alone = []
    for i in range(8):
        torch.cuda.synchronize()
        alone.append(step(i))
        torch.cuda.synchronize()
    results = [step(i) for i in range(2000)]
    torch.cuda.synchronize()
    assert all(same_bits(result, alone[i % 8]) for i, result in enumerate(results))


def test_capture_of_an_unknown_shape_says_what_to_do() -> None:
    inputs = make((65, 70), (1, 1), (24, 3), "cuda", rotary_dim=34, eps=3e-6)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warmup"), torch.cuda.graph(graph):
        cases.prologue(inputs)


@DTYPES
def test_fr_74_prologue_and_decode_in_one_graph(dtype: str) -> None:
    """Two draft tokens a request; the attention of the same graph reads what the prologue has just stored, although it
    starts early. Replay equals eager bit for bit, and pages of the capture are not touched."""
    new, batch = 3, 2
    inputs = roomy(batch, new, dtype)
    lens, cache = inputs.seq_lens, inputs.cache
    history = cases.make_tensors(
        replace(inputs.params, lens=(1024,) * batch, new=(1024,) * batch, is_prefill=True), "cuda", 5
    )
    cases.prologue(replace(history, cache=cache))  # keys and values of a whole context on the same pages

    def step() -> torch.Tensor:
        result = cases.prologue(inputs)
        common = {"mtp": new - 1, "new_kv_included": True}
        if dtype == "bf16":
            return hpc.attention_decode_bf16(
                result, cache.kcache, cache.vcache, cache.block_ids, lens, **common
            )
        q, scale, flag = result
        return hpc.attention_decode_fp8(
            q, cache.kcache, cache.vcache, cache.block_ids, lens, scale, inputs.k_scale, inputs.v_scale,
            split_flag=flag, **common,
        )  # fmt: skip

    lens.fill_(3)
    at_capture = cache.block_ids[:, 0].long().clone()
    graph, out = capture(step)
    before = [c[at_capture].clone() for c in (cache.kcache.view(torch.uint8), cache.vcache.view(torch.uint8))]
    for now in ((500, 77), (64, 1000), (333, 129)):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        want = step().clone()
        for _ in range(5):
            fill_nan(out)
            graph.replay()
            assert same_bits(out, want), now
        for kept, c in zip(before, (cache.kcache, cache.vcache), strict=True):
            rows = c.view(torch.uint8)[at_capture]
            assert torch.equal(rows[:, :61], kept[:, :61]) or min(now) <= 64
