"""What the SGLang backend knows about one step: lengths, page tables, schedules. No SGLang import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import hpc

MIN_PROCESS_LEN = 512
MAX_QUERY_ROWS = 16

Schedule = tuple[int | None, int]
"""What a task map is made for: window and KV heads of a layer."""


@dataclass
class Step:
    """One forward pass. Shapes for B requests: lengths int32 [B], tables int32 [B, max_pages] or fewer columns.

    `seq_lens` counts this step's tokens. `query_rows` is the same for all requests in decoding and verification and 0
    in prefill, where `cu_seqlens_q` and `longest` say how the rows are divided. `window_table` addresses the separate
    pool of sliding-window layers, if there is one, and `window_slots` says where their new rows go.
    """

    seq_lens: torch.Tensor
    table: torch.Tensor
    window_table: torch.Tensor | None = None
    window_slots: torch.Tensor | None = None
    query_rows: int = 1
    cu_seqlens_q: torch.Tensor | None = None
    longest: int = 1
    task_maps: dict[Schedule, torch.Tensor] = field(default_factory=dict)


class PageTables:
    """Page tables from SGLang's request table, by gathers of fixed shape: no host synchronisation, capturable.

    A page is a run of `page_size` neighbouring slots that starts at a multiple of it, so its number is that of its
    first token's slot. Entries past a request's length come from stale slots; the operators never read them.
    """

    def __init__(
        self, req_to_token: torch.Tensor, page_size: int, full_to_window: torch.Tensor | None
    ) -> None:
        self.req_to_token, self.page_size, self.full_to_window = req_to_token, page_size, full_to_window
        self.starts = torch.arange(0, req_to_token.shape[1], page_size, device=req_to_token.device)

    @property
    def max_pages(self) -> int:
        return self.starts.shape[0]

    def empty(self, batch: int, longest: int | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Zeroed tables of `batch` requests: of the main pool and, if there is one, of the window pool.

        `longest`: tokens of the longest request where the host knows it. Then they are views of its pages only, because
        the prefill operator, which reads no length on the host, chooses parts over keys by the width of its table.
        """
        pages = self.max_pages
        if longest is not None:
            pages = min(max(1, -(-longest // self.page_size)), pages)
        tables = [
            torch.zeros((batch, self.max_pages), dtype=torch.int32, device=self.starts.device)[:, :pages]
            for _ in range(1 if self.full_to_window is None else 2)
        ]
        return tables[0], tables[1] if len(tables) > 1 else None

    def fill(self, step: Step, req_pool_indices: torch.Tensor) -> None:
        """Write the tables of `step` in place, as wide as they are."""
        slots = self.req_to_token[req_pool_indices.long()[:, None], self.starts[: step.table.shape[1]]]
        step.table.copy_(torch.div(slots, self.page_size, rounding_mode="floor"))
        if step.window_table is not None:
            assert self.full_to_window is not None
            # A stale slot may lie anywhere; a live one is in range.
            slots = self.full_to_window[slots.long().clamp(0, self.full_to_window.shape[0] - 1)]
            step.window_table.copy_(torch.div(slots, self.page_size, rounding_mode="floor"))


class Schedules:
    """Task maps of decode attention: one workspace for each kind of layer, filled once a step for all its layers."""

    def __init__(self, kinds: set[Schedule], max_batch: int, max_seqlen: int) -> None:
        self.workspaces = {
            kind: hpc.get_attention_decode_task_workspace(
                max_batch, max_seqlen, kind[1], min_process_len=MIN_PROCESS_LEN
            )
            for kind in sorted(kinds, key=str)
        }

    def assign(self, step: Step) -> None:
        """Fill all maps from the lengths of `step`; recorded when a graph is being captured."""
        for (window, num_kv_heads), workspace in self.workspaces.items():
            hpc.assign_attention_decode_task(
                step.seq_lens, workspace, num_kv_heads, step.query_rows, True, MIN_PROCESS_LEN, window=window
            )
        step.task_maps = self.workspaces


def longest_on_host(forward_batch: Any) -> int | None:
    """Tokens of the longest request of an extend batch, this step's included; None where the host does not know.

    `seq_lens_cpu` is SGLang's copy of `seq_lens`; it is None where only the device knows how many drafts were accepted.
    Prefixes and new tokens stand in for it, but not in a mixed batch: SGLang adds a decoding request's tokens up late.
    The larger of both is taken: too wide a table costs time, too narrow a one would cut keys off.
    """
    batch = forward_batch.batch_size
    lens = getattr(forward_batch, "seq_lens_cpu", None)
    known = [] if lens is None or lens.device.type != "cpu" else lens[:batch].tolist()
    prefix, fresh = (
        getattr(forward_batch, f"extend_{name}_lens_cpu", None) or [] for name in ("prefix", "seq")
    )
    sums = [int(old) + int(new) for old, new in zip(prefix, fresh, strict=False)]
    if len(known) < batch and (forward_batch.forward_mode.is_mixed() or len(sums) < batch):
        return None
    return max((*known, *sums), default=None)


def window_of(layer: Any) -> int | None:
    """Keys that a token of `layer` sees, itself included. SGLang counts the earlier ones; -1 and None mean all."""
    size = layer.sliding_window_size
    return None if size is None or size < 0 else size + 1


def attention_layers(model: Any) -> list[Any]:
    """SGLang's `RadixAttention` layers of a model, found by their attributes."""
    names = ("tp_q_head_num", "tp_k_head_num", "sliding_window_size", "layer_id")
    return [module for module in model.modules() if all(hasattr(module, name) for name in names)]
