"""Paged decode attention as rivals need it: one neutral description, and caches in their page size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpc.common.operator import Tolerance
from hpc.testing.buffers import bit_view


@dataclass(frozen=True)
class DecodeInputs:
    """One call of paged decode attention.

    Attributes:
        q: ``[B * S, Hq, D]``, bfloat16 or float8_e4m3fn, request-major; S new tokens a request.
        kcache, vcache: ``[num_pages, page_size, Hkv, D]``, any strides.
        block_ids: int32 ``[B, max_pages]``; entries past a request's last page are garbage.
        lens: tokens of each request in the cache, the new ones included.
        num_new_tokens: S.
        softmax_scale: factor on q.k before the softmax.
        qscale: float32 ``[B * S, Hq]``, float8 only; kscale, vscale: float32 ``[1]``, float8 only.
        window: keys that a query sees, itself included; None for all.
        logit_cap: soft cap on scaled scores; None for none.
        sinks: float32 ``[Hq]`` or None.
        key_scales_per_token: True when keys are scaled per token (no rival here reads such a cache).
    """

    q: torch.Tensor
    kcache: torch.Tensor
    vcache: torch.Tensor
    block_ids: torch.Tensor
    lens: tuple[int, ...]
    num_new_tokens: int
    softmax_scale: float
    qscale: torch.Tensor | None = None
    kscale: torch.Tensor | None = None
    vscale: torch.Tensor | None = None
    window: int | None = None
    logit_cap: float | None = None
    sinks: torch.Tensor | None = None
    key_scales_per_token: bool = False

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def is_fp8(self) -> bool:
        return self.q.element_size() == 1

    def q_float(self) -> torch.Tensor:
        """Queries with their scales applied, float32."""
        q = self.q.float()
        return q if self.qscale is None else q * self.qscale.unsqueeze(-1)


def rival_tolerance(inputs: DecodeInputs) -> Tolerance:
    """What a rival may be off by: float8 ones round probabilities (0.025 rms) and queries to float8."""
    return Tolerance(rms=0.08, max=0.25) if inputs.is_fp8 else Tolerance(rms=0.005, max=0.03)


def repack(
    inputs: DecodeInputs, page_size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """The live tokens in contiguous pages of another size, shuffled, dead rows zero.

    Returns ``(kcache, vcache, block_table, pages_per_request)``; the table is int32 ``[B, most pages]``
    with 0 past a request's last page. Rivals get zeros where the original holds NaN: not all mask them.
    """
    device = inputs.kcache.device
    used = [max(1, -(-length // page_size)) for length in inputs.lens]
    order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.zeros(inputs.batch, max(used), dtype=torch.int32)
    start = 0
    for request, count in enumerate(used):
        table[request, :count] = order[start : start + count]
        start += count
    table = table.to(device)
    caches = [_repack_one(cache, inputs, table, used, page_size) for cache in (inputs.kcache, inputs.vcache)]
    return caches[0], caches[1], table, used


def _repack_one(
    cache: torch.Tensor, inputs: DecodeInputs, table: torch.Tensor, used: list[int], page_size: int
) -> torch.Tensor:
    source, _ = bit_view(cache)
    old_size, heads, dim = source.shape[1:]
    target = torch.zeros(sum(used), page_size, heads, dim, dtype=source.dtype, device=source.device)
    for request, length in enumerate(inputs.lens):
        if length == 0:
            continue
        old = inputs.block_ids[request, : -(-length // old_size)].long()
        tokens = source[old].reshape(-1, heads, dim)[:length]
        padded = torch.zeros(used[request] * page_size, heads, dim, dtype=source.dtype, device=source.device)
        padded[:length] = tokens
        target[table[request, : used[request]].long()] = padded.view(-1, page_size, heads, dim)
    return target.view(cache.dtype)
