"""CUDA graphs and streams: replay with other lengths, shared maps, concurrent calls, early-launched kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hpc
from hpc.attention.decode import case_lists, cases
from hpc.testing import assert_close

pytestmark = pytest.mark.gpu


def make(lens: tuple[int, ...], dtype: str, seed: int, capacity: int = 64) -> cases.DecodeInputs:
    """Inputs whose page table has room for `capacity` pages a request."""
    longest = case_lists.DecodeCase((capacity * 64,) * len(lens), 8, 1, dtype=dtype)
    inputs = cases.make_tensors(longest, "cuda", seed)
    inputs.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
    return inputs


def expected(inputs: cases.DecodeInputs) -> torch.Tensor:
    return cases.reference(inputs)[0]


def capture(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_replay_reads_lengths_again(dtype: str) -> None:
    """Assign and attention in one graph, captured with dummy lengths of 1."""
    inputs = make((1, 1, 1, 1), dtype, 0)
    workspace = hpc.get_attention_decode_task_workspace(4, 4096, 1)
    graph, out = capture(lambda: cases.attend(inputs, cases.assign(inputs, workspace)))
    for lens in ((4096, 1, 65, 1000), (0, 0, 3, 64), (2000, 2001, 2002, 2003)):
        inputs.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, expected(inputs), cases.tolerance(inputs.params), str(lens))


def test_many_graphs_share_one_map() -> None:
    """One workspace for all captured batch sizes, replays interleaved."""
    workspace = hpc.get_attention_decode_task_workspace(8, 4096, 1)
    made = []
    for batch in (1, 3, 8):
        inputs = make((1,) * batch, "fp8", batch)
        graph, out = capture(lambda inputs=inputs: cases.attend(inputs, cases.assign(inputs, workspace)))  # type: ignore[misc]
        made.append((inputs, graph, out))
    for round_ in range(3):
        for inputs, graph, out in made:
            lens = [(i * 997 + round_ * 131) % 4097 for i in range(len(inputs.seq_lens))]
            inputs.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
            out.fill_(float("nan"))
            graph.replay()
            assert_close(
                out, expected(inputs), cases.tolerance(inputs.params), f"batch {len(lens)} round {round_}"
            )


@pytest.mark.parametrize("path", ["dynamic", "static"])
def test_a_dirty_flag_neither_hangs_nor_shows(path: str) -> None:
    """FR-67: the split flag is not read; the counters of the map are cleared by every assign."""
    inputs = make((4096, 300), "fp8", 1)
    flag = torch.ones(2, 1, dtype=torch.int32, device="cuda")
    workspace = hpc.get_attention_decode_task_workspace(2, 4096, 1)

    def call() -> torch.Tensor:
        task_map = cases.assign(inputs, workspace) if path == "dynamic" else None
        return cases.attend(inputs, task_map, split_flag=flag)

    graph, out = capture(call)
    first = call()
    for _ in range(5):
        workspace[-4096:].fill_(1)  # counters of an aborted call
        graph.replay()
        assert torch.equal(out, first)
    assert int(flag.min()) == 1


def test_two_streams_at_once() -> None:
    """FR-68: same shapes, own maps, no synchronisation: each stream's bits are those of a single stream."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [make((4096,) * 8, "fp8", seed) for seed in (1, 2)]
    maps = [cases.make_task_map(i) for i in inputs]
    alone = [cases.attend(i, m) for i, m in zip(inputs, maps, strict=True)]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(100):
        for s in (0, 1):
            with torch.cuda.stream(streams[s]):
                results[s].append(cases.attend(inputs[s], maps[s]))
    torch.cuda.synchronize()
    for s in (0, 1):
        assert all(torch.equal(result, alone[s]) for result in results[s])


def test_chain_of_copies_assign_and_decode() -> None:
    """FR-66: inputs changed by a copy right before each step; the kernels start early and must still wait."""
    inputs = make((300, 2000, 1, 777), "fp8", 3)
    task_map = cases.make_task_map(inputs)
    lengths = [torch.randint(1, 4096, (4,), dtype=torch.int32, device="cuda") for _ in range(8)]
    stored = inputs.q.view(torch.uint8)
    queries = [stored.roll(shift, 0) for shift in range(8)]

    def step(i: int) -> torch.Tensor:
        inputs.seq_lens.copy_(lengths[i % 8])
        stored.copy_(queries[(i * 3) % 8])
        return cases.attend(inputs, cases.assign(inputs, task_map))

    synced = []
    for i in range(8):
        torch.cuda.synchronize()
        synced.append(step(i))
        torch.cuda.synchronize()
    results = [step(i) for i in range(500)]
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert torch.equal(result, synced[i % 8]), f"step {i}"


def test_capture_of_an_unknown_shape_says_what_to_do() -> None:
    """Compiling inside a capture is refused, not attempted."""
    inputs = cases.make_tensors(case_lists.DecodeCase((65, 70, 75), 24, 3, 64, window=999), "cuda", 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warmup"), torch.cuda.graph(graph):
        cases.attend(inputs, None)


@pytest.mark.multi_gpu
def test_tensors_on_a_device_that_is_not_current() -> None:
    """FR-54."""
    with torch.cuda.device(0):
        inputs = cases.make_tensors(case_lists.DecodeCase((300, 2000), 8, 1), "cuda:1", 0)
        task_map = cases.make_task_map(inputs)
        assert_close(
            cases.attend(inputs, task_map), expected(inputs), cases.tolerance(inputs.params), "cuda:1"
        )
