"""From a checked signature to launches: one `Call` for each signature seen, holding all that does not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpc.common.launch import Kernel, current_device, raw_stream
from hpc.gemm.router import weight
from hpc.gemm.router.plan import BLOCK_K, STEP, Key, Plan, ceil, power_of_two, residents, topk_rows

NAME = "gemm_bf16xfp32"


@dataclass(frozen=True)
class TopK:
    """Compile-time facts of the expert choice."""

    top_k: int
    sigmoid: bool
    bias: bool
    num_groups: int
    top_groups: int
    renormalize: bool
    num_zero_experts: int


@dataclass(frozen=True)
class Layout:
    """Row strides in elements; `third` is that of `low` where there are two parts."""

    x: int
    high: int
    low: int
    third: int
    out: int


# (stream, x, (high, low, third), result of the product, scale)
Product = Callable[[int, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor, float], None]


class Call:
    """The launches of one call signature on one device: the product, then a sum of partials or the expert choice.

    Holds no memory of the GPU: the scratch of a call comes from the caching allocator, on the current stream.
    """

    def __init__(
        self, key: Key, plan: Plan, index: int, layout: Layout, dtype: torch.dtype, topk: TopK | None = None
    ) -> None:
        self.key, self.plan, self.index, self.layout, self.dtype, self.topk = (
            key,
            plan,
            index,
            layout,
            dtype,
            topk,
        )
        self.partial = plan.splits > 1
        self.pdl = key.sm90
        self.splits_2 = power_of_two(plan.splits)
        self.out_bf16 = dtype == torch.bfloat16 and topk is None
        self._new_fp32: Any = None
        self._new_out: Any = None
        self._new_int: Any = None
        self._product: Product = getattr(self, f"_{plan.kernel}")()
        self._finish = self._choose_experts() if topk else self._sum() if self.partial else None

    def run(
        self, x: torch.Tensor, parts: tuple[torch.Tensor, ...], scale: float, out: torch.Tensor | None
    ) -> Any:
        """The product on the current stream; the output."""
        if self._new_out is None:
            self._new_out = x.new_empty(0, dtype=self.dtype).new_empty
            self._new_fp32 = x.new_empty(0, dtype=torch.float32).new_empty
        if out is None:
            out = self._new_out((self.key.m, self.key.n))
        result = self._new_fp32(self.plan.splits * self.key.m * self.key.n) if self.partial else out
        self._on_device(self._launch_sum, x, parts, scale, result, out)
        return out

    def run_topk(
        self,
        x: torch.Tensor,
        parts: tuple[torch.Tensor, ...],
        scale: float,
        bias: torch.Tensor | None,
        scaling: float,
    ) -> tuple[torch.Tensor, ...]:
        """(weights, ids) or, with zero experts, (weights, ids, zero weight)."""
        topk = self.topk
        assert topk is not None
        if self._new_fp32 is None:
            self._new_fp32 = x.new_empty(0, dtype=torch.float32).new_empty
            self._new_int = x.new_empty(0, dtype=torch.int32).new_empty
        m = self.key.m
        result = self._new_fp32(self.plan.splits * m * self.key.n)
        weights, ids = self._new_fp32((m, topk.top_k)), self._new_int((m, topk.top_k))
        outputs = (weights, ids, self._new_fp32(m)) if topk.num_zero_experts else (weights, ids)
        self._on_device(self._launch_topk, x, parts, scale, result, bias, scaling, outputs)
        return outputs

    def _on_device(self, launch: Callable[..., None], *args: Any) -> None:
        stream = raw_stream(self.index)
        if current_device() == self.index:
            launch(stream, *args)
        else:
            with torch.cuda.device(self.index):
                launch(stream, *args)

    def _launch_sum(self, stream: int, x: Any, parts: Any, scale: float, result: Any, out: Any) -> None:
        self._start(stream, x, parts, result, scale)
        if self._finish is not None:
            self._finish(stream, result, out)

    def _launch_topk(self, stream: int, x: Any, parts: Any, scale: float, result: Any, *rest: Any) -> None:
        self._start(stream, x, parts, result, scale)
        self._finish(stream, result, *rest)  # type: ignore[misc]

    def _start(self, stream: int, x: Any, parts: Any, result: Any, scale: float) -> None:
        """The product; weights not yet known to be at rest are read behind an ordinary kernel."""
        if self.pdl:
            fresh = [part for part in parts if not weight.settled(part)]
            if fresh:
                torch.zeros(1, device=x.device)
                for part in fresh:
                    weight.settle(part)
        self._product(stream, x, parts if len(parts) == 3 else (*parts, parts[1]), result, scale)

    # --- the kernels ----------------------------------------------------------------------------------

    def _row(self) -> Product:
        from hpc.gemm.router import kernels

        key, plan = self.key, self.plan
        kernel = Kernel(kernels._router_row_kernel, NAME, num_warps=plan.warps, launch_pdl=self.pdl)
        grid = (ceil(key.n, plan.block_n), 1, 1)
        before = (key.m, key.n, key.k, *self._strides())
        after = (
            plan.block_m,
            plan.block_n,
            power_of_two(key.k),
            key.terms,
            self.pdl,
            self.out_bf16,
            self.pdl,
            False,
        )
        return _by_pointer(kernel, grid, before, after)

    def _small(self) -> Product:
        from hpc.gemm.router import hopper_small

        key, plan = self.key, self.plan
        config = hopper_small.SmallConfig(
            WARPS=plan.warps, CHUNKS=plan.chunks, MT=plan.block_m, TERMS=key.terms, PARTIAL=self.partial, EARLY=True,
            PDL=True,
        )  # fmt: skip
        kernel = Kernel(hopper_small._router_small_kernel, NAME, num_warps=plan.warps, launch_pdl=True)
        grid = (ceil(key.n, plan.block_n) * ceil(key.m, plan.block_m) * plan.splits, 1, 1)
        before = (key.m, key.n, key.k, plan.splits, *self._strides())
        return _by_pointer(kernel, grid, before, (config,))

    def _block(self) -> Product:
        from hpc.gemm.router import kernels

        key, plan = self.key, self.plan
        kernel = Kernel(
            kernels._router_block_kernel, NAME, num_warps=plan.warps, launch_pdl=self.pdl, num_stages=3
        )
        grid = (ceil(key.n, plan.block_n) * ceil(key.m, plan.block_m), 1, plan.splits)
        steps = ceil(ceil(key.k, BLOCK_K), plan.splits)
        before = (key.m, key.n, key.k, steps, *self._strides())
        after = (
            plan.block_m, plan.block_n, BLOCK_K, key.terms, self.partial, self.out_bf16 and not self.partial, self.pdl,
            False,
        )  # fmt: skip
        return _by_pointer(kernel, grid, before, after)

    def _tile(self) -> Product:
        from hpc.gemm.router import hopper

        key, plan, layout = self.key, self.plan, self.layout
        p0, p1 = plan.pieces
        config = hopper.TileConfig(
            BM=plan.block_m, P0=p0, P1=p1, STAGES=plan.stages, TERMS=key.terms, PARTIAL=self.partial, EARLY=True,
            PDL=True,
        )  # fmt: skip
        kernel = Kernel(
            hopper._router_tile_kernel,
            NAME,
            num_warps=config.WARPS,
            maxnreg=config.REGISTERS,
            launch_pdl=True,
        )
        units = ceil(key.n, plan.block_n) * ceil(key.m, plan.block_m) * plan.splits
        grid = (min(units, key.sms * residents(plan, key.terms)), 1, 1)
        out = (units, key.m, key.n, key.k, plan.splits, layout.out)
        x_shape, w_shape = [key.m, key.k], [key.n, key.k]
        w_strides = [[layout.high, 1], [layout.low, 1], [layout.third, 1]]
        x_strides = [layout.x, 1]

        def product(stream: int, x: Any, parts: Any, result: Any, scale: float) -> None:
            if kernel.compiled:
                descriptors = kernel.descriptor(0, x.data_ptr(), x, x_shape, x_strides)
                for i, part in enumerate(parts):
                    descriptors += kernel.descriptor(i + 1, part.data_ptr(), part, w_shape, w_strides[i])
                kernel(grid, stream, (*descriptors, result.data_ptr(), *out, scale, config))
                return
            x_desc = hopper.TensorDescriptor(x, x_shape, x_strides, [config.BM, STEP], config.SMEM)
            w_descs = [
                hopper.TensorDescriptor(part, w_shape, w_strides[i], [config.BOX, STEP], config.SMEM)
                for i, part in enumerate(parts)
            ]
            kernel(grid, stream, (x_desc, *w_descs, result, *out, scale, config))

        return product

    def _strides(self) -> tuple[int, ...]:
        layout = self.layout
        return layout.x, layout.high, layout.low, layout.third, layout.out

    def _sum(self) -> Callable[..., None]:
        from hpc.gemm.router import kernels

        key, count = self.key, self.key.m * self.key.n
        # Few elements: one each a thread over all multiprocessors; many: four.
        warps, block = (4, 128) if count <= key.sms * 1024 else (4, 512)
        kernel = Kernel(kernels._router_sum_kernel, NAME, num_warps=warps, launch_pdl=self.pdl)
        grid = (ceil(count, block), 1, 1)
        fixed = (
            key.m, key.n, self.plan.splits, self.layout.out, self.splits_2, block, self.out_bf16, self.pdl, False,
        )  # fmt: skip

        def add(stream: int, part: torch.Tensor, out: torch.Tensor) -> None:
            pointers: tuple[Any, ...] = (part, out)
            if kernel.compiled:
                pointers = (part.data_ptr(), out.data_ptr())
            kernel(grid, stream, (*pointers, *fixed))

        return add

    def _choose_experts(self) -> Callable[..., None]:
        from hpc.gemm.router import topk_kernel

        key, topk = self.key, self.topk
        assert topk is not None
        size = key.n // topk.num_groups
        padded = power_of_two(topk.num_groups) * power_of_two(size)
        rows = topk_rows(key.m, key.sms)
        kernel = Kernel(
            topk_kernel._router_topk_kernel,
            "router_topk",
            num_warps=max(1, padded // 1024),
            launch_pdl=self.pdl,
        )
        fixed = (
            self.splits_2, topk.top_k, power_of_two(topk.top_k), topk.num_groups, topk.top_groups,
            power_of_two(topk.num_groups), size, power_of_two(size), topk.sigmoid, topk.bias, topk.renormalize,
            topk.num_zero_experts, self.pdl,
        )  # fmt: skip
        numbers = (key.m, key.n, self.plan.splits, rows)

        def choose(
            stream: int,
            part: torch.Tensor,
            bias: torch.Tensor | None,
            scaling: float,
            outputs: tuple[torch.Tensor, ...],
        ) -> None:
            # pointers that the kernel does not read still need an address
            tensors = (
                part,
                part if bias is None else bias,
                *outputs,
                *((part,) if len(outputs) == 2 else ()),
            )
            pointers = tuple(t.data_ptr() for t in tensors) if kernel.compiled else tensors
            kernel((ceil(key.m, rows), 1, 1), stream, (*pointers, *numbers, scaling, *fixed))

        return choose


def _by_pointer(
    kernel: Kernel, grid: tuple[int, int, int], before: tuple[int, ...], after: tuple[Any, ...]
) -> Product:
    """A launch with the arguments (x, high, low, third, result, numbers, scale, compile-time facts)."""

    def product(stream: int, x: Any, parts: Any, result: Any, scale: float) -> None:
        pointers: tuple[Any, ...] = (x, *parts, result)
        if kernel.compiled:
            pointers = tuple(tensor.data_ptr() for tensor in pointers)
        kernel(grid, stream, (*pointers, *before, scale, *after))

    return product
