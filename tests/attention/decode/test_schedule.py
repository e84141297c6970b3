"""The schedule kernel against the Python planner, word for word, interpreted and on a GPU."""

from __future__ import annotations

import pytest
import torch

import hpc
from hpc.attention.decode import plan
from hpc.common import arch

BATCHES = {
    "empty": [],
    "zero": [0],
    "one short": [1],
    "one long": [131072],
    "edges": [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 4096],
    "long and short": [65536] + [4096] * 15 + [0, 3, 700],
    "more requests than bins": [n * 37 % 1500 for n in range(300)],
    "one tile each": [64] * 130,
    "negative": [-5, 200, -1, 64],
}
# (KV heads, query tokens a request, new_kv_included, window, min_process_len)
CALLS = [
    (1, 1, True, None, 512),
    (2, 4, False, None, 512),
    (8, 1, True, 128, 512),
    (1, 3, False, 1, 64),
    (3, 16, True, 1000, 0),
]


def expected(lens: list[int], call: tuple, sms: int, max_num_batch: int) -> list[int]:
    kv_heads, new, included, window, process = call
    totals = [max(0, n + (0 if included else new)) for n in lens]
    return plan.build_task_map(
        totals, sms=sms, num_kv_heads=kv_heads, num_new_tokens=new, min_process_len=process, window=window,
        sig=plan.signature(kv_heads, new, len(lens), window, included), max_num_batch=max_num_batch,
    )  # fmt: skip


