"""Times of the demo on a GPU: graph replay, inputs cold, paths interleaved, next to PyTorch and the floor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from hpc.attention.decode import cases, demo
from hpc.bench.roofline import floor_us, rates
from hpc.bench.timer import make_clock, num_input_sets, time_interleaved
from hpc.common.operator import Case

Call = Callable[[], object]

SDPA = "PyTorch SDPA, padded"
ASSIGN = "schedule (once a step)"


def with_times(
    inputs: cases.DecodeInputs, results: Sequence[demo.Result], paths: Mapping[str, torch.Tensor | None]
) -> list[demo.Result]:
    """`results` with their times, followed by rows for the schedule and for PyTorch.

    PyTorch's row is `scaled_dot_product_attention` in bf16 over keys and values gathered beforehand and padded to the
    longest request: what is left when nothing knows pages or lengths. Its gathering is not timed.
    """
    device, operator = inputs.q.device, cases.OPERATOR
    floor = operator.floor(Case("demo", params=inputs.params))
    count = num_input_sets(floor.bytes, torch.cuda.get_device_properties(device).L2_cache_size, max_sets=16)
    sets = [inputs, *(operator.rotate(inputs, seed) for seed in range(1, count))]
    workloads: dict[str, list[Call]] = {
        path: [_decode_call(one, task_map) for one in sets] for path, task_map in paths.items()
    }
    workloads[ASSIGN] = [_assign_call(inputs)]
    if inputs.params.dtype == "bf16":
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            workloads[SDPA] = [_sdpa_call(inputs)]
    times = time_interleaved(workloads, make_clock(device), on_error=_only_sdpa)
    least_us, _ = floor_us(floor, rates(device))
    rows = [replace(row, time_us=times[row.path].median_us, floor_us=least_us) for row in results]
    dtype = inputs.params.dtype
    extra = [
        demo.Result(dtype, name, time_us=times[name].median_us) for name in (ASSIGN, SDPA) if name in times
    ]
    return rows + extra


def _only_sdpa(name: str, error: Exception) -> None:
    """PyTorch may fail (its padded copy may not fit); anything of ours may not."""
    if name != SDPA:
        raise error


def _decode_call(inputs: cases.DecodeInputs, task_map: torch.Tensor | None) -> Call:
    output = torch.empty_like(inputs.q, dtype=torch.bfloat16)
    return lambda: cases.attend(inputs, task_map, output=output)


def _assign_call(inputs: cases.DecodeInputs) -> Call:
    """Fills a task map of its own: the timed attention calls keep theirs."""
    task_map = cases.make_task_map(inputs)
    return lambda: cases.assign(inputs, task_map)


def _sdpa_call(inputs: cases.DecodeInputs) -> Call:
    """Padded attention of every request over `[requests, heads, longest, head_dim]`."""
    cache, params = inputs.cache, inputs.params
    longest = max(params.lens)
    tokens = torch.arange(longest, device=inputs.q.device)
    live = tokens[None, :] < cache.seq_lens[:, None]
    pages = cache.block_ids[:, tokens // cache.page_size].where(live, cache.block_ids[:1, :1]).long()
    rows = (tokens % cache.page_size).expand_as(pages)
    keys, values = (
        part[pages, rows].masked_fill(~live[:, :, None, None], 0).transpose(1, 2).contiguous()
        for part in (cache.kcache, cache.vcache)
    )
    # The heads of a group become rows of one query, so that nothing repeats the keys; the mask is added, as
    # SDPA would make it from booleans on every call.
    rows_of = (len(params.lens), params.kv_heads, params.group)
    query = inputs.q.view(*rows_of, params.head_dim)
    mask = torch.zeros(live.shape, dtype=query.dtype, device=query.device).masked_fill_(~live, float("-inf"))
    spread = mask[:, None, None, :].expand(*rows_of, longest)
    return lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=spread)
