"""Poisoned and guarded buffers."""

from __future__ import annotations

import pytest
import torch

from hpc.testing import guarded, poisoned

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poisoned_is_nan_everywhere(dtype: torch.dtype) -> None:
    assert torch.isnan(poisoned((3, 5), dtype).float()).all()


def test_poisoned_integers_are_the_lowest_value() -> None:
    assert (poisoned((4,), torch.int32) == -(2**31)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn], ids=str)
def test_guards_see_one_byte_on_either_side(dtype: torch.dtype) -> None:
    held = guarded((3, 7), dtype, guard_bytes=512)
    size = held.tensor.numel() * held.tensor.element_size()
    held.tensor.view(torch.uint8).fill_(1)
    held.check_guards()
    for offset, side in ((512 + size, "after"), (511, "before")):
        kept = held.buffer[offset].clone()
        held.buffer[offset] = 0
        with pytest.raises(AssertionError, match=f"1 bytes {side}"):
            held.check_guards("out")
        held.buffer[offset] = kept
    held.check_guards()


def test_guard_keeps_alignment() -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        guarded((3,), torch.float32, guard_bytes=100)
    held = guarded((3,), torch.float32)
    assert held.tensor.is_contiguous() and held.tensor.storage_offset() * 4 % 256 == 0
