"""From a checked signature to launches: one `Call` for each signature seen, holding all that does not change.

Rows, requests and the page table's width change from call to call in serving; they are arguments of `run`.
"""

from __future__ import annotations

from typing import Any

import torch

from hpc.attention.prefill import plan
from hpc.attention.prefill.validate import Layout
from hpc.common.launch import Kernel, current_device, raw_stream

TILES_A_PROGRAM, REQUESTS_A_STEP = 32, 64  # of the schedule
PARTS_A_PROGRAM = 64  # of the joining: parts times rows

# q, k, v, output, lse, table, block_ids, qscale, kscale, vscale, sinks; None: not used
Tensors = tuple[Any, ...]


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def addresses(tensors: Tensors) -> list[int]:
    """Addresses; 0 for a pointer that a kernel does not read."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


class Call:
    """The launches of one call signature on one device: the tile table, then attention; attention alone if it is short,
    or split on SM90 with few requests; a split one ends with the joining of its parts.

    Holds no memory of the GPU. `run` allocates the table and the scratch of the call, so the caching allocator ties
    them to the current stream.
    """

    def __init__(
        self, key: plan.Key, chosen: plan.Plan, index: int, layout: Layout, window: int | None
    ) -> None:
        self.key, self.plan, self.index, self.layout = key, chosen, index, layout
        self.window = 0 if window is None else window
        self.default_scale = key.head_dim**-0.5
        self.pdl = key.sm90
        self.paged = key.page_size > 0
        self.tile_tokens = chosen.tile_tokens
        self._window = window
        self._reach = plan.LONGEST if window is None else window + chosen.split_tokens
        self._split: dict[int, Any] = {}  # attention by parts, or for any number of them
        self._joins: dict[int, Any] = {}  # by the parts that there is room for
        self._schedule = self._schedule_kernel(self.tile_tokens)
        self._split_schedule: Any = None
        if chosen.backend == "sm90":
            self._attend = self._attend_short = self._sm90(chosen.pack, chosen.overlap)
            if chosen.short_kernel:
                self._attend_short = self._sm90(chosen.short_pack, False)
        else:
            self._attend = self._portable(1)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        block_ids: torch.Tensor | None,
        seq_lens: torch.Tensor,
        scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        sinks: torch.Tensor | None,
        scale: float | None,
        cap: float | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Launch on the current stream of the tensors' device; the output, with the lse if the key asks for it."""
        tokens, batch = q.shape[0], seq_lens.shape[0]
        parts = self.plan.splits
        if parts != 1:
            reach = tokens if block_ids is None else min(self.capacity(block_ids), self._reach)
            parts = plan.parts(tokens, batch, reach, self.plan, self.key)
        short = parts == 1 and plan.is_short(tokens, batch, self.plan, self.key)
        tile_tokens = self.plan.short_tokens if short else self.tile_tokens
        if parts > 1:
            tile_tokens = self.plan.split_tokens
        tiles = plan.bound(tokens, batch, tile_tokens)
        table = cu_seqlens.new_empty(plan.HEADER_WORDS + tiles * plan.ENTRY_WORDS)
        if out is None:
            out = q.new_empty((tokens, self.key.q_heads, self.key.v_dim), dtype=torch.bfloat16)
        lse = q.new_empty((tokens, self.key.q_heads), dtype=torch.float32) if self.key.return_lse else None
        tensors = (q, k, v, out, lse, table, block_ids, *scales, sinks)
        scale = self.default_scale if scale is None else scale
        cap = 1.0 if cap is None else cap
        stream = raw_stream(self.index)
        if current_device() == self.index:
            self.launch(stream, tensors, cu_seqlens, seq_lens, tiles, scale, cap, short, parts)
        else:
            with torch.cuda.device(self.index):
                self.launch(stream, tensors, cu_seqlens, seq_lens, tiles, scale, cap, short, parts)
        return out if lse is None else (out, lse)

    def launch(
        self, stream: int, tensors: Tensors, cu_seqlens: torch.Tensor, seq_lens: torch.Tensor, tiles: int,
        scale: float, cap: float, short: bool = False, parts: int = 1,
    ) -> None:  # fmt: skip
        """All launches of the call, on a stream of the current device; `short` and `parts` as the plan says."""
        given = (cu_seqlens, seq_lens, tiles, scale, cap)
        if parts > 1:
            self._launch_parts(stream, tensors, given, parts)
        elif short:
            self._attend_short(stream, tensors, *given, True)
        else:
            self._schedule(stream, tensors, cu_seqlens, seq_lens, tiles)
            self._attend(stream, tensors, *given)

    def _launch_parts(self, stream: int, tensors: Tensors, given: tuple[Any, ...], parts: int) -> None:
        q, out, lse, sinks = tensors[0], tensors[3], tensors[4], tensors[10]
        rows, key = q.shape[0] * parts, self.key
        part_o = q.new_empty((rows, key.q_heads, key.v_dim), dtype=torch.float32)
        part_lse = q.new_empty((rows + q.shape[0], key.q_heads), dtype=torch.float32)
        lse = part_lse[rows:] if lse is None else lse
        if self.plan.backend == "sm90":
            if not self._split:
                self._split[0] = self._sm90(self.plan.split_pack, False, split=True)
                self._split_schedule = self._schedule_kernel(self.plan.split_tokens)
            placed = given[1].shape[0] <= plan.PLACED_REQUESTS
            if not placed:
                self._split_schedule(stream, tensors, *given[:3])
            self._split[0](stream, tensors, *given, placed, parts, (part_o, part_lse))
        else:
            if parts not in self._split:
                self._split[parts] = self._portable(parts)
            self._schedule(stream, tensors, *given[:3])
            scratch = (*tensors[:3], part_o, part_lse, *tensors[5:10], None)
            self._split[parts](stream, scratch, *given)
        room = 8 if parts <= 8 else plan.MOST_SPLITS
        if room not in self._joins:
            self._joins[room] = self._combine_kernel(room)
        self._joins[room](stream, (out, lse, part_o, part_lse, sinks), parts)

    def capacity(self, block_ids: torch.Tensor) -> int:
        """Keys of a request at most."""
        return min(block_ids.shape[1] * self.key.page_size, plan.LONGEST)

    def _schedule_kernel(self, tile_tokens: int) -> Any:
        from hpc.attention.prefill import schedule

        key = self.key
        kernel = Kernel(
            schedule._prefill_schedule_kernel, "attention_prefill", num_warps=4, launch_pdl=self.pdl
        )
        fixed = (
            tile_tokens, self.plan.block_n, self.paged, key.causal, key.window, TILES_A_PROGRAM, REQUESTS_A_STEP,
            self.pdl,
        )  # fmt: skip
        most = plan.heaviest(self._window, tile_tokens, self.plan.block_n)

        def place(stream: int, tensors: Tensors, cu: torch.Tensor, lens: torch.Tensor, tiles: int) -> None:
            q, table, block_ids = tensors[0], tensors[5], tensors[6]
            capacity = 0 if block_ids is None else self.capacity(block_ids)
            pointers: Any = (cu, lens, table)
            if kernel.compiled:
                pointers = addresses(pointers)
            numbers = (lens.shape[0], q.shape[0], tiles, capacity, most)
            kernel((-(-tiles // TILES_A_PROGRAM), 1, 1), stream, (*pointers, *numbers, *fixed))

        return place

    def _portable(self, parts: int) -> Any:
        from hpc.attention.prefill import kernels

        key, chosen, layout = self.key, self.plan, self.layout
        kernel = Kernel(
            kernels._prefill_attention_kernel,
            "attention_prefill",
            num_warps=chosen.warps,
            launch_pdl=self.pdl,
        )
        wide = self.paged and max(*layout.k[:2], *layout.v[:2]) * key.page_size >= 2**31
        split = parts > 1
        out_strides = (key.q_heads * key.v_dim, key.v_dim) if split else layout.out
        strides = (*layout.q, *layout.k, *layout.v, *out_strides)
        fixed = (
            key.q_heads, key.kv_heads, key.head_dim, key.v_dim, key.page_size, chosen.pack, chosen.block_m,
            chosen.block_n, max(16, power_of_two(key.head_dim)), max(16, power_of_two(key.v_dim)), key.quant_type,
            layout.kscale_row, key.causal, key.window, key.logit_cap, key.sinks and not split, key.return_lse or split,
            wide, chosen.stages, parts, self.pdl, False,
        )  # fmt: skip
        as_bytes = key.fp8 and not key.sm90  # older GPUs have no e4m3 conversion
        head_blocks = key.q_heads // chosen.pack

        def attend(
            stream: int, tensors: Tensors, cu: torch.Tensor, lens: torch.Tensor, tiles: int, scale: float, cap: float
        ) -> None:  # fmt: skip
            block_ids, qscale = tensors[6], tensors[7]
            qs = (0, 0, 0) if qscale is None else (*qscale.stride()[:2], qscale.shape[2])
            ids = 0 if block_ids is None else block_ids.stride(0)
            pointers: Any = addresses(tensors) if kernel.compiled else typed(tensors)
            numbers = (layout.num_pages, scale, cap, self.window, ids, *strides, *qs, *layout.kscale)
            grid = (tiles * head_blocks * parts, 1, 1)
            kernel(grid, stream, (*pointers, *numbers, *fixed))

        def typed(tensors: Tensors) -> list[Any]:
            """What Triton compiles for: a pointer that the kernel does not read is the table."""
            given = [tensors[5] if tensor is None else tensor for tensor in tensors]
            if as_bytes:
                given[:3] = (t.view(torch.uint8) for t in given[:3])
            if key.quant_type == 0:
                given[8] = given[8].view(torch.float32)
            return given

        return attend

    def _combine_kernel(self, room: int) -> Any:
        """Joining of `room` parts at most."""
        from hpc.attention.prefill import combine

        key, layout, at_once = self.key, self.layout, PARTS_A_PROGRAM // room
        kernel = Kernel(
            combine._prefill_combine_kernel, "attention_prefill", num_warps=4 if key.v_dim <= 128 else 8,
            launch_pdl=self.pdl,
        )  # fmt: skip
        fixed = (
            key.q_heads, key.v_dim, at_once, room, power_of_two(key.v_dim), key.sinks, self.pdl, False,
        )  # fmt: skip

        def join(stream: int, tensors: Tensors, parts: int) -> None:
            rows = tensors[0].shape[0] * key.q_heads
            pointers: Any = [tensors[2] if tensor is None else tensor for tensor in tensors]
            if kernel.compiled:
                pointers = addresses(tensors)
            kernel((-(-rows // at_once), 1, 1), stream, (*pointers, rows, parts, *layout.out, *fixed))

        return join

    def _sm90(self, pack: int, overlap: bool, split: bool = False) -> Any:
        from hpc.attention.prefill import hopper

        key, chosen, layout = self.key, self.plan, self.layout
        config = hopper.Config(
            D=key.head_dim, P=key.page_size, PACK=pack, HQ=key.q_heads, HKV=key.kv_heads, STAGES=chosen.stages,
            FP8=key.fp8, CAUSAL=key.causal, WINDOW=key.window, CAP=key.logit_cap, SINKS=key.sinks and not split,
            LSE=key.return_lse or split, PDL=self.pdl, BN=chosen.block_n, OVERLAP=overlap, SPLIT=split,
        )  # fmt: skip
        fn: Any = hopper._prefill_sm90_bf16_kernel
        if key.fp8:
            from hpc.attention.prefill import hopper_fp8

            fn = hopper_fp8._prefill_sm90_fp8_kernel
        kernel = Kernel(fn, "attention_prefill", num_warps=4, launch_pdl=self.pdl)
        page, heads = key.page_size, key.kv_heads
        kv_shape, kv_box = [layout.num_pages, page, heads, key.head_dim], [1, config.PB, 1, config.DB]
        q_box = [config.QT, config.PACK, config.DB]
        o_box = [config.QT, config.PACK, config.O_COLS // config.OH]
        smem = (config.Q_BOX, config.KV_BOX, config.KV_BOX, config.O_BOX)
        strides = ([*layout.q, 1], [*layout.k, 1], [*layout.v, 1], [*layout.out, 1])
        out_strides = (key.q_heads * key.v_dim, key.v_dim) if split else layout.out

        def attend(
            stream: int, tensors: Tensors, cu: torch.Tensor, lens: torch.Tensor, tiles: int, scale: float, cap: float,
            short: bool = False, parts: int = 1, scratch: tuple[Any, Any] | None = None,
        ) -> None:  # fmt: skip
            q, k, v, out, lse, table, block_ids, qscale, kscale, vscale, sinks = tensors
            rows = [q.shape[0], key.q_heads, key.head_dim]
            described = tuple(zip((q, k, v, out), (rows, kv_shape, kv_shape, rows), strides, strict=True))
            scales = (qscale, kscale, vscale) if key.fp8 else ()
            rest = (*(scratch or (out, lse)), table, cu, lens, block_ids, sinks, *scales)
            if kernel.compiled:  # raw addresses spare the launcher a driver query a pointer
                descs: Any = ()
                for number, (tensor, shape, steps) in enumerate(described):
                    descs += kernel.descriptor(number, tensor.data_ptr(), tensor, shape, steps)
                pointers = (*descs, *addresses(rest))
            else:
                boxes = (q_box, kv_box, kv_box, o_box)
                descs = (
                    hopper.TensorDescriptor(*x, box, at)
                    for x, box, at in zip(described, boxes, smem, strict=True)
                )
                pointers = (*descs, *(table if x is None else x for x in rest))
            qs = () if qscale is None else (*qscale.stride()[:2], qscale.shape[2])
            ctas = min(key.sms, tiles * config.NH)
            grid = tiles * config.NH * parts if split else ctas
            requests = lens.shape[0] if short else 0
            numbers = (
                requests, rows[0], self.capacity(block_ids), block_ids.stride(0), parts if split else ctas,
                layout.num_pages, self.window, scale, cap, *out_strides, *qs,
            )  # fmt: skip
            kernel((grid, 1, 1), stream, (*pointers, *numbers, config))

        return attend
