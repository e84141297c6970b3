"""Small helpers of the decode tests: one call from a few numbers, and bit comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hpc.attention.decode import cases
from hpc.attention.decode.case_lists import DecodeCase
from hpc.attention.decode.cases import DecodeInputs
from hpc.testing import assert_close, poisoned

DEVICE = "cuda"
PATHS = ("dynamic", "static")


def make(
    lens: Any, heads: tuple[int, int] = (8, 1), seed: int = 1, device: Any = None, **rest: Any
) -> DecodeInputs:
    """Inputs of one call, with a filled task map."""
    inputs = cases.make_tensors(DecodeCase(tuple(lens), *heads, **rest), device or DEVICE, seed)
    return replace(inputs, task_map=cases.make_task_map(inputs))


def attend(inputs: DecodeInputs, path: str = "dynamic", **more: Any) -> Any:
    return cases.attend(inputs, inputs.task_map if path == "dynamic" else None, **more)


def check(inputs: DecodeInputs, path: str = "dynamic", **more: Any) -> torch.Tensor:
    """Output into NaN and lse, both against float64; returns the output."""
    params = inputs.params
    output = poisoned((*inputs.q.shape[:2], params.value_dim), torch.bfloat16, inputs.q.device)
    given = more.pop("output", output)
    out, lse = attend(inputs, path, return_lse=True, output=given, **more)
    assert out is given
    compare(inputs, out, lse, path)
    return out


def compare(
    inputs: DecodeInputs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    what: str = "",
    many_rows: bool | None = None,
) -> None:
    expected, expected_lse = cases.reference(inputs)
    assert_close(out, expected, cases.tolerance(inputs.params, many_rows), what)
    empty = expected_lse == -torch.inf
    assert (out[empty] == 0).all(), "a row without a key is zero"
    if lse is not None:
        # Both are sums of exponentials in fp32; what differs is their order and the approximation of exp2 and log2.
        atol = cases.lse_tolerance(inputs.params, many_rows)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=atol)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN equals NaN, -0 is not 0."""
    return tensor.contiguous().flatten().view(torch.uint8)


def capture(call: Callable[[], Any], warm: int = 2) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run `call` eagerly as engines do, then record it. (graph, what the recorded call returned)"""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may allocate meanwhile; only what this one does is part of the graph.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    return graph, result


def fastest_us(calls: dict[str, Callable[[], Any]], rounds: int = 30, inner: int = 20) -> dict[str, float]:
    """Least time of a call in a graph of `inner` of them, calls interleaved."""
    graphs = {
        name: capture(lambda call=call: [call() for _ in range(inner)])[0] for name, call in calls.items()
    }
    return {name: time / inner for name, time in fastest_replay_us(graphs, rounds).items()}


def fastest_replay_us(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int = 30) -> dict[str, float]:
    """Least time of a replay, graphs interleaved: other load on the GPU only adds time."""
    best = dict.fromkeys(graphs, float("inf"))
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best[name] = min(best[name], start.elapsed_time(end) * 1e3)
    return best
