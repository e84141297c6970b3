"""Correctness of one operator on this machine: its cases through the public function, against float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpc.common import arch
from hpc.common.operator import Case, Operator, Tolerance
from hpc.testing.accuracy import Accuracy, measure


@dataclass(frozen=True)
class CheckRow:
    """Outcome of one case. ``note`` says what failed; ``seconds`` includes a first compilation."""

    op: str
    case: str
    passed: bool
    rms_rel: float | None
    max_rel: float | None
    tolerance: Tolerance
    seconds: float
    note: str = ""


def check(
    op: Operator,
    device: torch.device | str,
    progress: Callable[[CheckRow, int, int], None] | None = None,
    *,
    cases: Sequence[Case] | None = None,
    seed: int = 0,
) -> list[CheckRow]:
    """Run an operator's cases through ``op.call`` and compare with ``op.reference``.

    Args:
        op: the operator.
        device: on a GPU the cases tagged "gpu" run, elsewhere the small ones tagged "interpret".
        progress: called as ``progress(row, done, total)`` after each case.
        cases: run these instead.
        seed: of the inputs.

    Returns:
        One row per case; a failure or an exception is a row with ``passed`` False, never raised.
    """
    device = torch.device(device)
    chosen = list(cases) if cases is not None else op.cases("gpu" if arch.is_cuda(device) else "interpret")
    rows: list[CheckRow] = []
    for number, case in enumerate(chosen, start=1):
        rows.append(_check_case(op, case, device, seed))
        if progress is not None:
            progress(rows[-1], number, len(chosen))
    return rows


def _check_case(op: Operator, case: Case, device: torch.device, seed: int) -> CheckRow:
    start = time.perf_counter()
    tolerance = op.tolerance(case)
    accuracy: Accuracy | None = None
    try:
        inputs = op.make_inputs(case, device, seed)
        result = op.call(inputs)
        reference = op.reference(inputs)
        accuracy = measure(result.reshape(reference.shape), reference)
        passed = accuracy.within(tolerance)
        note = "" if passed else str(accuracy)
    except Exception as error:
        passed = False
        note = f"{type(error).__name__}: {error}"
    return CheckRow(
        op=op.name,
        case=case.name,
        passed=passed,
        rms_rel=accuracy.rms_rel if accuracy else None,
        max_rel=accuracy.max_rel if accuracy else None,
        tolerance=tolerance,
        seconds=time.perf_counter() - start,
        note=note,
    )
