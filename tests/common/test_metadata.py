"""The C++ check says True only for equal metadata, and keeps no tensor alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from hpc.common import metadata
from hpc.common.metadata import metadata_check


def tensors() -> list[torch.Tensor]:
    return [
        torch.zeros(4, 8, 16),
        torch.zeros(3, 5, dtype=torch.int32),
        torch.zeros(1).to(torch.float8_e4m3fn),
    ]


def test_torch_has_it() -> None:
    """If a new torch lacks it, calls cost 5 us more and `metadata` wants another look."""
    assert metadata_check(tensors()) is not None


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda t: torch.zeros(4, 8, 17),
    "rank": lambda t: torch.zeros(4, 8, 16, 1),
    "strides": lambda t: torch.zeros(4, 8, 32)[..., :16],
    "transposed": lambda t: torch.zeros(8, 4, 16).transpose(0, 1),
    "dtype": lambda t: t.to(torch.bfloat16),
    "device": lambda t: t.to("meta"),
    "layout": lambda t: t.to_sparse(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_noticed(change: str) -> None:
    check = metadata_check(tensors())
    assert check is not None and check(*tensors())
    first, *others = tensors()
    assert not check(CHANGES[change](first), *others)


def test_other_things_than_tensors_are_noticed() -> None:
    check = metadata_check(tensors())
    assert check is not None
    first, *others = tensors()
    assert not check(None, *others) and not check(3, *others)
    with pytest.raises(TypeError):
        check(first)


def test_a_tensor_changed_in_place_is_noticed() -> None:
    first, *others = tensors()
    check = metadata_check([first, *others])
    assert check is not None and check(first, *others)
    first.transpose_(0, 1)
    assert not check(first, *others)


def test_tensors_are_not_held() -> None:
    given = tensors()
    check = metadata_check(given)
    watched = weakref.ref(given[0])
    del given
    assert check is not None and watched() is None


@pytest.mark.parametrize("broken", [None, lambda *args, **kwargs: None, lambda: None])
def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch, broken: object) -> None:
    monkeypatch.setattr(metadata, "_TensorGuards", broken)
    assert metadata_check(tensors()) is None
