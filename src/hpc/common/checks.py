"""Checks of arguments. They read metadata only (dtype, shape, stride, device), never the data of a tensor.

Every check takes the public function's name, the argument's name and its value first, returns nothing or the
checked value, and raises with the text of `errors.fail`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from hpc.common.errors import InvalidDtype, UnsupportedDevice, fail


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(sizes: Sequence[int | str | None]) -> str:
    return "[" + ", ".join("*" if size is None else str(size) for size in sizes) + "]"


def is_tensor(function: str, name: str, value: object, remedy: str = "") -> None:
    """`value` is a `torch.Tensor`."""
    if not isinstance(value, torch.Tensor):
        got = type(value).__name__
        fail(function, name, expected="a torch.Tensor", got=got, remedy=remedy, kind=InvalidDtype)


def dtype(
    function: str,
    name: str,
    tensor: torch.Tensor,
    allowed: torch.dtype | Sequence[torch.dtype],
    remedy: str = "",
) -> None:
    """`tensor` is a tensor of one of the `allowed` dtypes; bytes are never reinterpreted silently."""
    is_tensor(function, name, tensor, remedy)
    choices = (allowed,) if isinstance(allowed, torch.dtype) else tuple(allowed)
    if tensor.dtype not in choices:
        expected = "dtype " + " or ".join(_short(choice) for choice in choices)
        fail(function, name, expected=expected, got=_short(tensor.dtype), remedy=remedy, kind=InvalidDtype)


def ndim(function: str, name: str, tensor: torch.Tensor, dims: int, remedy: str = "") -> None:
    """`tensor` has `dims` dimensions."""
    if tensor.dim() != dims:
        got = f"{tensor.dim()} with shape {_dims(tensor.shape)}"
        fail(function, name, expected=f"{dims} dimensions", got=got, remedy=remedy)


def shape(
    function: str,
    name: str,
    tensor: torch.Tensor,
    expected: Sequence[int | str | None],
    remedy: str = "",
) -> None:
    """Shape equals `expected`; an entry that is a string (its name in the docs) or None may have any size."""
    actual = tensor.shape
    matches = len(actual) == len(expected) and all(
        not isinstance(want, int) or have == want for have, want in zip(actual, expected, strict=True)
    )
    if not matches:
        fail(function, name, expected=f"shape {_dims(expected)}", got=_dims(actual), remedy=remedy)


def same_device(
    function: str,
    name: str,
    tensor: torch.Tensor,
    device: torch.device,
    remedy: str = "All tensors of one call must lie on one device.",
) -> None:
    """`tensor` lies on `device`."""
    if tensor.device != device:
        fail(
            function,
            name,
            expected=f"device {device}",
            got=tensor.device,
            remedy=remedy,
            kind=UnsupportedDevice,
        )


def inner_contiguous(
    function: str,
    name: str,
    tensor: torch.Tensor,
    remedy: str = "Pass a view whose last dimension is packed, or call .contiguous().",
) -> None:
    """The last dimension has stride 1 (or at most one element)."""
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(function, name, expected="stride 1 in the last dimension", got=tensor.stride(), remedy=remedy)


def contiguous(
    function: str,
    name: str,
    tensor: torch.Tensor,
    remedy: str = "Call .contiguous() on it.",
) -> None:
    """`tensor` is contiguous."""
    if not tensor.is_contiguous():
        got = f"shape {_dims(tensor.shape)} with strides {tensor.stride()}"
        fail(function, name, expected="a contiguous tensor", got=got, remedy=remedy)


def int_range(
    function: str,
    name: str,
    value: object,
    low: int,
    high: int | None = None,
    remedy: str = "",
) -> int:
    """`value` is an integer in `[low, high]` (`high=None`: no upper bound); returns it as a Python int."""
    expected = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__"):
        fail(function, name, expected=expected, got=f"{value!r} ({type(value).__name__})", remedy=remedy)
    number = operator.index(value)
    if number < low or (high is not None and number > high):
        fail(function, name, expected=expected, got=number, remedy=remedy)
    return number


def one_of(function: str, name: str, value: object, choices: Sequence[object], remedy: str = "") -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        expected = "one of " + ", ".join(str(choice) for choice in choices)
        fail(function, name, expected=expected, got=repr(value), remedy=remedy)
