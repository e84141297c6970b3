"""From a checked signature to launches: one `Call` for each signature seen, holding all that does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpc.attention.decode import choose, plan
from hpc.common.launch import Kernel, current_device, raw_stream

BUSY_PROGRAMS = 2048  # about one wave of merge programs; more only queue up behind it

# q, kcache, vcache, block_ids, seq_lens, task_map, qscale, kscale, vscale, sinks, output, lse, partials; None: not used
Tensors = tuple[Any, ...]


@dataclass(frozen=True)
class Layout:
    """Strides of the tensors of a call, in elements."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    block: int
    qscale: tuple[int, int]
    kscale: tuple[int, int, int]
    kscale_row: int  # fp32 scales in a row of a quant type 0 buffer
    num_pages: int


def scratch(key: choose.Key, chosen: choose.Plan) -> tuple[int, int, int]:
    """(partial slots, words before the partials, fp32 words in all) of one call."""
    if key.dynamic:
        slots = 2 * plan.num_bins(key.sms, key.kv_heads, chosen.variant)
    else:
        slots = key.batch * chosen.num_splits if chosen.num_splits > 1 else 0
    rows = slots * key.kv_heads * key.rows
    offset = -(-2 * rows // 64) * 64
    return slots, offset, offset + rows * key.v_dim if slots else 0


def stand_ins(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """What Triton compiles for: a pointer that the kernel does not read is the last tensor, that of the partials."""
    return [tensors[-1] if tensor is None else tensor for tensor in tensors]


def addresses(tensors: Sequence[Any]) -> list[int]:
    """Addresses; 0 for a pointer that a kernel does not read."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class Call:
    """The launches of one call signature on one device: attention, then, unless it merges itself, the merge.

    Holds no memory of the GPU. `run` allocates the scratch of the call, so the caching allocator ties it to the current
    stream.
    """

    def __init__(
        self, key: choose.Key, chosen: choose.Plan, index: int, layout: Layout, window: int | None
    ) -> None:
        self.key, self.plan, self.index, self.layout = key, chosen, index, layout
        self.window = 0 if window is None else window
        self.default_scale = key.head_dim**-0.5
        self.slots, self.part_offset, self.words = scratch(key, chosen)
        self.signature = plan.signature(
            key.kv_heads, key.num_new_tokens, key.batch, window, key.new_kv_included
        )
        self.max_tokens = min(key.max_pages * key.page_size, plan.LONGEST)
        self.extra = 0 if key.new_kv_included else key.num_new_tokens
        self.pdl = key.sm90
        if key.dynamic:
            self.bins = plan.num_bins(key.sms, key.kv_heads, chosen.variant)
            self.map_offset = plan.variant_offset(key.sms, key.kv_heads, chosen.variant)
        else:
            self.bins, self.map_offset = key.batch * chosen.num_splits, 0
        self.count_offset = plan.variant_offset(key.sms, key.kv_heads, plan.NUM_VARIANTS)
        # `new_empty` of empty tensors, made by the first run: half the time of `torch.empty` with its keywords.
        self._new_fp32: Any = None
        self._new_bf16: Any = None
        rows = key.batch * key.num_new_tokens
        self._out_shape, self._lse_shape = (rows, key.q_heads, key.v_dim), (rows, key.q_heads)
        self._attend = self._sm90() if chosen.backend == "sm90" else self._portable()
        fused = chosen.backend == "sm90" and key.dynamic
        self._merge = self._merge_kernel() if self.slots and not fused else None

    def run(
        self,
        q: torch.Tensor,
        kcache: torch.Tensor,
        vcache: torch.Tensor,
        block_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        task_map: torch.Tensor | None,
        sinks: torch.Tensor | None,
        scale: float | None,
        cap: float | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Launch on the current stream of the tensors' device; the output, with the lse if the key asks for it."""
        if self._new_fp32 is None:
            self._new_fp32 = q.new_empty(0, dtype=torch.float32).new_empty
            self._new_bf16 = q.new_empty(0, dtype=torch.bfloat16).new_empty
        part = self._new_fp32(self.words)
        if out is None:
            out = self._new_bf16(self._out_shape)
        lse = self._new_fp32(self._lse_shape) if self.key.return_lse else None
        tensors = (q, kcache, vcache, block_ids, seq_lens, task_map, *scales, sinks, out, lse, part)
        scale = self.default_scale if scale is None else scale
        cap = 1.0 if cap is None else cap
        stream = raw_stream(self.index)
        if current_device() == self.index:
            self.launch(stream, tensors, scale, cap)
        else:
            with torch.cuda.device(self.index):
                self.launch(stream, tensors, scale, cap)
        return out if lse is None else (out, lse)

    def launch(self, stream: int, tensors: Tensors, scale: float, cap: float) -> None:
        """All launches of the call, on a stream of the current device."""
        self._attend(stream, tensors, scale, cap)
        if self._merge is not None:
            self._merge(stream, tensors)

    def _sm90_kernel(self) -> tuple[Any, Any, tuple[Any, ...]]:
        """(Triton function, compile-time facts, arguments that only this kernel takes) of the plan."""
        from hpc.attention.decode import hopper, hopper_rows

        key, chosen = self.key, self.plan
        shared = dict(
            D=key.head_dim, DV=key.v_dim, P=key.page_size, G=key.group, S=key.num_new_tokens, HKV=key.kv_heads,
            STAGES=chosen.stages, FP8=key.fp8, STATIC=not key.dynamic, WINDOW=key.window, CAP=key.logit_cap,
            SINKS=key.sinks, LSE=key.return_lse, PDL=self.pdl, FUSED=key.dynamic,
        )  # fmt: skip
        if chosen.kernel == "rows":
            pages = (self.layout.num_pages,)
            return hopper_rows._decode_rows_sm90_kernel, hopper_rows.Config(**shared), pages
        tokens = hopper.Config(R=chosen.block_rows, WT=chosen.warps_tok, WR=chosen.warps_row, **shared)
        return hopper._decode_sm90_kernel, tokens, ()

    def _sm90(self) -> Any:
        from hpc.common.gluon import TensorDescriptor

        key, chosen, layout = self.key, self.plan, self.layout
        function, config, more = self._sm90_kernel()
        kernel = Kernel(
            function,
            "attention_decode",
            num_warps=config.WARPS,
            maxnreg=chosen.max_registers,
            launch_pdl=self.pdl,
        )
        grid = (self.bins * key.kv_heads * config.CTAS, 1, 1)
        word = 2 if key.fp8 else 1
        k_shape = [layout.num_pages, key.page_size, key.kv_heads, key.head_dim]
        v_shape = [layout.num_pages, key.page_size, key.kv_heads, key.v_dim]
        k_strides, v_strides = [*layout.k, 1], [*layout.v, 1]
        before = (
            self.map_offset, self.count_offset, self.part_offset, key.batch, self.extra, self.max_tokens, self.bins,
            self.signature, self.window,
        )  # fmt: skip
        after = (
            chosen.num_splits, chosen.min_chunk, key.q_heads, layout.block, layout.q[0] // word, layout.q[1] // word,
            *layout.qscale, *layout.out, *more, config,
        )  # fmt: skip

        k_box, v_box = [1, config.PB, 1, config.DBK], [1, config.PB, 1, config.DBV]
        k_smem, v_smem = config.K_BOX, config.V_BOX

        def attend(stream: int, tensors: Tensors, scale: float, cap: float) -> None:
            q, k, v, *rest = tensors
            if kernel.compiled:  # raw addresses spare the launcher a driver query a pointer
                k_desc = kernel.descriptor(0, k.data_ptr(), k, k_shape, k_strides)
                v_desc = kernel.descriptor(1, v.data_ptr(), v, v_shape, v_strides)
                pointers = (q.data_ptr(), *k_desc, *v_desc, *addresses(rest))
            else:
                k_desc = TensorDescriptor(k, k_shape, k_strides, k_box, k_smem)
                v_desc = TensorDescriptor(v, v_shape, v_strides, v_box, v_smem)
                pointers = (q, k_desc, v_desc, *stand_ins(rest))
            kernel(grid, stream, (*pointers, *before, scale, cap, *after))

        return attend

    def _portable(self) -> Any:
        from hpc.attention.decode import kernels

        key, chosen, layout = self.key, self.plan, self.layout
        large = chosen.block_rows > 32 or (chosen.block_rows == 32 and max(key.head_dim, key.v_dim) > 128)
        kernel = Kernel(
            kernels._decode_attention_kernel,
            "attention_decode",
            num_warps=8 if large else 4,
            launch_pdl=self.pdl,
        )
        grid = (self.bins, key.kv_heads, -(-key.rows // chosen.block_rows))
        wide = max(*layout.k[:2], *layout.v[:2]) * key.page_size >= 2**31
        fixed = (
            layout.block, *layout.q, layout.qscale[0], *layout.k, *layout.v, *layout.kscale, *layout.out,
            key.q_heads, key.kv_heads, key.num_new_tokens, key.head_dim, key.v_dim, key.page_size,
            chosen.block_rows, max(16, power_of_two(key.head_dim)), max(16, power_of_two(key.v_dim)),
            key.quant_type, layout.kscale_row, key.new_kv_included, key.window, key.logit_cap, key.sinks,
            key.return_lse, not key.dynamic, chosen.num_splits, chosen.min_chunk, wide, chosen.stages, self.pdl, False,
        )  # fmt: skip
        before = (key.batch, layout.num_pages, key.max_pages, self.signature)
        as_bytes = key.fp8 and not key.sm90  # older GPUs have no e4m3 conversion
        map_bytes, part_bytes = 4 * self.map_offset, 4 * self.part_offset

        def attend(stream: int, tensors: Tensors, scale: float, cap: float) -> None:
            if kernel.compiled:
                q, k, v, ids, lens, words, qs, ks, vs, sink, out, lse, ml = addresses(tensors)
                pointers = (
                    q,
                    k,
                    v,
                    out,
                    lse,
                    ml + part_bytes,
                    ml,
                    ids,
                    lens,
                    words + map_bytes,
                    qs,
                    ks,
                    vs,
                    sink,
                )
            else:
                pointers = typed(stand_ins(tensors))
            kernel(grid, stream, (*pointers, *before, scale, cap, self.window, *fixed))

        def typed(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
            q, k, v, ids, lens, words, qs, ks, vs, sink, out, lse, ml = tensors
            if as_bytes:
                q, k, v = (t.view(torch.uint8) for t in (q, k, v))
            words = words.view(torch.int32)[self.map_offset :] if key.dynamic else ids
            ks = ks.view(torch.float32) if key.quant_type == 0 else ks
            return (q, k, v, out, lse, ml[self.part_offset :], ml, ids, lens, words, qs, ks, vs, sink)

        return attend

    def _merge_kernel(self) -> Any:
        from hpc.attention.decode import merge

        key, chosen = self.key, self.plan
        entries = plan.num_merges(key.batch, self.bins) if key.dynamic else key.batch
        chunks = min(64, power_of_two(min(self.bins, chosen.num_splits if not key.dynamic else self.bins)))
        width = power_of_two(key.v_dim)
        rows, block = 1, min(64, width)
        # The tile's shape sets the order of its sums: a batch-invariant call keeps one shape.
        busy = entries * key.kv_heads * key.rows * (width // block) > BUSY_PROGRAMS
        if busy and not key.batch_invariant:
            rows, block, chunks = 2, min(128, width), min(chunks, 32)
        row_blocks = -(-key.rows // rows)
        grid = (entries, key.kv_heads * row_blocks, -(-key.v_dim // block))
        kernel = Kernel(merge._merge_kernel, "attention_decode", num_warps=4, launch_pdl=self.pdl)
        merge_offset = self.map_offset + plan.ENTRY_WORDS * self.bins
        vscale_kind = 0 if not key.fp8 else 2 - key.quant_type
        fixed = (
            merge_offset, self.part_offset, self.extra, self.max_tokens, self.signature, self.window,
            chosen.num_splits, chosen.min_chunk, row_blocks, *self.layout.out,
            key.q_heads, key.kv_heads, key.num_new_tokens, key.v_dim, chunks, rows, block, vscale_kind, key.window,
            key.sinks, key.return_lse, not key.dynamic, self.pdl, False,
        )  # fmt: skip

        def run(stream: int, tensors: Tensors) -> None:
            given: Any = addresses(tensors) if kernel.compiled else stand_ins(tensors)
            _, _, _, _, seq_lens, task_map, _, _, vscale, sinks, out, lse, ml = given
            kernel(grid, stream, (ml, out, lse, seq_lens, task_map, vscale, sinks, *fixed))

        return run
