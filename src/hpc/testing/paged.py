"""Paged KV caches as engines leave them: shuffled pages, dead rows full of NaN, garbage page ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpc.testing.buffers import bit_view

LAYOUTS = ("NHD", "HND", "joint")

# Largest number of elements drawn at a time: bounds the temporary of a cast to float8.
_CHUNK_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class PagedCache:
    """A paged KV cache and its page table.

    Attributes:
        kcache: ``[num_pages, page_size, num_kv_heads, head_dim]`` view with the strides of its layout.
        vcache: ``[num_pages, page_size, num_kv_heads, v_head_dim]`` view.
        block_ids: int32 ``[num_requests, max_pages]`` page table; entries past a request's last page
            are garbage (-1, 2**31 - 1, num_pages in turn) unless built with ``garbage_tail=False``.
        seq_lens: int32 ``[num_requests]``, tokens of each request in the cache.
        kscale: per-token key scales as stored, float8 view ``[num_pages, page_size/32, num_kv_heads, 128]``,
            only with ``token_scales=True``.
        lens: the same lengths on the host.
        layout: "NHD", "HND" or "joint".
    """

    kcache: torch.Tensor
    vcache: torch.Tensor
    block_ids: torch.Tensor
    seq_lens: torch.Tensor
    lens: tuple[int, ...]
    layout: str
    kscale: torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.kcache.shape[1]

    @property
    def kscale_float(self) -> torch.Tensor | None:
        """The scales as float32: token t of a page stands at ``[page, t // 32, head, t % 32]``."""
        return None if self.kscale is None else self.kscale.view(torch.float32)


def make_paged_cache(
    lens: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    layout: str = "NHD",
    device: torch.device | str = "cpu",
    seed: int = 0,
    dead: str = "nan",
    garbage_tail: bool = True,
    *,
    v_head_dim: int | None = None,
    max_pages: int | None = None,
    spare_pages: int = 3,
    token_scales: bool = False,
) -> PagedCache:
    """Build a paged cache of standard normal keys and values for requests of ``lens`` tokens.

    Args:
        lens: tokens of each request, 0 allowed.
        num_kv_heads, head_dim, page_size: shape of a page; ``v_head_dim`` defaults to ``head_dim``.
        dtype: of both caches; float8 is cast from bfloat16 normals.
        layout: "NHD" one contiguous tensor each; "HND" heads outside tokens, given as a permuted view;
            "joint" keys and values of a page side by side in one tensor ``[num_pages, 2, ...]``.
        device, seed: drawn on the device by its own generator: gigabytes take milliseconds on a GPU.
        dead: what rows hold that no request owns ("nan" or "zero"), in partly used and in spare pages.
        garbage_tail: poison the page table past each request's last page (at least one entry a row);
            otherwise those entries are 0.
        max_pages: width of the page table; default: the longest request's pages, plus one when poisoned.
        spare_pages: pages that no request owns.
        token_scales: float8 caches of head_dim 128 in "NHD" only: keys get ``page_size / 32`` more rows a
            page that hold one float32 scale per token and head, as the engines' quantised caches do.

    Raises ``ValueError`` for a layout or a combination that does not exist.
    """
    v_dim = head_dim if v_head_dim is None else v_head_dim
    _check(layout, dead, v_dim == head_dim, token_scales, head_dim, page_size, dtype)
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    used = [-(-length // page_size) for length in lens]
    num_pages = max(1, sum(used) + spare_pages)
    width = max(used, default=0) + int(garbage_tail) if max_pages is None else max_pages
    if width < max(used, default=0):
        raise ValueError(f"max_pages must be at least {max(used)}, got {max_pages}")

    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    table = _page_table(used, max(1, width), order, num_pages, garbage_tail)
    key_rows = page_size + (page_size // 32 if token_scales else 0)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    keys, values = _allocate(empty, layout, num_pages, page_size, key_rows, num_kv_heads, head_dim, v_dim)
    kcache = keys[:, :page_size]
    for part in (kcache, values):
        _fill_normal(part, generator)
    kscale = None
    if token_scales:
        kscale = keys[:, page_size:]
        scales = kscale.view(torch.float32)
        scales.copy_(torch.rand(scales.shape, generator=generator, device=device) * 0.9 + 0.1)
    pages, rows = _dead_rows(lens, used, page_size, order, num_pages)
    for part in (kcache, values):
        _bury(part, pages.to(device), rows.to(device), dead)
    if kscale is not None and dead == "nan":
        by_token = kscale.view(torch.float32)
        by_token[pages.to(device), (rows // 32).to(device), :, (rows % 32).to(device)] = float("nan")
    return PagedCache(
        kcache,
        values,
        table.to(device),
        torch.tensor(list(lens), dtype=torch.int32, device=device),
        tuple(lens),
        layout,
        kscale,
    )


def quantize_per_token_head(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``[rows, heads, dim]`` to float8_e4m3fn with one scale per row and head.

    Returns ``(x8, scale)``: float8 of the same shape and float32 ``[rows, heads]``, with
    ``x ~= x8 * scale`` and ``scale = max(1e-6, max|x| over dim) / 448``.
    """
    scale = x.abs().amax(dim=-1).float().clamp_min(1e-6) / 448.0
    scaled = (x.float() / scale.unsqueeze(-1)).clamp(-448.0, 448.0)
    return scaled.to(torch.float8_e4m3fn), scale.contiguous()


def _check(
    layout: str,
    dead: str,
    same_dim: bool,
    token_scales: bool,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if dead not in ("nan", "zero"):
        raise ValueError(f"dead must be 'nan' or 'zero', got {dead!r}")
    if layout == "joint" and not same_dim:
        raise ValueError("a joint cache needs v_head_dim == head_dim")
    if not token_scales:
        return
    if layout != "NHD" or head_dim != 128 or page_size % 32 or dtype != torch.float8_e4m3fn:
        raise ValueError(
            "token_scales needs layout 'NHD', head_dim 128, a page size divisible by 32 and float8_e4m3fn; "
            f"got {layout}, {head_dim}, {page_size}, {dtype}"
        )


def _page_table(
    used: Sequence[int], width: int, order: torch.Tensor, num_pages: int, garbage: bool
) -> torch.Tensor:
    """Pages handed out in shuffled order; dead entries cycle through three kinds of garbage."""
    table = torch.zeros(len(used), width, dtype=torch.int32)
    if garbage:
        kinds = torch.tensor([-1, 2**31 - 1, num_pages], dtype=torch.int32)
        table = kinds[torch.arange(len(used) * width) % 3].view(len(used), width)
    start = 0
    for request, count in enumerate(used):
        table[request, :count] = order[start : start + count].to(torch.int32)
        start += count
    return table


def _allocate(
    empty: Callable[..., torch.Tensor],
    layout: str,
    num_pages: int,
    page_size: int,
    key_rows: int,
    num_heads: int,
    head_dim: int,
    v_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (``key_rows`` a page: its tokens and their scales) and values, tokens in dimension 1."""
    if layout == "joint":
        both = empty(num_pages, 2, page_size, num_heads, head_dim)
        return both[:, 0], both[:, 1]
    if layout == "HND":
        keys, values = (empty(num_pages, num_heads, page_size, dim) for dim in (head_dim, v_dim))
        return keys.permute(0, 2, 1, 3), values.permute(0, 2, 1, 3)
    keys = empty(num_pages, key_rows, num_heads, head_dim)
    return keys, empty(num_pages, page_size, num_heads, v_dim)


def _fill_normal(cache: torch.Tensor, generator: torch.Generator) -> None:
    draw_dtype = torch.bfloat16 if cache.element_size() == 1 else cache.dtype
    per_page = max(1, cache[0].numel())
    step = max(1, _CHUNK_ELEMENTS // per_page)
    for first in range(0, cache.shape[0], step):
        part = cache[first : first + step]
        part.copy_(torch.randn(part.shape, generator=generator, dtype=draw_dtype, device=cache.device))


def _dead_rows(
    lens: Sequence[int], used: Sequence[int], page_size: int, order: torch.Tensor, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, row) pairs that no request owns: tails of last pages, and whole spare pages."""
    live = torch.zeros(num_pages, dtype=torch.int64)
    start = 0
    for length, count in zip(lens, used, strict=True):
        if count:
            live[order[start : start + count]] = page_size
            live[order[start + count - 1]] = length - (count - 1) * page_size
        start += count
    partial = torch.nonzero(live < page_size).squeeze(1)
    pages = partial.repeat_interleave(page_size)
    rows = torch.arange(page_size).repeat(partial.numel())
    keep = rows >= live[pages]
    return pages[keep], rows[keep]


def _bury(cache: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, dead: str) -> None:
    bits, nan_bits = bit_view(cache)
    bits[pages, rows] = nan_bits if dead == "nan" else 0
