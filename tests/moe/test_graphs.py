"""CUDA graphs, streams, programmatic launches: other routings on replay, no shared scratch, no early reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpc.moe import cases
from hpc.moe.case_lists import MoeCase
from hpc.testing import assert_close, fill_nan

pytestmark = pytest.mark.gpu

BOTH = pytest.mark.parametrize("block", [False, True])
ROUTINGS = ("zipf", "one", "invalid", "half", "none", "uniform")


def make(tokens: int, block: bool, routing: str = "uniform", seed: int = 0) -> cases.MoeInputs:
    return cases.make_inputs(
        MoeCase(tokens, 16, 512, 192, top_k=4, block=block, routing=routing), "cuda", seed
    )


def capture(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Two eager runs on the capture stream, then the capture, as an engine does it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


@BOTH
@pytest.mark.parametrize("tokens", [1, 4, 33, 260, 900])  # 260: pairs of 64 fresh columns; 900: of 128
def test_replay_with_other_routings(block: bool, tokens: int) -> None:
    """Ids, weights and activations change in place between replays."""
    inputs = make(tokens, block, "none")
    graph, out = capture(lambda: cases.run(inputs))
    for seed, routing in enumerate(ROUTINGS):
        other = make(tokens, block, routing, seed)
        inputs.x.view(torch.uint8).copy_(other.x.view(torch.uint8))
        if block:
            inputs.x_scale.copy_(other.x_scale)
        inputs.topk_ids.copy_(other.topk_ids)
        inputs.topk_scale.copy_(other.topk_scale)
        fill_nan(out)
        graph.replay()
        assert_close(out, cases.reference(inputs), cases.tolerance(inputs.params), routing)


@BOTH
def test_two_graphs_interleaved(block: bool) -> None:
    made = []
    for tokens in (2, 40):
        inputs = make(tokens, block, seed=tokens)
        graph, out = capture(lambda inputs=inputs: cases.run(inputs))  # type: ignore[misc]
        made.append((inputs, graph, out, cases.run(inputs)))
    for _ in range(3):
        for _, graph, out, _ in made:
            fill_nan(out)
            graph.replay()
    for _, _, out, expected in made:
        assert torch.equal(out, expected)


def test_first_call_inside_a_capture_is_refused() -> None:
    """A shape that has not run yet would have to be compiled: not inside a capture."""
    inputs = cases.make_inputs(MoeCase(11, 3, 192, 48, top_k=2), "cuda", 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="once eagerly"), torch.cuda.graph(graph):
        cases.run(inputs)


@BOTH
@pytest.mark.parametrize("tokens", [1, 64, 260])
def test_two_streams(block: bool, tokens: int) -> None:
    """100 interleaved calls on two streams, same shapes and other data: each as alone, bit for bit."""
    inputs = [make(tokens, block, seed=seed) for seed in (1, 2)]
    expected = [cases.run(i) for i in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(100):
        for which in range(2):
            with torch.cuda.stream(streams[which]):
                results[which].append(cases.run(inputs[which]))
    torch.cuda.synchronize()
    for which in range(2):
        assert all(torch.equal(out, expected[which]) for out in results[which])


@BOTH
@pytest.mark.parametrize("tokens", [1, 17, 64, 260, 900])
def test_early_starts_read_nothing_early(block: bool, tokens: int) -> None:
    """A copy kernel changes ids and activations right before each call, nothing waits: as when each is awaited."""
    sets = [make(tokens, block, routing, seed) for seed, routing in enumerate(ROUTINGS)]
    work = make(tokens, block, seed=9)
    expected = [
        cases.run(cases.replace(work, x=i.x, x_scale=i.x_scale, topk_ids=i.topk_ids, topk_scale=i.topk_scale))
        for i in sets
    ]
    torch.cuda.synchronize()
    outs = []
    for turn in range(600):
        i = sets[turn % len(sets)]
        work.x.view(torch.uint8).copy_(i.x.view(torch.uint8))
        if block:
            work.x_scale.copy_(i.x_scale)
        work.topk_ids.copy_(i.topk_ids)
        work.topk_scale.copy_(i.topk_scale)
        outs.append(cases.run(work))
    torch.cuda.synchronize()
    for turn, out in enumerate(outs):
        assert torch.equal(out.view(torch.int16), expected[turn % len(sets)].view(torch.int16)), turn


@BOTH
@pytest.mark.parametrize("tokens", [3, 70, 500])
def test_repeatable(block: bool, tokens: int) -> None:
    """Whichever program arrives last, the bits are the same."""
    inputs = make(tokens, block, "zipf")
    first = cases.run(inputs)
    for _ in range(50):
        assert torch.equal(cases.run(inputs).view(torch.int16), first.view(torch.int16))
