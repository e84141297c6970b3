"""The arguments of a decode call as one value, and its numbers as Python's own. Metadata and host values only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch

from hpc.attention.decode import choose
from hpc.common import checks
from hpc.common.errors import fail
from hpc.common.quant import QuantType

MAX_NEW_TOKENS = 16


def quant_type(function: str, value: QuantType | int) -> int:
    """0 or 1, or an exception that lists both."""
    number = value.value if isinstance(value, QuantType) else value
    if type(number) is not int or number not in (0, 1):
        got, remedy = f"{value!r} ({type(value).__name__})", "Only these two have kernels."
        fail(function, "quant_type", expected="one of 0, 1", got=got, remedy=remedy)
    return number


@dataclass(frozen=True)
class Arguments:
    """One decode call as `hpc.attention_decode_fp8` got it; BF16 has no scales and quant -1.

    Annotated as they should be: nothing is checked yet.
    """

    function: str
    q: torch.Tensor
    kcache: torch.Tensor
    vcache: torch.Tensor
    block_ids: torch.Tensor
    seq_lens: torch.Tensor
    scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None)
    quant: int = -1
    mtp: int = 0
    new_kv_included: bool = False
    splitk: bool = True
    task_map: torch.Tensor | None = None
    split_flag: torch.Tensor | None = None
    output: torch.Tensor | None = None
    softmax_scale: float | None = None
    window: int | None = None
    logit_cap: float | None = None
    sinks: torch.Tensor | None = None
    return_lse: bool = False
    batch_invariant: bool = False
    plan: choose.Plan | None = None

    def values(self) -> tuple[Any, ...]:
        """All fields in their order."""
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def plain_numbers(args: Arguments) -> tuple[Any, ...]:
    """The fields with Python's own ints and floats, or an exception for a value that is none or not allowed."""
    cap = _number(args, "logit_cap")
    if cap is not None and cap <= 0:
        remedy = "Pass None for no cap."
        fail(args.function, "logit_cap", expected="a positive number", got=args.logit_cap, remedy=remedy)
    window = args.window
    if window is not None:
        window = checks.int_range(args.function, "window", window, 1, 2**30, "Pass None for no window.")
    remedy = "mtp counts draft tokens beyond the first."
    mtp = checks.int_range(args.function, "mtp", args.mtp, 0, MAX_NEW_TOKENS - 1, remedy)
    scale = _number(args, "softmax_scale")
    return replace(args, mtp=mtp, window=window, logit_cap=cap, softmax_scale=scale).values()


def _number(args: Arguments, name: str) -> float | None:
    value = getattr(args, name)
    if value is None:
        return None
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        expected = "a positive number that is finite" if name == "logit_cap" else "a finite number"
        got = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
        fail(
            args.function,
            name,
            expected=expected,
            got=got,
            remedy="Pass a Python float, or None for the default.",
        )
    return float(value)
