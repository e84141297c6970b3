"""From a checked signature to launches: one `Call` for each signature seen, holding all that does not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hpc.common.launch import Kernel, TmaTensor, raw_stream
from hpc.moe import plan
from hpc.moe.scratch import block_sizes, expert_bins, layout
from hpc.moe.validate import Arguments

NAME = "fuse_moe"
MAX_KEPT = 256  # descriptors of a call's activations
TILES = ("expert", "start", "rows", "num_tiles", "pair")  # fields of the scratch: the tile list and its pairs
Launch = Callable[..., None]


def reduce_block(hidden: int, num_tokens: int, sms: int) -> int:
    """Columns of one program of the weighted sum: narrow while there are few tokens, to fill the GPU."""
    block = 1024
    while block > 256 and num_tokens * plan.ceil_div(hidden, block) < 2 * sms:
        block //= 2
    return min(block, plan.power_of_two(hidden))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """e4m3 as its bits: Triton's interpreter and GPUs before SM89 know no such type."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


class Call:
    """The launches of one call signature on one device. Holds no tensor: `run` allocates the scratch of the call."""

    def __init__(self, key: plan.Key, chosen: plan.Plan, index: int, rank_ep: int, shared: bool,
                 stride_out: int, scales: tuple[tuple[int, ...], ...], interpret: bool = False) -> None:  # fmt: skip
        self.key, self.plan, self.index = key, chosen, index
        self.layout = layout(key, chosen)
        self.pdl = key.sm90
        self.scales, self.interpret = block_sizes(key) if key.one_scale else scales, interpret
        routed = key.num_experts - key.shared_experts
        self.first_expert = 0 if key.shared_experts else rank_ep * routed
        self._append = self._shared_experts(rank_ep * routed) if key.shared_experts else None
        self.gate = (key.activation, key.swiglu_limit or 0.0, key.swiglu_alpha or 0.0)
        self._quantise = self._input() if key.quantised_input else None
        self._expand = self._weight_scales() if key.one_scale else None
        if chosen.backend == "tiny":
            self.steps: tuple[Launch, ...] = self._tiny(shared, stride_out)
        else:
            products = self._sm90() if chosen.backend == "sm90" else self._portable()
            end = self._weighted_sum(shared, stride_out) if key.combined else self._no_sum()
            self.steps = (self._index_build(), *products, end)

    def run(self, args: Arguments, factor: float, out: torch.Tensor) -> None:
        """Launch on the current stream of the tensors' device."""
        scratch = torch.empty(self.layout.size, dtype=torch.uint8, device=args.x.device)
        if torch.cuda.current_device() == self.index:
            self.launch(raw_stream(self.index), args, factor, out, scratch)
        else:
            with torch.cuda.device(self.index):
                self.launch(raw_stream(self.index), args, factor, out, scratch)

    def launch(
        self, stream: int, args: Arguments, factor: float, out: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """All kernels of the call, in order."""
        if self._quantise is not None:
            args = self._quantise(stream, args, scratch)
        if self._expand is not None:
            args = self._expand(stream, args, scratch)
        if self._append is not None:
            args = self._append(stream, args, scratch, factor)
        for step in self.steps:
            step(stream, args, scratch, factor, out)

    def _words(self, scratch: torch.Tensor, *names: str) -> list[torch.Tensor]:
        """int32 views of scratch fields, to their end and beyond: a kernel knows its bounds."""
        words = scratch.view(torch.int32)
        return [words[getattr(self.layout, name) // 4 :] for name in names]

    def _input(self) -> Callable[..., Arguments]:
        """The launch that turns BF16 activations into e4m3, and the call on these."""
        from hpc.moe import quantise

        key, layout = self.key, self.layout
        columns = plan.ceil_div(key.hidden, 128)
        groups = min(16, plan.power_of_two(columns))
        kernel = Kernel(
            quantise._moe_quantise_kernel, NAME, num_warps=max(1, groups // 4), launch_pdl=self.pdl
        )
        grid = (key.num_tokens, plan.ceil_div(columns, groups), 1)
        fixed = (key.hidden, columns, groups, key.block_scales, key.hardware_fp8, self.pdl)

        def run(stream: int, args: Arguments, scratch: torch.Tensor) -> Arguments:
            bits = scratch[layout.xq : layout.xq + key.num_tokens * key.hidden].view(
                key.num_tokens, key.hidden
            )
            scale = args.input_scale
            if key.block_scales:
                scale = scratch.view(torch.float32)[layout.xs // 4 :][: key.num_tokens * columns]
            if kernel.compiled:
                kernel(grid, stream, (args.x.data_ptr(), scale.data_ptr(), bits.data_ptr(), *fixed))
            else:
                kernel(grid, stream, (args.x, scale, bits, *fixed))
            return replace(
                args, x=bits.view(torch.float8_e4m3fn), x_scale=scale if key.block_scales else None
            )

        return run

    def _weight_scales(self) -> Callable[..., Arguments]:
        """The launch that makes block scales of an expert's one, and the call on these."""
        from hpc.moe import quantise

        key, layout = self.key, self.layout
        counts = [rows * cols for rows, cols in block_sizes(key)]
        kernel = Kernel(quantise._moe_expand_kernel, NAME, num_warps=4, launch_pdl=self.pdl)
        grid = (key.num_experts, plan.ceil_div(max(counts), 1024), 1)
        fixed = (*counts, 1024, self.pdl)

        def run(stream: int, args: Arguments, scratch: torch.Tensor) -> Arguments:
            floats = scratch.view(torch.float32)
            up, down = floats[layout.up_scale // 4 :], floats[layout.down_scale // 4 :]
            tensors = (args.w13_scale, args.w2_scale, up, down)
            pointers = [t.data_ptr() for t in tensors if t is not None] if kernel.compiled else tensors
            kernel(grid, stream, (*pointers, *fixed))
            return replace(args, w13_scale=up, w2_scale=down)

        return run

    def _shared_experts(self, first_expert: int) -> Callable[..., Arguments]:
        """The launch that appends the shared experts to every token's, and the call on these."""
        from hpc.moe import route

        key, layout, pairs = self.key, self.layout, self.key.pairs
        kernel = Kernel(route._moe_append_kernel, NAME, num_warps=4, launch_pdl=self.pdl)
        routed, grid = key.num_experts - key.shared_experts, (plan.ceil_div(pairs, 512), 1, 1)
        fixed = (key.top_k - key.shared_experts, key.top_k, 512, self.pdl)

        def run(stream: int, args: Arguments, scratch: torch.Tensor, factor: float) -> Arguments:
            ids, weights = (
                scratch[at : at + 4 * pairs].view(dtype).view(key.num_tokens, key.top_k)
                for at, dtype in ((layout.ids, torch.int32), (layout.weights, torch.float32))
            )
            tensors = (args.topk_ids, args.topk_scale, ids, weights)
            pointers = [t.data_ptr() for t in tensors] if kernel.compiled else tensors
            kernel(grid, stream, (*pointers, pairs, first_expert, routed, 1.0 / factor, *fixed))
            return replace(args, topk_ids=ids, topk_scale=weights)

        return run

    def _index_build(self) -> Launch:
        from hpc.moe import route

        key, chosen, layout = self.key, self.plan, self.layout
        bins, chunk, pairs = expert_bins(key), chosen.chunk, key.pairs
        options = {"num_warps": 4, "launch_pdl": self.pdl}
        place = Kernel(route._moe_place_kernel, NAME, **options)
        count = Kernel(route._moe_count_kernel, NAME, **options)
        scan = Kernel(route._moe_scan_kernel, NAME, **options)
        grid = (layout.num_chunks, 1, 1)
        ids = (pairs, key.num_experts, self.first_expert)
        cols = min(32, bins)
        drop = key.weighted  # pairs of weight 0
        fixed = (bins, chunk, plan.power_of_two(pairs), chosen.tile, chosen.fused_index, drop, self.pdl)
        fields = ("counts", "totals", "expert", "start", "rows", "num_tiles", "pair", "row", "counters")

        def run(
            stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor
        ) -> None:
            if place.compiled:
                base = scratch.data_ptr()
                at = [base + getattr(layout, name) for name in fields]
                routing = (args.topk_ids.data_ptr(), args.topk_scale.data_ptr())
            else:
                at, routing = self._words(scratch, *fields), (args.topk_ids, args.topk_scale)
            if not chosen.fused_index:
                count(grid, stream, (*routing, at[0], *ids, bins, chunk, drop, self.pdl))
                scan(
                    (bins // cols, 1, 1), stream, (at[0], at[1], layout.num_chunks, bins, cols, 32, self.pdl)
                )
            place(grid, stream, (*routing, *at, *ids, layout.num_counters, *fixed))

        return run

    def _portable(self) -> tuple[Launch, ...]:
        from hpc.moe import kernels

        key, chosen, layout = self.key, self.plan, self.layout
        # 64 columns of BF16 are 128 bytes; a dynamic scale's sums take registers of their own
        block_k = 64 if chosen.tile > 32 or key.bf16_weights or key.dynamic_act else 128
        options = {"num_warps": 8 if chosen.tile > 16 else 4, "num_stages": 3, "launch_pdl": self.pdl}
        gate_up = Kernel(kernels._moe_gate_up_kernel, NAME, **options)
        down = Kernel(kernels._moe_down_kernel, NAME, **options)
        per_sm = 2 if chosen.tile <= 32 else 1
        grids = [
            (max(1, min(layout.max_tiles * blocks, per_sm * key.sms)), 1, 1)
            for blocks in (key.groups, plan.ceil_div(key.hidden, 128))
        ]
        (w13_rows, w13_cols), (w2_rows, w2_cols) = self.scales
        sizes = (key.hidden, key.inter, layout.act_stride)
        up_fixed = (
            key.pairs, key.top_k, *sizes, plan.ceil_div(key.hidden, 128), w13_rows, w13_cols,
            chosen.tile, block_k, key.block_scales, key.act_groups, key.bf16_weights, key.bf16_mul,
            *self.gate, key.hardware_fp8, self.pdl, self.interpret,
        )  # fmt: skip
        down_fixed = (
            key.pairs, *sizes, w2_rows, w2_cols, chosen.tile, 128, block_k, key.block_scales, key.act_groups,
            key.bf16_weights, self.pdl, self.interpret,
        )  # fmt: skip

        def run(
            stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor
        ) -> None:
            tensors = (args.x, args.x_scale, args.w13, args.w13_scale, args.act_scale, args.w2, args.w2_scale)
            parts = (args.w13_bias, args.topk_scale if key.weight_on_input else None, args.w2_bias)
            if down.compiled:
                base = scratch.data_ptr()
                x, xs, w13, s13, act, w2, s2 = (base if t is None else t.data_ptr() for t in tensors)
                b13, weight, b2 = (None if t is None else t.data_ptr() for t in parts)
                lists = [base + getattr(layout, name) for name in TILES]
                a, a_scale = base + layout.act, base + layout.act_scale
                y = base + layout.y if key.combined else out.data_ptr()
            else:
                floats = scratch.view(torch.float32)
                x, xs, w13, s13, act, w2, s2 = (
                    floats if t is None else t.view(torch.uint8) if t.element_size() == 1 else t
                    for t in tensors
                )
                b13, weight, b2 = parts
                lists = self._words(scratch, *TILES)
                a, a_scale = scratch[layout.act :], floats[layout.act_scale // 4 :]
                a = a.view(torch.bfloat16) if key.bf16_weights else a
                y = self._results(scratch, out)
            gate_up(grids[0], stream, (x, xs, w13, s13, act, b13, weight, *lists, a, a_scale, *up_fixed))
            down(grids[1], stream, (a, a_scale, w2, s2, b2, *lists, y, *down_fixed))

        return (run,)

    def _sm90(self) -> tuple[Launch, ...]:
        from hpc.moe import hopper, hopper_down

        up, down = self._configs(hopper.UpConfig, hopper_down.DownConfig)
        up_kernel, down_kernel = hopper._moe_gate_up_sm90_kernel, hopper_down._moe_down_sm90_kernel
        if up.PAIR or down.PAIR:
            from hpc.moe import hopper_pair, hopper_pair_down

            up_kernel = hopper_pair._moe_gate_up_pair_kernel if up.PAIR else up_kernel
            down_kernel = hopper_pair_down._moe_down_pair_kernel if down.PAIR else down_kernel
        gate_up = Kernel(up_kernel, NAME, **self._options(self.plan.up))
        product = Kernel(down_kernel, NAME, **self._options(self.plan.down))
        return self._sm90_up(gate_up, up), self._sm90_down(product, down)

    def _sm90_up(self, gate_up: Kernel, up: Any) -> Launch:
        """The gate-up product; `up` is its `UpConfig`."""
        from hpc.moe import hopper

        key, layout, chosen = self.key, self.layout, self.plan.up
        assert chosen is not None
        hidden, inter = key.hidden, key.inter
        grid = (chosen.per_sm * key.sms, 1, 1)
        fixed = (key.pairs, key.top_k, layout.act_stride, plan.ceil_div(hidden, 128), *self.scales[0], up)
        # gate and up rows in turn, by eight
        w13_shape = [key.num_experts, inter // 8, 2, 8, hidden]
        w13_strides = [2 * inter * hidden, 8 * hidden, inter * hidden, hidden, 1]
        up_places = [getattr(layout, name) for name in (*TILES, "counters", "parts", "act", "act_scale")]

        def run(
            stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor
        ) -> None:
            tensors = (args.x, args.x_scale, args.w13_scale, args.act_scale)
            if gate_up.compiled:
                base = scratch.data_ptr()
                desc = gate_up.descriptor(0, args.w13.data_ptr(), args.w13, w13_shape, w13_strides)
                pointers = [base if t is None else t.data_ptr() for t in tensors]
                places = [base + at for at in up_places]
            else:
                floats = scratch.view(torch.float32)
                box = [1, 16 if up.PAIR else 8, 2, 8, 128]
                desc = (hopper.TensorDescriptor(args.w13, w13_shape, w13_strides, box, up.W_BOX),)
                pointers = [floats if t is None else t for t in tensors]
                places = [
                    *self._words(scratch, *TILES, "counters"), floats[layout.parts // 4 :],
                    scratch[layout.act :].view(torch.float8_e4m3fn), floats[layout.act_scale // 4 :],
                ]  # fmt: skip
            gate_up(grid, stream, (*desc, *pointers, *places, *fixed))

        return run

    def _sm90_down(self, product: Kernel, down: Any) -> Launch:
        """The down product; `down` is its `DownConfig`."""
        from hpc.moe import hopper

        key, layout, chosen = self.key, self.layout, self.plan.down
        assert chosen is not None
        hidden, inter = key.hidden, key.inter
        grid = (chosen.per_sm * key.sms, 1, 1)
        fixed = (key.pairs, *self.scales[1], down)
        w2_shape, w2_strides = [key.num_experts, hidden, inter], [hidden * inter, inter, 1]
        a_shape, a_strides = [key.pairs, inter], [layout.act_stride, 1]
        down_places = [getattr(layout, name) for name in ("act_scale", *TILES)]
        # address of the scratch -> descriptor of the activations in it
        activations: dict[int, tuple[Any, ...]] = {}

        def run(
            stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor
        ) -> None:
            if product.compiled:
                base = scratch.data_ptr()
                w_desc = product.descriptor(0, args.w2.data_ptr(), args.w2, w2_shape, w2_strides)
                a_desc = activations.get(base)
                if a_desc is None:  # scratch comes back at few addresses; a view of it costs 5 us
                    act = scratch[layout.act :].view(torch.float8_e4m3fn)
                    a_desc = product.descriptor(1, base + layout.act, act, a_shape, a_strides)
                    if len(activations) >= MAX_KEPT:
                        activations.clear()
                    if not isinstance(a_desc[0], TmaTensor):  # that one would keep the scratch alive
                        activations[base] = a_desc
                assert args.w2_scale is not None
                scale, places = args.w2_scale.data_ptr(), [base + at for at in down_places]
                places.append(base + layout.y if key.combined else out.data_ptr())
            else:
                act = scratch[layout.act :].view(torch.float8_e4m3fn)
                box = [1, 256 if down.PAIR else 128, down.BK]
                w_desc = (hopper.TensorDescriptor(args.w2, w2_shape, w2_strides, box, down.W_BOX),)
                a_desc = (hopper.TensorDescriptor(act, a_shape, a_strides, [down.N, down.BK], down.TILE),)
                scale = args.w2_scale
                places = [
                    scratch.view(torch.float32)[layout.act_scale // 4 :], *self._words(scratch, *TILES),
                    self._results(scratch, out),
                ]  # fmt: skip
            product(grid, stream, (*w_desc, *a_desc, scale, *places, *fixed))

        return run

    def _configs(self, up_config: Any, down_config: Any) -> tuple[Any, Any]:
        key, up, down = self.key, self.plan.up, self.plan.down
        assert up is not None and down is not None
        common = {
            "H": key.hidden,
            "I": key.inter,
            "N": self.plan.tile,
            "BLOCK": key.block_scales,
            "PDL": self.pdl,
        }
        return (
            up_config(
                **common, KS=up.boxes, STAGES=up.stages, WARPS=up.warps, PWARPS=up.producer_warps,
                BF16_MUL=key.bf16_mul, ACT=self.gate[0], LIMIT=self.gate[1], ALPHA=self.gate[2],
                SPLIT=not up.shared_order, LAG=max(1, min(2, up.stages - 2)), FRESH=up.fresh, PAIR=up.pair,
            ),
            down_config(
                **common, BK=down.box, KS=down.boxes, STAGES=down.stages, WARPS=down.warps, SPREAD=down.shared_order,
                PAIR=down.pair,
            ),
        )  # fmt: skip

    def _options(self, product: plan.Product | None) -> dict[str, Any]:
        """Registers are given out evenly over all warps, those of the producer rounded up to four."""
        assert product is not None
        threads = 32 * (product.warps + 4) * product.per_sm
        registers = min(232, 65536 // threads // 8 * 8)
        # of a pair's two warpgroups the second is a partition of its own
        warps = 4 if product.pair else product.warps
        return {"num_warps": warps, "maxnreg": registers, "launch_pdl": self.pdl}

    def _tiny(self, shared: bool, stride_out: int) -> tuple[Launch, ...]:
        from hpc.moe import tiny

        key, chosen, layout = self.key, self.plan.tiny, self.layout
        assert chosen is not None
        gate_up = Kernel(tiny._moe_tiny_up_kernel, NAME, num_warps=chosen.up_warps, launch_pdl=self.pdl)
        down = Kernel(tiny._moe_tiny_down_kernel, NAME, num_warps=chosen.down_warps, launch_pdl=self.pdl)
        up_grid = (key.inter // chosen.up_rows, key.pairs, 1)
        down_grid = (key.hidden // chosen.down_cols, key.num_tokens, 1)
        (w13_rows, w13_cols), (w2_rows, w2_cols) = self.scales
        ids = (key.num_experts, self.first_expert)
        tail = (key.hardware_fp8, self.pdl, self.interpret)
        up_fixed = (
            *ids, plan.ceil_div(key.hidden, 128), w13_rows, w13_cols, key.hidden, key.inter, key.top_k,
            chosen.up_rows, chosen.up_cols, key.block_scales, key.bf16_mul, *self.gate, *tail,
        )  # fmt: skip
        down_fixed = (
            key.hidden, key.inter, max(128, plan.power_of_two(key.inter)), key.top_k, chosen.down_cols,
            key.block_scales, shared, *tail,
        )  # fmt: skip

        def run_up(
            stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor
        ) -> None:
            tensors = (args.x, args.x_scale, args.w13, args.w13_scale, args.act_scale, args.topk_ids)
            if gate_up.compiled:
                base = scratch.data_ptr()
                pointers = [base if t is None else t.data_ptr() for t in tensors]
                pointers.append(base + layout.act)
            else:
                act = self._activations(scratch)
                pointers = [act if t is None else _as_bytes(t) for t in (*tensors, act)]
            gate_up(up_grid, stream, (*pointers, *up_fixed))

        def run_down(
            stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor
        ) -> None:
            tensors = (args.w2, args.w2_scale, args.topk_ids, args.topk_scale, args.shared_output, out)
            if down.compiled:
                base = scratch.data_ptr() + layout.act
                pointers = [base, *(base if t is None else t.data_ptr() for t in tensors)]
            else:
                act = self._activations(scratch)
                pointers = [act, *(out if t is None else _as_bytes(t) for t in tensors)]
            down(down_grid, stream, (*pointers, *ids, w2_rows, w2_cols, stride_out, factor, *down_fixed))

        return run_up, run_down

    def _results(self, scratch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """y [pairs, H]: in the scratch, or the result itself."""
        return scratch.view(torch.bfloat16)[self.layout.y // 2 :] if self.key.combined else out

    def _activations(self, scratch: torch.Tensor) -> torch.Tensor:
        """What lies between the tiny kernels: e4m3 bits, or fp32 values with block scales."""
        act = scratch[self.layout.act :]
        return act.view(torch.float32) if self.key.block_scales else act

    def _weighted_sum(self, shared: bool, stride_out: int) -> Launch:
        from hpc.moe import route

        key, layout = self.key, self.layout
        block = reduce_block(key.hidden, key.num_tokens, key.sms)
        kernel = Kernel(route._moe_reduce_kernel, NAME, num_warps=max(1, block // 256), launch_pdl=self.pdl)
        grid = (key.num_tokens, plan.ceil_div(key.hidden, block), 1)
        unroll = min(8, plan.power_of_two(key.top_k))
        fixed = (key.top_k, block, False, shared, unroll, self.pdl, self.interpret)

        def run(
            stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor
        ) -> None:
            if kernel.compiled:
                base = scratch.data_ptr()
                pointers: tuple[Any, ...] = (
                    base + layout.y, base + layout.row, args.topk_scale.data_ptr() if key.weighted else None,
                    base if args.shared_output is None else args.shared_output.data_ptr(), out.data_ptr(),
                )  # fmt: skip
            else:
                y = self._results(scratch, out)
                other = y if args.shared_output is None else args.shared_output
                weights = args.topk_scale if key.weighted else None
                pointers = (y, *self._words(scratch, "row"), weights, other, out)
            kernel(grid, stream, (*pointers, key.pairs, key.hidden, stride_out, factor, *fixed))

        return run

    def _no_sum(self) -> Launch:
        """The down product has written the result; pairs of other ranks get zeros."""
        from hpc.moe import route

        key, layout = self.key, self.layout
        block = min(1024, plan.power_of_two(key.hidden))
        kernel = Kernel(route._moe_clear_kernel, NAME, num_warps=max(1, block // 256), launch_pdl=self.pdl)
        grid = (key.pairs, plan.ceil_div(key.hidden, block), 1)
        fixed = (key.hidden, block, self.pdl)

        def run(
            stream: int, args: Arguments, scratch: torch.Tensor, factor: float, out: torch.Tensor
        ) -> None:
            if kernel.compiled:
                pointers: tuple[Any, ...] = (scratch.data_ptr() + layout.row, out.data_ptr())
            else:
                pointers = (*self._words(scratch, "row"), out)
            kernel(grid, stream, (*pointers, *fixed))

        return run
