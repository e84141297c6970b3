"""How SGLang calls this package, and how it lays out what it passes. Facts read from SGLang 0.5.17 and 0.5.23.

`CALL_SITES` lists every call that the two versions make: positional arguments and keywords. Tests go through `call`,
which refuses to make any other, so that a test cannot drift from what SGLang does.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hpc

VERSIONS = ("0.5.17", "0.5.23")
PAGE = 64
HEAD_DIM = 128
FP8 = torch.float8_e4m3fn
BF16_TOLERANCE_RMS = 4e-3
"""bf16 rounding of the result is 1.7e-3; probabilities in bf16 add less than as much again."""


@dataclass(frozen=True)
class CallSite:
    """One call expression in SGLang: number of positional arguments, keywords in order, files by version."""

    function: str
    positional: int
    keywords: tuple[str, ...]
    files: tuple[str, str]
    splat: bool = False
    """Ends in **kwargs, which is empty or `task_map`."""


_BACKEND = ("srt/layers/attention/hpc_ops_backend.py",) * 2
_MOE = ("srt/layers/moe/moe_runner/hpc_ops.py",) * 2
_ROUTER = ("kernels/ops/attention/dsv4/gemm.py", "kernels/ops/gemm/bf16_fp32.py")

CALL_SITES = (
    CallSite("get_attention_decode_task_workspace", 3, ("min_process_len",), _BACKEND),
    CallSite("assign_attention_decode_task", 3, ("mtp", "new_kv_included", "min_process_len"), _BACKEND),
    CallSite(
        "rope_norm_store_kv_fp8",
        0,
        (
            "key_cache", "value_cache", "qkv", "cos_sin", "num_seqlen_per_req", "q_index", "kvcache_indices",
            "is_prefill", "k_scale", "v_scale", "quant_policy", "max_seqlens", "q_norm_weight", "k_norm_weight",
            "out_q", "qk_norm_policy",
        ),
        _BACKEND,
    ),
    CallSite("attention_with_kvcache_prefill_fp8", 10, (), _BACKEND),
    CallSite("attention_with_kvcache_prefill_bf16", 7, (), _BACKEND),
    CallSite(
        "attention_decode_fp8", 8, ("mtp", "new_kv_included", "splitk", "task_map", "split_flag"), _BACKEND
    ),
    CallSite("attention_decode_bf16", 5, ("mtp", "new_kv_included", "splitk"), _BACKEND, splat=True),
    CallSite("fuse_moe_blockwise", 10, (), _MOE),
    CallSite("fuse_moe", 10, (), _MOE),
    CallSite("get_gemm_bf16xfp32_workspace", 1, (), _ROUTER),
    CallSite("gemm_bf16xfp32", 4, ("use_fp32_output", "use_splitk", "split_flag"), _ROUTER),
)  # fmt: skip
SITES = {site.function: site for site in CALL_SITES}


def need(*names: str) -> None:
    """Skip the test while this package does not export all of `names`."""
    missing = [name for name in names if name not in hpc.__all__]
    if missing:
        pytest.skip(f"hpc does not export {', '.join(missing)} yet")


def call(function: str, *args: Any, **kwargs: Any) -> Any:
    """Call `hpc.<function>` exactly as SGLang does; any other combination of arguments is a mistake of the test."""
    need(function)
    site = SITES[function]
    keywords = tuple(kwargs)
    allowed = (site.keywords, (*site.keywords, "task_map")) if site.splat else (site.keywords,)
    assert len(args) == site.positional and keywords in allowed, f"SGLang does not call {function} like that"
    return getattr(hpc, function)(*args, **kwargs)


def binds(site: CallSite) -> None:
    """The function takes the arguments of the call, by `inspect` as SGLang looks at it."""
    signature = inspect.signature(getattr(hpc, site.function))
    more = {"task_map": None} if site.splat else {}
    signature.bind(*[None] * site.positional, **dict.fromkeys(site.keywords), **more)


# --- the KV pool and its tables -----------------------------------------------------------------------


def nan_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN bits in place; float8 has no fill_ everywhere."""
    if tensor.dtype == FP8:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(float("nan"))
    return tensor


