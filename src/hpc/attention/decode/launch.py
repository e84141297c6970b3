"""From checked arguments to launches: one `Call` for each signature seen, holding all that does not change."""

from __future__ import annotations

import math
from typing import Any

import torch

from hpc.attention.decode import choose, plan
from hpc.common.launch import Kernel, TmaTensor, raw_stream

LOG2E = 1.4426950408889634
INT32_SAFE = 2**31 - 1 - 2 * plan.TILE


def scratch_shape(key: choose.Key, chosen: choose.Plan) -> tuple[int, int]:
    """(partial slots, fp32 words of the scratch of one call): slots x kv heads x rows x (v_dim + 2)."""
    if key.dynamic:
        slots = 2 * plan.num_bins(key.sms, key.kv_heads, chosen.variant)
    else:
        slots = key.batch * chosen.num_splits if chosen.num_splits > 1 else 0
    return slots, slots * key.kv_heads * key.rows * (key.v_dim + 2)


class Call:
    """The launches of one call signature: attention, then the merge of its partials.

    Holds no tensor. `run` allocates the scratch of the call (the caching allocator ties it to the current stream).
    """

    def __init__(self, key: choose.Key, chosen: choose.Plan, device: torch.device, strides: dict[str, Any]) -> None:
        self.key, self.plan, self.device = key, chosen, device
        self.index = device.index
        self.slots, self.words = scratch_shape(key, chosen)
        self.n_bins = (
            plan.num_bins(key.sms, key.kv_heads, chosen.variant) if key.dynamic else key.batch * chosen.num_splits
        )
        self.map_offset = plan.variant_offset(key.sms, key.kv_heads, chosen.variant) if key.dynamic else 0
        self.rows_total = self.slots * key.kv_heads * key.rows
        self.pdl = key.sm90
        self.max_tokens = min(key.max_pages * key.page_size, INT32_SAFE)
        self.extra = 0 if key.new_kv_included else key.num_new_tokens
        self.strides = strides
        self._build()

    def _build(self) -> None:
        key, chosen = self.key, self.plan
        if chosen.backend == "sm90":
            from hpc.attention.decode import hopper

            self.config = hopper.Config(
                D=key.head_dim, DV=key.v_dim, P=key.page_size, G=key.group, S=key.num_new_tokens, HKV=key.kv_heads,
                R=chosen.block_rows, WT=chosen.warps_tok, WR=chosen.warps_row, STAGES=chosen.stages, FP8=key.fp8,
                STATIC=not key.dynamic, WINDOW=key.window, CAP=key.logit_cap, SINKS=key.sinks, LSE=key.return_lse,
                PDL=self.pdl,
            )  # fmt: skip
            options: dict[str, Any] = {"num_warps": self.config.WARPS, "launch_pdl": self.pdl}
            if chosen.max_registers:
                options["maxnreg"] = chosen.max_registers
            self.attention = Kernel(hopper._decode_sm90_kernel, "attention_decode", **options)
            self.grid = (self.n_bins * key.kv_heads * self.config.RB, 1, 1)
        self.merge = self._merge_kernel() if self.slots else None
