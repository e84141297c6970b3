"""From checked arguments to one launch: what a kernel is compiled for, its grid, its arguments in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from hpc.common import arch
from hpc.common.launch import Kernel, raw_stream
from hpc.rope import plan
from hpc.rope.plan import power_of_two
from hpc.rope.validate import Arguments

BF16_QUERY, BY_TOKEN, BY_REQUEST, FIXED = range(4)  # Q_SCALE of the kernel


@dataclass(frozen=True)
class Facts:
    """Everything that the prologue kernel is compiled for, but for the numbers that change between calls."""

    index: int  # of the device
    sm90: bool
    soft: bool  # conversions to e4m3 in integers
    aligned: bool  # all wide tensors on 16 bytes
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    rotary_dim: int
    page_size: int
    bf16_table: bool
    policy: int
    neox: bool
    q_scale: int
    k_in_memory: bool
    v_in_memory: bool
    out_k: bool
    out_v: bool
    early: bool
    plan: plan.Plan
    strides: tuple[int, ...]  # qkv, cos_sin, key cache 3, value cache 3, out_q 2, out_k 2, out_v 2

    def constants(self, interpret: bool) -> tuple[Any, ...]:
        """Compile-time arguments in the kernel's order."""
        if self.plan.tokens:
            return (
                self.q_heads, self.kv_heads, self.head_dim, self.page_size, self.plan.heads, self.plan.tokens,
                self.plan.steps, self.policy, self.q_scale != BF16_QUERY, self.q_scale, self.k_in_memory,
                self.v_in_memory, self.out_k, self.out_v, self.early, self.sm90,
            )  # fmt: skip
        half, rest = self.rotary_dim // 2, self.head_dim - self.rotary_dim
        tile_q, tile_k = plan.tiles(self.plan, self.q_heads, self.kv_heads)
        return (
            self.q_heads, self.kv_heads, self.head_dim, self.v_dim, half, self.page_size,
            power_of_two(half), power_of_two(rest) if rest else 0, power_of_two(self.head_dim),
            power_of_two(self.v_dim),
            self.plan.unroll, *tile_q, *tile_k, min(power_of_two(self.page_size), self.plan.heads),
            self.policy, self.neox, self.q_scale != BF16_QUERY, self.q_scale, self.k_in_memory, self.v_in_memory,
            self.out_k, self.out_v, self.early, self.sm90, self.soft, interpret,
        )  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Numbers of a call that the kernel takes as they come."""

    num_tokens: int
    num_requests: int
    max_pos: int
    max_pages: int
    num_pages: int
    columns: int
    stride_table: int

    def grid(self, facts: Facts) -> tuple[int, int, int, int]:
        """Programs for keys, values, queries, clearing."""
        clearers = self.num_requests * facts.kv_heads
        if facts.plan.tokens:
            rows = facts.plan.steps * (512 // facts.head_dim)
            queries = -(-self.num_tokens // facts.plan.tokens) * (facts.q_heads // facts.plan.heads)
            return -(-self.num_tokens * facts.kv_heads // rows), 0, queries, clearers
        tile_q, tile_k = plan.tiles(facts.plan, facts.q_heads, facts.kv_heads)
        keys = plan.programs(self.num_tokens, facts.kv_heads, *tile_k)
        queries = plan.programs(self.num_tokens, facts.q_heads, tile_q[0], tile_q[1] * facts.plan.unroll)
        return keys, keys, queries, clearers

    def arguments(self, parts: tuple[int, int, int, int]) -> tuple[float, ...]:
        """In the kernel's order, `num_tokens` to `num_q`."""
        ratio = self.num_requests / max(1, self.num_tokens)
        return (self.num_tokens, self.num_requests, ratio, self.max_pos, self.max_pages, self.num_pages,
                self.columns, *parts[:3])  # fmt: skip


def facts_of(x: Arguments, q_heads: int, chosen: plan.Plan, out_q: torch.Tensor) -> Facts:
    """Facts of checked arguments."""
    device, rows = x.qkv.device, x.qkv.shape[0]
    if not x.fp8:
        q_scale = BF16_QUERY
    elif x.quant_policy == 2:
        q_scale = FIXED
    else:
        q_scale = BY_REQUEST if x.is_prefill else BY_TOKEN
    capability = arch.capability(device)
    keys, values = (x.qkv if t is None else t for t in (x.out_k, x.out_v))
    return Facts(
        index=device.index if device.index is not None else 0, sm90=capability[0] >= 9, soft=capability < (8, 9),
        aligned=aligned(wide(x, out_q)), q_heads=q_heads, kv_heads=x.key_cache.shape[2],
        head_dim=x.key_cache.shape[3], v_dim=x.value_cache.shape[3], rotary_dim=x.cos_sin.shape[1],
        page_size=x.key_cache.shape[1], bf16_table=x.cos_sin.dtype == torch.bfloat16, policy=x.qk_norm_policy,
        neox=bool(x.is_neox_style), q_scale=q_scale, k_in_memory=in_memory(x.k_scale, device),
        v_in_memory=in_memory(x.v_scale, device), out_k=x.out_k is not None, out_v=x.out_v is not None,
        early=not x.is_prefill and rows <= plan.MAX_EARLY_TOKENS * x.seq_lens.shape[0], plan=chosen,
        strides=(
            x.qkv.stride(0), x.cos_sin.stride(0), *x.key_cache.stride()[:3], *x.value_cache.stride()[:3],
            *out_q.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        ),
    )  # fmt: skip


