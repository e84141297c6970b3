"""An FP32 router weight as BF16 parts: the split, its cache, and whether a weight may be read early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hpc.common.errors import fail
from hpc.gemm.router.reference import split_reference

DEFAULT_SCALE = 1.0 / 256.0
_SPLITS = "_hpc_router_splits"  # attribute of a weight: {(terms, scale): (state of the weight, RouterWeight)}
_SETTLED = "_hpc_router_settled"  # attribute of a BF16 part: its version when a router kernel first read it


@dataclass(frozen=True, eq=False)
class RouterWeight:
    """BF16 parts of an FP32 weight [n, k]: weight = high + scale * low (+ scale^2 * third)."""

    high: torch.Tensor
    low: torch.Tensor
    third: torch.Tensor | None = None
    scale: float = DEFAULT_SCALE

    @property
    def terms(self) -> int:
        """BF16 parts: two keep 16 bits of a weight and more, three all of fp32."""
        return 2 if self.third is None else 3

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """(high, low) or (high, low, third)."""
        return (self.high, self.low) if self.third is None else (self.high, self.low, self.third)


def cached_split(function: str, weight: torch.Tensor, terms: int, scale: float) -> RouterWeight:
    """The parts of `weight`, made anew when the weight was replaced, moved or written to since the last call."""
    state = _state(weight)
    known: dict[Any, Any] = getattr(weight, _SPLITS, None) or {}
    found = known.get((terms, scale))
    if found is not None and state is not None and found[0] == state:
        split: RouterWeight = found[1]
        return split
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        fail(
            function, "weight", expected="a weight that was split before the capture", got="an unknown or changed one",
            remedy="Call hpc.split_router_weight(weight) once before capturing; a graph would keep the old parts.",
        )  # fmt: skip
    with torch.no_grad():
        split = RouterWeight(*_three(split_reference(weight.detach(), scale, terms)), scale)
    if state is not None:
        known[terms, scale] = (state, split)
        setattr(weight, _SPLITS, known)
    return split


def _three(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return parts[0], parts[1], parts[2] if len(parts) == 3 else None


def _state(weight: torch.Tensor) -> tuple[Any, ...] | None:
    """What changes when a weight is written to or replaced; None for tensors that do not count their writes."""
    if weight.is_inference():
        return None
    return weight.data_ptr(), weight._version, weight.shape, weight.stride(), weight.device


def settled(part: torch.Tensor) -> bool:
    """True if a router kernel has read this tensor as it is now.

    Kernels load weights before they wait for the preceding kernel of the stream. That is safe unless that kernel writes
    them, so a part that is new or was written to is first read behind an ordinary kernel.
    """
    if part.is_inference():
        return getattr(part, _SETTLED, None) == -1
    return bool(getattr(part, _SETTLED, None) == part._version)


def settle(part: torch.Tensor) -> None:
    """Remember that this tensor has been read as it is now."""
    setattr(part, _SETTLED, -1 if part.is_inference() else part._version)
