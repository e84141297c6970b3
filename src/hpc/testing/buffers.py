"""Buffers that make an unwritten or overwritten byte visible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SENTINEL = 0xA5

# Bit patterns of a quiet NaN, written through an integer view: float8 has no fill_ on every device.
_NAN_BITS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.float8_e5m2: (torch.uint8, 0x7F),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float64: (torch.int64, 0x7FF8000000000000),
}


def bit_view(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """An integer view of ``tensor`` with the bits of NaN (of the lowest value, for an integer dtype)."""
    if tensor.dtype in _NAN_BITS:
        int_dtype, bits = _NAN_BITS[tensor.dtype]
        return tensor.view(int_dtype), bits
    return tensor, torch.iinfo(tensor.dtype).min


def fill_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite ``tensor`` in place with NaN (integers: their lowest value) and return it."""
    bits, value = bit_view(tensor)
    bits.fill_(value)
    return tensor


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor full of NaN, for use as an output: an element that a kernel leaves unwritten then fails."""
    return fill_nan(torch.empty(tuple(shape), dtype=dtype, device=device))


@dataclass(frozen=True)
class Guarded:
    """A poisoned tensor inside a larger buffer of known bytes; see :func:`guarded`."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    guard_bytes: int

    def check_guards(self, what: str = "tensor") -> None:
        """Raise ``AssertionError`` when a byte before or after the tensor has changed."""
        sides = {
            "before": self.buffer[: self.guard_bytes],
            "after": self.buffer[self.buffer.numel() - self.guard_bytes :],
        }
        for side, part in sides.items():
            changed = part != _SENTINEL
            count = int(changed.sum())
            if not count:
                continue
            flat = changed.to(torch.uint8)
            first = int(flat.argmax())
            distance = first if side == "after" else self.guard_bytes - first
            raise AssertionError(
                f"{what}: {count} bytes {side} it were overwritten, the first {distance} bytes "
                f"{'past its end' if side == 'after' else 'ahead of its start'}"
            )


def guarded(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", guard_bytes: int = 65536
) -> Guarded:
    """A NaN-filled contiguous tensor with ``guard_bytes`` of sentinel bytes on either side.

    ``guard_bytes`` must be a multiple of 256, which keeps the alignment that allocators give.
    """
    if guard_bytes <= 0 or guard_bytes % 256:
        raise ValueError(f"guard_bytes must be a positive multiple of 256, got {guard_bytes}")
    num_bytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    buffer = torch.full((num_bytes + 2 * guard_bytes,), _SENTINEL, dtype=torch.uint8, device=device)
    tensor = buffer[guard_bytes : guard_bytes + num_bytes].view(dtype).view(tuple(shape))
    return Guarded(fill_nan(tensor), buffer, guard_bytes)