def key_of(x: Arguments, q_heads: int, sm90: bool, out_q: torch.Tensor) -> plan.Key:
    """What the plan of checked arguments depends on."""
    head_dim, v_dim, rotary_dim = x.key_cache.shape[3], x.value_cache.shape[3], x.cos_sin.shape[1]
    warp = sm90 and plan.fits_warp(q_heads, head_dim, v_dim, rotary_dim, bool(x.is_neox_style), float(x.eps))
    on_16_bytes = x.qkv.stride(0) % 8 == 0 and aligned(wide(x, out_q))
    return plan.Key(x.qkv.shape[0], q_heads, x.key_cache.shape[2], head_dim, v_dim, warp and on_16_bytes)


def in_memory(scale: Any, device: torch.device) -> bool:
    """Whether the kernel reads this scale from the device."""
    return isinstance(scale, torch.Tensor) and scale.device.type == device.type


def wide(x: Arguments, out_q: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The tensors that are read and written in vectors."""
    return (
        x.qkv,
        x.cos_sin,
        x.q_norm_weight,
        x.k_norm_weight,
        x.key_cache,
        x.value_cache,
        out_q,
        x.out_k,
        x.out_v,
    )


def aligned(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether every address is a multiple of 16."""
    together = 0
    for tensor in tensors:
        if tensor is not None:
            together |= tensor.data_ptr()
    return together % 16 == 0


@lru_cache(maxsize=1024)
def kernel_of(facts: Facts) -> Kernel:
    """The kernel of these facts; compiled at its first call."""
    from hpc.rope import kernels

    fn = kernels._rope_prologue_kernel if facts.aligned else kernels._rope_prologue_unaligned_kernel
    more: dict[str, Any] = {}
    if facts.plan.tokens:
        from hpc.rope import hopper

        fn, more = hopper._rope_warp_kernel, {"maxnreg": facts.plan.registers}
    name = "rope_norm_store_kv_fp8" if facts.q_scale != BF16_QUERY else "rope_norm_store_kv"
    return Kernel(
        fn, name, num_warps=facts.plan.num_warps, launch_pdl=facts.sm90, enable_fp_fusion=False, **more
    )


class Call:
    """One signature of `rope_norm_store_kv(_fp8)` on one device. Holds no tensor."""

    def __init__(self, facts: Facts, sizes: Sizes) -> None:
        self.facts = facts
        self.kernel = kernel_of(facts)
        parts = sizes.grid(facts)
        self.grid = (sum(parts), 1, 1)
        self.sizes = sizes.arguments(parts)
        self.after = (sizes.stride_table, *facts.strides, *facts.constants(False))

    def run(self, tensors: tuple[torch.Tensor, ...], numbers: tuple[float, float, float, float]) -> None:
        """Launch on the current stream of the device. `numbers`: eps, upper, key scale, value scale."""
        if self.grid[0] == 0:
            return
        if torch.cuda.current_device() == self.facts.index:
            self.launch(raw_stream(self.facts.index), tensors, numbers)
        else:
            with torch.cuda.device(self.facts.index):
                self.launch(raw_stream(self.facts.index), tensors, numbers)

    def launch(self, stream: int, tensors: tuple[torch.Tensor, ...], numbers: tuple[float, ...]) -> None:
        """Launch on a stream of the current device."""
        if self.kernel.compiled:  # raw addresses spare the launcher a driver query a pointer
            pointers: list[Any] = [t.data_ptr() for t in tensors]
        else:
            pointers = [as_bytes(t) for t in tensors]
        self.kernel(self.grid, stream, (*pointers, *self.sizes, *numbers, *self.after))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """e4m3 as its codes: the kernels convert themselves, also where Triton has no such type."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@lru_cache(maxsize=1024)
def query_kernel_of(
    index: int, sm90: bool, is_aligned: bool, constants: tuple[Any, ...], warps: int
) -> Kernel:
    """The kernel of `quantize_query_fp8`; `constants` are its strides and compile-time arguments."""
    from hpc.rope import kernels_query

    fn = (
        kernels_query._quantize_query_kernel if is_aligned else kernels_query._quantize_query_unaligned_kernel
    )
    return Kernel(fn, "quantize_query_fp8", num_warps=warps, launch_pdl=sm90, enable_fp_fusion=False)
