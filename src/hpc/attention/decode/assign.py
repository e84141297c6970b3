"""Host side of the task map: allocation, the launch that fills it, and reading it back."""

from __future__ import annotations

from typing import Any

import torch

from hpc.attention.decode import plan
from hpc.common import arch
from hpc.common.launch import Kernel, raw_stream

_KERNELS: dict[tuple[Any, ...], Kernel] = {}


def allocate(max_num_batch: int, num_head_kv: int, device: torch.device) -> torch.Tensor:
    """A zeroed task map with words 2-4 of its header set."""
    sms = arch.sm_count(device)
    workspace = torch.zeros(4 * plan.workspace_words(sms, num_head_kv), dtype=torch.int8, device=device)
    size = 4 * (plan.variant_offset(sms, num_head_kv, plan.NUM_VARIANTS) - plan.HEADER_WORDS)
    words = torch.tensor([num_head_kv, max_num_batch, size], dtype=torch.int32)
    workspace.view(torch.int32)[2:5].copy_(words)
    return workspace


def on_device(lens: torch.Tensor, task_map: torch.Tensor, num_head_kv: int, num_new_tokens: int, included: bool,
              min_process_len: int, window: int | None) -> None:  # fmt: skip
    """One launch on the current stream; nothing is read back."""
    from hpc.attention.decode import schedule

    index, batch = lens.device.index, lens.numel()
    sms = arch.sm_count(lens.device)
    bins = [plan.num_bins(sms, num_head_kv, v) for v in range(plan.NUM_VARIANTS)]
    cuts = 1 << bins[-1].bit_length()
    # Requests of one pass over the lengths: three sizes, so that serving compiles no more than three kernels.
    reqs = 64 if batch <= 64 else 256 if batch <= 256 else 1024
    key = (index, task_map.dtype, window is not None, cuts, reqs)
    kernel = _KERNELS.get(key)
    if kernel is None:
        kernel = _KERNELS[key] = Kernel(
            schedule._assign_kernel, "assign_attention_decode_task", num_warps=schedule.NUM_WARPS
        )
    counters = plan.counter_words(sms, num_head_kv)
    floors = [plan.floor_tiles(v, min_process_len) for v in range(plan.NUM_VARIANTS)]
    size = 4 * (plan.variant_offset(sms, num_head_kv, plan.NUM_VARIANTS) - plan.HEADER_WORDS)
    args = (
        lens, task_map, batch, 0 if included else num_new_tokens, num_new_tokens, window or 0,
        plan.signature(num_head_kv, num_new_tokens, batch, window, included), num_head_kv, *bins, *floors, size,
        counters, window is not None, cuts, reqs,
    )  # fmt: skip
    grid = (plan.NUM_VARIANTS + 1 + -(-counters // schedule.CLEAR), 1, 1)
    if torch.cuda.current_device() == index:
        kernel(grid, raw_stream(index), args)
    else:
        with torch.cuda.device(index):
            kernel(grid, raw_stream(index), args)


def on_host(lens: torch.Tensor, task_map: torch.Tensor, num_head_kv: int, num_new_tokens: int, included: bool,
            min_process_len: int, window: int | None) -> None:  # fmt: skip
    """The pure-Python planner, copied into the map."""
    extra = 0 if included else num_new_tokens
    words = plan.build_task_map(
        [max(0, min(length, plan.LONGEST) + extra) for length in lens.tolist()], sms=arch.sm_count(task_map.device),
        num_kv_heads=num_head_kv, num_new_tokens=num_new_tokens,
        sig=plan.signature(num_head_kv, num_new_tokens, lens.numel(), window, included),
        min_process_len=min_process_len, max_num_batch=0, window=window,
    )  # fmt: skip
    target = task_map.view(torch.int32)
    words[3] = int(target[3])
    target[: len(words)].copy_(torch.tensor(words, dtype=torch.int32))


def describe(task_map: torch.Tensor) -> str:
    """The header and the bins of each variant, a line a bin that has work."""
    words = task_map.view(torch.int32).cpu().tolist()
    names = (
        "tile budget + 1",
        "ctas",
        "kv heads",
        "max batch",
        "schedule bytes",
        "max chunks",
        "signature",
        "layout",
    )
    lines = ["task map: " + ", ".join(f"{name} {words[i]}" for i, name in enumerate(names))]
    if words[7] != plan.LAYOUT_VERSION:
        return lines[0] + " (not assigned yet)"
    sms = arch.sm_count(task_map.device)
    for v in range(plan.NUM_VARIANTS):
        start = plan.variant_offset(sms, words[2], v)
        lines.append(f"schedule for {v + 1} CTA(s) an SM, {plan.num_bins(sms, words[2], v)} bins:")
        for g in range(plan.num_bins(sms, words[2], v)):
            _, b, t0, b_end, t_end, length, g0, chunks = words[start + g * plan.ENTRY_WORDS :][
                : plan.ENTRY_WORDS
            ]
            if b < b_end or t_end:
                shared = f", chunk of a request begun in bin {g0}, {chunks} chunks" if chunks else ""
                lines.append(
                    f"  bin {g}: request {b} tile {t0} to request {b_end} tile {t_end}, length {length}{shared}"
                )
    return "\n".join(lines)