class Pool:
    """SGLang's token-major KV pool and request table for some requests.

    One buffer `[size + page, heads, dim]` a layer and side, page 0 for padded requests; float8 is kept as bytes and
    viewed. `req_to_token` gives the slot of each token of a request; slots of a page follow each other. Slots that hold
    no token are NaN.
    """

    def __init__(
        self,
        lens: Sequence[int],
        num_kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        context_len: int = 512,
        head_dim: int = HEAD_DIM,
        page: int = PAGE,
        seed: int = 0,
    ) -> None:
        self.lens, self.context_len, self.page, self.device = list(lens), context_len, page, device
        self.generator = torch.Generator().manual_seed(seed)
        pages = [-(-length // page) for length in lens]
        size = (sum(pages) + 2) * page
        raw = torch.uint8 if dtype == FP8 else dtype
        shape = (size + page, num_kv_heads, head_dim)
        self.k_buffer = torch.empty(shape, dtype=raw, device=device)
        self.v_buffer = torch.empty(shape, dtype=raw, device=device)
        if dtype == FP8:
            self.k_buffer, self.v_buffer = self.k_buffer.view(FP8), self.v_buffer.view(FP8)
        nan_(self.k_buffer)
        nan_(self.v_buffer)
        order = (torch.randperm(sum(pages) + 1, generator=self.generator) + 1).tolist()
        # Rows of the request table are handed out in any order; row 0 belongs to padded requests.
        self.req_to_token = torch.zeros((len(self.lens) + 3, context_len), dtype=torch.int32)
        self.req_pool_indices = (
            torch.randperm(len(self.lens) + 2, generator=self.generator)[: len(self.lens)] + 1
        )
        for request, (length, count) in enumerate(zip(self.lens, pages, strict=True)):
            taken = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
            slots = (taken[:, None] * page + torch.arange(page, dtype=torch.int32)).flatten()
            self.req_to_token[self.req_pool_indices[request], :length] = slots[:length]

    @property
    def max_pages(self) -> int:
        return -(-self.context_len // self.page)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both buffers as the backend passes them: `[pages, 64, heads, dim]`."""
        return tuple(b.view(-1, self.page, b.shape[1], b.shape[2]) for b in (self.k_buffer, self.v_buffer))  # type: ignore[return-value]

    def slots(self, request: int, first: int = 0) -> torch.Tensor:
        """Slots of the tokens of a request from `first` on."""
        row = self.req_to_token[self.req_pool_indices[request]]
        return row[first : self.lens[request]].long()

    def fill(self, fresh: Sequence[int] | None = None, std: float = 1.0) -> None:
        """Random keys and values for all tokens but the last `fresh[b]` of request b."""
        for request, length in enumerate(self.lens):
            slots = self.slots(request)[: length - (fresh[request] if fresh else 0)].to(self.device)
            for buffer in (self.k_buffer, self.v_buffer):
                values = torch.randn((len(slots), *buffer.shape[1:]), generator=self.generator) * std
                put(buffer, slots, values.to(self.device))

    def page_table(self, garbage: int = 0x5A5A5A5A) -> torch.Tensor:
        """The eager table: `torch.empty`, of which only live entries are written."""
        table = torch.full((len(self.lens), self.max_pages), garbage, dtype=torch.int32, device=self.device)
        write_table(table, self)
        return table

    def cache_seqlens(self) -> torch.Tensor:
        return torch.tensor(self.lens, dtype=torch.int32, device=self.device)


def put(buffer: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """buffer[slots] = values, rounded to the buffer's dtype."""
    if buffer.dtype == FP8:
        buffer.view(torch.uint8)[slots] = to_fp8(values).view(torch.uint8)
    else:
        buffer[slots] = values.to(buffer.dtype)


def write_table(table: torch.Tensor, pool: Pool) -> None:
    """Write the live entries of each request into the first rows of `table`."""
    for request, length in enumerate(pool.lens):
        count = -(-length // pool.page)
        starts = pool.req_to_token[pool.req_pool_indices[request], ::1][: count * pool.page : pool.page]
        table[request, :count] = (starts // pool.page).to(table.device)


class GraphBuffers:
    """The static buffers of CUDA-graph decoding: made once for the largest batch, sliced for each captured one.

    A padded request has length 1 and the request table's row 0, which says page 0.
    """

    def __init__(self, max_bs: int, pool: Pool) -> None:
        self.cache_seqlens = torch.zeros(max_bs, dtype=torch.int32, device=pool.device)
        self.page_table = torch.zeros(max_bs, pool.max_pages, dtype=torch.int32, device=pool.device)

    def load(self, pool: Pool, bs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cache_seqlens, page_table) of a captured batch of `bs`, rewritten in place as before a replay."""
        self.cache_seqlens[:bs] = 1
        self.cache_seqlens[: len(pool.lens)] = pool.cache_seqlens()
        self.page_table[len(pool.lens) : bs, 0] = 0
        write_table(self.page_table, pool)
        return self.cache_seqlens[:bs], self.page_table[:bs, :]


# --- plain PyTorch ------------------------------------------------------------------------------------


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 value, saturated."""
    return values.float().clamp(-448.0, 448.0).to(FP8)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last len(q) tokens over k, v `[tokens, kv heads, dim]`; float64 like q."""
    q, k, v = (t.float().double() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    position = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    key = torch.arange(len(k), device=q.device)[None]
    seen = key <= position
    if window is not None:
        seen &= key > position - window
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def attend_pool(
    pool: Pool,
    q: torch.Tensor,
    q_lens: Sequence[int],
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    **options: Any,
) -> torch.Tensor:
    """Reference output `[tokens, heads, dim]` for the last q_lens[b] tokens of each request of the pool."""
    out, at = [], 0
    for request, count in enumerate(q_lens):
        slots = pool.slots(request).to(pool.device)
        k, v = (
            b.view(torch.uint8)[slots].view(FP8) if b.dtype == FP8 else b[slots]
            for b in (pool.k_buffer, pool.v_buffer)
        )
        out.append(attention(q[at : at + count], k.float() * k_scale, v.float() * v_scale, **options))
        at += count
    return torch.cat(out)


def rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS error; inf if anything is not finite."""
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(error) if bool(torch.isfinite(actual.float()).all()) else float("inf")
