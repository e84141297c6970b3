"""The Triton kernels, interpreted on the CPU, against the reference, bit for bit, on tiny cases.

Dead cache rows hold NaN, dead page-table entries hold garbage, outputs start as NaN.
"""

from __future__ import annotations

import pytest
from rope_support import assert_same, expected, interpreted, poison

from hpc.rope import case_lists, cases, plan

pytestmark = pytest.mark.interpret

CASES = {case.name: case.params for case in case_lists.interpret_cases()}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_bit_for_bit(name: str) -> None:
    inputs = cases.make_tensors(CASES[name], "cpu", seed=1)
    want = expected(inputs)
    assert_same(interpreted(poison(inputs)), want, name)


@pytest.mark.parametrize("heads", [1, 4, 32])
def test_any_tile_gives_the_same_bits(heads: int) -> None:
    inputs = cases.make_tensors(CASES["fp8 prefill, ragged"], "cpu", seed=2)
    assert_same(interpreted(poison(inputs), plan.Plan(heads, 4)), expected(inputs), f"{heads} heads")
