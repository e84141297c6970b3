"""Exceptions of the library and the one text that all of them carry."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["InvalidArgument", "InvalidDtype", "UnsupportedDevice", "fail"]


class InvalidArgument(ValueError, RuntimeError):
    """A shape, stride, value or combination of arguments that the function does not support.

    It is a `RuntimeError` too, because engines that wrap operators in C++ libraries expect that type.
    """


class InvalidDtype(TypeError, RuntimeError):
    """An argument of the wrong type: a dtype that would have to be reinterpreted, or no tensor at all."""


class UnsupportedDevice(RuntimeError):
    """The device cannot run what was asked, or arguments lie on different devices."""


def fail(
    function: str,
    argument: str,
    *,
    expected: str,
    got: object,
    remedy: str = "",
    kind: type[Exception] = InvalidArgument,
) -> NoReturn:
    """Raise `kind` with the library's one error text.

    Args:
        function: public name without the package, for example `attention_decode_fp8`.
        argument: name of the argument as the caller wrote it.
        expected: what would have been right, in words.
        got: what was passed; its `str` is shown.
        remedy: one sentence that says what to do, or empty.
        kind: the exception class.
    """
    text = f"hpc.{function}: argument '{argument}': expected {expected}; got {got}."
    raise kind(f"{text} {remedy}".rstrip())
