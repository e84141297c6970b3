"""One measure of error for all operators: relative RMS and relative maximum against float64.

    rms_rel = ||actual - reference|| / ||reference||
    max_rel = max|actual - reference| / max|reference|

Both are needed: the RMS tells a worse formulation (lower-precision probabilities, say) from
rounding, the maximum finds a single wrong row that the RMS of a large tensor hides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class ToleranceLike(Protocol):
    """Anything with the two limits, such as ``hpc.common.operator.Tolerance``."""

    @property
    def rms(self) -> float: ...

    @property
    def max(self) -> float: ...


@dataclass(frozen=True)
class Accuracy:
    """Error of one tensor against its reference.

    Attributes:
        rms_rel: relative RMS error; ``inf`` when a NaN or an infinity stands where the reference has none.
        max_rel: largest absolute error over the largest absolute reference value; ``inf`` as above.
        worst: coordinate of the largest error (of the first non-finite mismatch, if there is one).
        actual_at, reference_at: the two values there.
        num_nonfinite: elements whose NaN or infinity differs from the reference.
    """

    rms_rel: float
    max_rel: float
    worst: tuple[int, ...]
    actual_at: float
    reference_at: float
    num_nonfinite: int = 0

    def within(self, tolerance: ToleranceLike) -> bool:
        """True when both errors are numbers within the limits."""
        return self.rms_rel <= tolerance.rms and self.max_rel <= tolerance.max

    def __str__(self) -> str:
        text = (
            f"rms {self.rms_rel:.3e}, max {self.max_rel:.3e}, worst at {list(self.worst)}: "
            f"{self.actual_at:.6g} for {self.reference_at:.6g}"
        )
        if self.num_nonfinite:
            text += f", {self.num_nonfinite} elements wrongly NaN or infinite (or wrongly finite)"
        return text


def measure(actual: torch.Tensor, reference: torch.Tensor) -> Accuracy:
    """Compare ``actual`` (any dtype) with ``reference`` (float64, same shape, any device).

    A NaN or an infinity is right only where the reference has the same one. Computed in float64.
    Raises ``AssertionError`` when the shapes differ.
    """
    if actual.shape != reference.shape:
        raise AssertionError(f"shape {list(actual.shape)}, reference has {list(reference.shape)}")
    if actual.numel() == 0:
        return Accuracy(0.0, 0.0, (), math.nan, math.nan)
    want = reference.detach().to(torch.float64).reshape(-1)
    have = actual.detach().to(want.device).to(torch.float64).reshape(-1)
    finite = torch.isfinite(want)
    same = (have == want) | (torch.isnan(have) & torch.isnan(want))
    wrong = torch.where(finite, ~torch.isfinite(have), ~same)
    num_wrong = int(wrong.sum())
    if num_wrong:
        first = int(wrong.to(torch.uint8).argmax())
        return _at(have, want, first, actual.shape, math.inf, math.inf, num_wrong)
    zero = torch.zeros((), dtype=torch.float64, device=want.device)
    error = torch.where(finite, have - want, zero).abs()
    scale = torch.where(finite, want, zero)
    rms = _ratio(float(torch.linalg.vector_norm(error)), float(torch.linalg.vector_norm(scale)))
    largest = _ratio(float(error.max()), float(scale.abs().max()))
    return _at(have, want, int(error.argmax()), actual.shape, rms, largest, 0)


def assert_close(
    actual: torch.Tensor, reference: torch.Tensor, tolerance: ToleranceLike, what: str = "result"
) -> Accuracy:
    """Print both errors of ``actual`` against the float64 ``reference``; raise beyond ``tolerance``.

    The line is printed in either case, so that a passing test shows how far from its limit it is.
    Returns the measured :class:`Accuracy`; raises ``AssertionError`` with the same line.
    """
    if reference.dtype != torch.float64:
        raise TypeError(f"reference must be float64, got {reference.dtype}: a rounded reference hides errors")
    accuracy = measure(actual, reference)
    line = f"{what}: {accuracy} (limits rms {tolerance.rms:.3e}, max {tolerance.max:.3e})"
    print(line)
    if not accuracy.within(tolerance):
        raise AssertionError(line)
    return accuracy


def _ratio(error: float, scale: float) -> float:
    """``error / scale``; against an all-zero reference only an exact zero passes."""
    if error == 0.0:
        return 0.0
    return error / scale if scale > 0.0 else math.inf


def _at(
    have: torch.Tensor,
    want: torch.Tensor,
    flat: int,
    shape: torch.Size,
    rms: float,
    largest: float,
    wrong: int,
) -> Accuracy:
    coordinate = []
    rest = flat
    for size in reversed(shape):
        rest, index = divmod(rest, size)
        coordinate.append(index)
    return Accuracy(rms, largest, tuple(reversed(coordinate)), float(have[flat]), float(want[flat]), wrong)
