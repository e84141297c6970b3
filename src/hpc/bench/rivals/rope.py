"""The attention prologue in unfused PyTorch, as an engine without a kernel for it runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpc.bench.providers import CannotRun, Provider


@dataclass(frozen=True)
class RopeInputs:
    """One call; position, page and row in it of each token are made once a step.

    Shapes: qkv ``[tokens, width]``, caches ``[pages, page_size, kv heads, dim]``, cos_sin ``[positions, rotated]``.
    """

    qkv: torch.Tensor
    kcache: torch.Tensor
    vcache: torch.Tensor
    cos_sin: torch.Tensor
    position: torch.Tensor
    page: torch.Tensor
    row: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    norm_policy: int
    eps: float
    neox: bool
    quant_policy: int  # 0: BF16
    special: bool  # padded rows or kept keys, which this path does not do


def provider(adapt: Callable[[Any], RopeInputs]) -> Provider:
    """The provider "torch" for inputs that ``adapt`` turns into :class:`RopeInputs`."""
    return Provider(
        "torch", lambda inputs: prepare(adapt(inputs)), note="unfused PyTorch; does not clear page tails"
    )


def prepare(x: RopeInputs) -> Callable[[], torch.Tensor]:
    """The call to time."""
    if x.special or x.norm_policy == 1 or not x.neox or x.quant_policy == 2:
        raise CannotRun("only norm before rotation, NeoX pairs, dynamic scales, no padding")
    (kv_heads, dim), v_dim = x.kcache.shape[2:], x.vcache.shape[3]
    widths = (x.qkv.shape[1] - kv_heads * (dim + v_dim), kv_heads * dim, kv_heads * v_dim)
    half = x.cos_sin.shape[1] // 2

    def rotated(part: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        heads = part.unflatten(1, (-1, dim)).float()
        if weight is not None:
            heads = torch.nn.functional.rms_norm(heads, (dim,), weight, x.eps)
        angles = x.cos_sin[x.position].float().unsqueeze(1)
        cos, sin = angles[..., :half], angles[..., half:]
        a, b, rest = heads.split((half, half, dim - 2 * half), -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def call() -> torch.Tensor:
        q, k, v = x.qkv.split(widths, 1)
        q, k = rotated(q, x.q_weight), rotated(k, x.k_weight)
        v = v.unflatten(1, (-1, v_dim))
        if x.quant_policy == 0:
            x.kcache[x.page, x.row] = k.bfloat16()
            x.vcache[x.page, x.row] = v
            return q.bfloat16()
        scale = q.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 448
        assert x.k_scale is not None and x.v_scale is not None
        for cache, part, factor in ((x.kcache, k, x.k_scale), (x.vcache, v.float(), x.v_scale)):
            codes = (part / factor).clamp(-448, 448).to(torch.float8_e4m3fn)
            cache.view(torch.uint8)[x.page, x.row] = codes.view(torch.uint8)
        return (q / scale).to(torch.float8_e4m3fn)

    return call
