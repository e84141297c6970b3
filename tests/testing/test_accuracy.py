"""The measure of error: what passes, what must not."""

from __future__ import annotations

import math

import pytest
import torch

from hpc.common.operator import Tolerance
from hpc.testing import assert_close, measure

TIGHT = Tolerance(rms=0.0025, max=0.02)


def _attention(round_probabilities: torch.dtype | None) -> torch.Tensor:
    """One softmax-weighted sum over 1024 keys, in float64 but for the rounding of its probabilities."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 1024, dtype=torch.float64, generator=generator)
    values = torch.randn(1024, 128, dtype=torch.float64, generator=generator)
    p = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    total = p.sum(dim=1, keepdim=True)
    if round_probabilities is not None:
        p = p.to(torch.float32).to(round_probabilities).to(torch.float64)
    return p @ values / total


def test_sixteen_bit_probabilities_pass_and_eight_bit_ones_fail() -> None:
    reference = _attention(None)
    accuracy = assert_close(_attention(torch.bfloat16), reference, TIGHT, "bf16 probabilities")
    assert 0 < accuracy.rms_rel < TIGHT.rms
    with pytest.raises(AssertionError, match="fp8 probabilities"):
        assert_close(_attention(torch.float8_e4m3fn), reference, TIGHT, "fp8 probabilities")


def test_one_wrong_element_fails_by_the_maximum_and_is_located() -> None:
    reference = torch.randn(50, 400, dtype=torch.float64)
    actual = reference.clone()
    actual[17, 333] += 0.5
    accuracy = measure(actual, reference)
    assert accuracy.worst == (17, 333)
    assert accuracy.rms_rel < 0.005 < TIGHT.max < accuracy.max_rel
    with pytest.raises(AssertionError, match=r"\[17, 333\]"):
        assert_close(actual, reference, Tolerance(rms=0.01, max=0.02))


def test_values_are_exact_formulas() -> None:
    reference = torch.tensor([3.0, -4.0], dtype=torch.float64)
    accuracy = measure(torch.tensor([3.0, -3.0]), reference)
    assert accuracy.rms_rel == pytest.approx(1 / 5)
    assert accuracy.max_rel == pytest.approx(1 / 4)
    assert (accuracy.actual_at, accuracy.reference_at) == (-3.0, -4.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_never_passes_where_the_reference_is_finite(bad: float) -> None:
    reference = torch.ones(8, dtype=torch.float64)
    actual = torch.ones(8)
    actual[5] = bad
    accuracy = measure(actual, reference)
    assert accuracy.worst == (5,) and accuracy.num_nonfinite == 1
    with pytest.raises(AssertionError):
        assert_close(actual, reference, Tolerance(rms=math.inf, max=1e30))


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_non_finite_must_equal_the_reference(special: float) -> None:
    reference = torch.tensor([1.0, special], dtype=torch.float64)
    assert_close(torch.tensor([1.0, special]), reference, TIGHT)
    for wrong in (0.0, math.nan if not math.isnan(special) else math.inf, -special):
        if wrong == special or (math.isnan(wrong) and math.isnan(special)):
            continue
        with pytest.raises(AssertionError):
            assert_close(torch.tensor([1.0, wrong]), reference, Tolerance(rms=1e9, max=1e9))


def test_zero_reference_needs_exact_zeros() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    assert_close(torch.zeros(4), zeros, TIGHT)
    with pytest.raises(AssertionError):
        assert_close(torch.full((4,), 1e-20), zeros, Tolerance(rms=1.0, max=1.0))


def test_both_numbers_are_printed_when_it_passes(capsys: pytest.CaptureFixture[str]) -> None:
    reference = torch.randn(4, 4, dtype=torch.float64)
    assert_close(reference.float(), reference, TIGHT, "rounded to fp32")
    line = capsys.readouterr().out
    assert line.startswith("rounded to fp32: rms ") and "max " in line and "worst at" in line


def test_shape_and_reference_dtype_are_checked() -> None:
    with pytest.raises(AssertionError, match="shape"):
        measure(torch.zeros(3), torch.zeros(4, dtype=torch.float64))
    with pytest.raises(TypeError, match="float64"):
        assert_close(torch.zeros(3), torch.zeros(3), TIGHT)


def test_empty_tensors_agree() -> None:
    assert_close(torch.empty(0, 8), torch.empty(0, 8, dtype=torch.float64), TIGHT)
