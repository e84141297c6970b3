"""CUDA graphs: replay with other lengths, shared maps, flags that a call left dirty, capture of what is new."""

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
def test_fr_67_and_row_15_a_dirty_flag_neither_hangs_nor_shows(path: str) -> None:
    """The split flag is not read; the counters of the map are cleared by every assign."""
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


def test_capture_of_an_unknown_shape_says_what_to_do() -> None:
    """Compiling inside a capture is refused, not attempted."""
    inputs = cases.make_tensors(case_lists.DecodeCase((65, 70, 75), 24, 3, 64, window=999), "cuda", 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warmup"), torch.cuda.graph(graph):
        cases.attend(inputs, None)
