"""One error text for everything, and checks that read metadata only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpc.common import checks
from hpc.common.errors import InvalidArgument, InvalidDtype, UnsupportedDevice, fail

F = "attention_decode_fp8"


def test_fail_names_everything() -> None:
    with pytest.raises(InvalidArgument) as caught:
        fail(F, "q", expected="shape [B, Hq, D]", got="[3]", remedy="Reshape it.")
    assert str(caught.value) == (
        "hpc.attention_decode_fp8: argument 'q': expected shape [B, Hq, D]; got [3]. Reshape it."
    )


def test_fail_without_remedy_ends_with_a_full_stop() -> None:
    with pytest.raises(InvalidArgument, match=r"got 3\.$"):
        fail(F, "mtp", expected="an integer in [0, 15]", got=3)


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (InvalidArgument, (ValueError, RuntimeError)),
        (InvalidDtype, (TypeError, RuntimeError)),
        (UnsupportedDevice, (RuntimeError,)),
    ],
)
def test_exceptions_fit_both_python_and_engine_habits(kind: type, bases: tuple[type, ...]) -> None:
    for base in bases:
        with pytest.raises(base):
            fail(F, "q", expected="a", got="b", kind=kind)


X = torch.zeros(2, 3, 4)
BAD: dict[str, tuple[Callable[[], object], type, str]] = {
    "no tensor": (lambda: checks.is_tensor(F, "q", [1]), InvalidDtype, "a torch.Tensor; got list"),
    "no tensor for dtype": (lambda: checks.dtype(F, "q", None, torch.float32), InvalidDtype, "got NoneType"),
    "dtype": (lambda: checks.dtype(F, "q", X, torch.bfloat16), InvalidDtype, "dtype bfloat16; got float32"),
    "dtypes": (
        lambda: checks.dtype(F, "q", X, (torch.int8, torch.int32)),
        InvalidDtype,
        "dtype int8 or int32; got float32",
    ),
    "ndim": (lambda: checks.ndim(F, "q", X, 2), InvalidArgument, "2 dimensions; got 3 with shape [2, 3, 4]"),
    "shape size": (
        lambda: checks.shape(F, "q", X, [2, "heads", 8]),
        InvalidArgument,
        "shape [2, heads, 8]; got [2, 3, 4]",
    ),
    "shape rank": (
        lambda: checks.shape(F, "q", X, [2, None]),
        InvalidArgument,
        "shape [2, *]; got [2, 3, 4]",
    ),
    "device": (
        lambda: checks.same_device(F, "q", X, torch.device("meta")),
        UnsupportedDevice,
        "device meta; got cpu",
    ),
    "inner stride": (
        lambda: checks.inner_contiguous(F, "q", X.transpose(1, 2)),
        InvalidArgument,
        "stride 1 in the last dimension; got (12, 1, 4)",
    ),
    "contiguous": (
        lambda: checks.contiguous(F, "q", X[:, ::2]),
        InvalidArgument,
        "shape [2, 2, 4] with strides (12, 8, 1)",
    ),
    "int low": (lambda: checks.int_range(F, "mtp", -1, 0, 15), InvalidArgument, "in [0, 15]; got -1"),
    "int high": (lambda: checks.int_range(F, "mtp", 16, 0, 15), InvalidArgument, "in [0, 15]; got 16"),
    "int open": (lambda: checks.int_range(F, "window", 0, 1), InvalidArgument, "an integer >= 1; got 0"),
    "int bool": (lambda: checks.int_range(F, "mtp", True, 0, 15), InvalidArgument, "got True (bool)"),
    "int float": (lambda: checks.int_range(F, "mtp", 1.0, 0, 15), InvalidArgument, "got 1.0 (float)"),
    "int tensor": (
        lambda: checks.int_range(F, "mtp", torch.tensor(1), 0, 15),
        InvalidArgument,
        "got tensor(1) (Tensor)",
    ),
    "choice": (lambda: checks.one_of(F, "quant_type", 2, (0, 1)), InvalidArgument, "one of 0, 1; got 2"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_check_refuses(case: str) -> None:
    check, kind, text = BAD[case]
    with pytest.raises(kind) as caught:
        check()
    message = str(caught.value)
    assert message.startswith(f"hpc.{F}: argument '")
    assert text in message


def test_checks_accept_what_is_right() -> None:
    checks.dtype(F, "q", X, (torch.float32, torch.bfloat16))
    checks.ndim(F, "q", X, 3)
    checks.shape(F, "q", X, [2, "heads", None])
    checks.same_device(F, "q", X, torch.device("cpu"))
    checks.inner_contiguous(F, "q", X[:, ::2])
    checks.inner_contiguous(F, "q", torch.zeros(4, 2).t()[:, :1])  # one element: any stride is packed
    checks.contiguous(F, "q", X)
    checks.one_of(F, "quant_type", 1, (0, 1))
    assert checks.int_range(F, "mtp", 3, 0, 15) == 3


def test_checks_read_no_data() -> None:
    """A meta tensor has no data at all."""
    x = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    checks.dtype(F, "q", x, torch.bfloat16)
    checks.shape(F, "q", x, [2, 3])
    checks.contiguous(F, "q", x)
    checks.same_device(F, "q", x, torch.device("meta"))