def launch(lens: list[int], call: tuple, sms: int, task_map: torch.Tensor, requests: int) -> None:
    from hpc.attention.decode import schedule

    kv_heads, new, included, window, process = call
    bins = [plan.num_bins(sms, kv_heads, v) for v in range(plan.NUM_VARIANTS)]
    counters = plan.counter_words(sms, kv_heads)
    size = 4 * (plan.variant_offset(sms, kv_heads, plan.NUM_VARIANTS) - plan.HEADER_WORDS)
    schedule._assign_kernel[(plan.NUM_VARIANTS + 1 + -(-counters // schedule.CLEAR),)](
        torch.tensor([*lens, 99], dtype=torch.int32), task_map, len(lens), 0 if included else new, new, window or 0,
        plan.signature(kv_heads, new, len(lens), window, included), kv_heads, *bins,
        *(plan.floor_tiles(v, process) for v in range(plan.NUM_VARIANTS)), size, counters,
        WINDOW=window is not None, CUTS=1 << bins[-1].bit_length(), REQS=requests,
    )  # fmt: skip


@pytest.mark.interpret
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", BATCHES)
def test_interpreted_words_equal_the_planner(name: str, call: tuple) -> None:
    """A dirty map: every word but the batch limit, which only the allocation writes, must be set anew."""
    lens, sms = BATCHES[name], 10
    words = plan.workspace_words(sms, call[0])
    for requests in (64, 256):
        task_map = torch.full((words + 100,), 0x5A5A5A5A, dtype=torch.int32)
        task_map[3] = 17
        launch(lens, call, sms, task_map, requests)
        want = expected(lens, call, sms, 17)
        got = task_map.tolist()
        assert got[:8] == want[:8]
        assert_same_schedule(got, want, len(lens), sms, call[0])
        assert not any(got[plan.variant_offset(sms, call[0], plan.NUM_VARIANTS) : words]), (
            "counters are cleared"
        )
        assert got[words:] == [0x5A5A5A5A] * 100, "nothing behind the map is written"


def assert_same_schedule(got: list[int], want: list[int], batch: int, sms: int, kv_heads: int) -> None:
    """Bins, and the merge entries in use; entries past them are never read."""
    for v in range(plan.NUM_VARIANTS):
        start, bins = plan.variant_offset(sms, kv_heads, v), plan.num_bins(sms, kv_heads, v)
        end = start + bins * plan.ENTRY_WORDS + plan.num_merges(batch, bins) * plan.MERGE_WORDS
        assert got[start:end] == want[start:end], f"variant {v}"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_lengths_on_the_host_fill_the_map_by_the_planner(dtype: torch.dtype) -> None:
    workspace = hpc.get_attention_decode_task_workspace(8, 4096, 2, device="cpu")
    assert workspace.dtype == torch.int8 and workspace.is_contiguous()
    header = workspace.view(torch.int32)[:6].tolist()
    assert header[2:5] == [2, 8, 4 * (plan.variant_offset(132, 2, plan.NUM_VARIANTS) - plan.HEADER_WORDS)]
    task_map = workspace.view(dtype)
    lens = torch.tensor([4096, 1, 0, 700], dtype=torch.int32)
    for call in [(2, 1, True, None, 512), (2, 3, False, 100, 64)]:
        result = hpc.assign_attention_decode_task(lens, task_map, *call[:3], call[4], window=call[3])
        assert result is task_map
        assert workspace.view(torch.int32).tolist() == expected(lens.tolist(), call, 132, 8)


def test_reused_map_holds_nothing_of_the_last_step() -> None:
    workspace = hpc.get_attention_decode_task_workspace(4, 4096, 1, device="cpu")
    for lens in ([9000, 1, 2, 3], [5], [], [64] * 300):
        workspace.view(torch.int32)[16:].fill_(-7)
        hpc.assign_attention_decode_task(torch.tensor(lens, dtype=torch.int32), workspace, 1, 1, True)
        assert workspace.view(torch.int32).tolist() == expected(lens, (1, 1, True, None, 512), 132, 4)


def test_a_printed_schedule_names_its_bins(capsys: pytest.CaptureFixture[str]) -> None:
    workspace = hpc.get_attention_decode_task_workspace(4, 4096, 1, device="cpu")
    assert hpc.print_attention_decode_task(workspace) is None
    assert "not assigned yet" in capsys.readouterr().out
    hpc.assign_attention_decode_task(torch.tensor([9000, 64], dtype=torch.int32), workspace, 1, 1, True)
    hpc.print_attention_decode_task(workspace)
    text = capsys.readouterr().out
    assert "bin 1: request 0" in text and "chunk of a request begun in bin 0" in text


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_device_words_equal_the_planner(device: torch.device, call: tuple) -> None:
    """One workspace for every batch, never cleared between them."""
    sms, kv_heads = arch.sm_count(device), call[0]
    workspace = hpc.get_attention_decode_task_workspace(512, 1 << 20, kv_heads, device=device)
    words = workspace.view(torch.int32)
    assert words.numel() == plan.workspace_words(sms, kv_heads)
    for name, lens in {**BATCHES, "512": [n * 7 % 9001 for n in range(512)], "2000": [100] * 2000}.items():
        words[16:].fill_(-7)
        given = torch.tensor(lens, dtype=torch.int32, device=device)
        hpc.assign_attention_decode_task(given, workspace, *call[:3], call[4], window=call[3])
        got, want = words.tolist(), expected(lens, call, sms, 512)
        assert got[:8] == want[:8], name
        assert_same_schedule(got, want, len(lens), sms, kv_heads)
        assert not any(got[plan.variant_offset(sms, kv_heads, plan.NUM_VARIANTS) :]), name


@pytest.mark.gpu
def test_lengths_beyond_32_bits_stay_in_bounds(device: torch.device) -> None:
    """2^31 - 1 with new tokens on top: no word may point outside the batch."""
    workspace = hpc.get_attention_decode_task_workspace(4, 4096, 1, device=device)
    lens = torch.tensor([2**31 - 1, 5, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    hpc.assign_attention_decode_task(lens, workspace, 1, 4, False)
    words, sms = workspace.view(torch.int32).tolist(), arch.sm_count(device)
    for v in range(plan.NUM_VARIANTS):
        start, bins = plan.variant_offset(sms, 1, v), plan.num_bins(sms, 1, v)
        entries = [words[start + 8 * g : start + 8 * g + 8] for g in range(bins)]
        assert all(
            0 <= e[1] <= e[3] <= 4 and 0 <= e[6] <= g and 0 <= e[7] <= bins for g, e in enumerate(entries)
        )
        assert all(0 <= e[2] < 2**26 and 0 <= e[4] < 2**26 for e in entries)
