"""The Triton kernels, interpreted on the CPU, against the float64 reference on tiny cases.

Scratch and outputs are NaN before each run: whatever is read without having been written, or left unwritten, shows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_support import interpret

from hpc.common.operator import Tolerance
from hpc.moe import case_lists, cases, plan
from hpc.moe.case_lists import MoeCase
from hpc.moe.cases import key_of
from hpc.testing import measure

pytestmark = pytest.mark.interpret


def limits(params: MoeCase) -> Tolerance:
    """fp32 accumulation flips next to nothing; but with block scales a quotient by the row's own maximum can be an
    exact tie of e4m3, which the last bit of an fp32 scale decides."""
    return cases.tolerance(params) if params.block else cases.EXACT_TOLERANCE


CASES = {case.name: case.params for case in case_lists.interpret_cases()}


@pytest.mark.parametrize("name", CASES)
def test_against_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = cases.make_inputs(CASES[name], "cpu", seed=3)
    out, _, _ = interpret(monkeypatch, inputs)
    accuracy = measure(out, cases.reference(inputs))
    assert accuracy.within(limits(inputs.params)), accuracy


# Each part of the two kernels once: a pair is on its own there, so how pairs meet at experts decides nothing.
TINY = (
    "tensor fp32 product", "tensor one token", "block one expert", "tensor shared, factor", "tensor invalid",
    "block none", "tensor rank 1 of 2", "block bf16 x", "tensor gelu", "block swiglu limit and alpha",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TINY else pytest.mark.slow)
        for name, params in CASES.items()
        if params.tokens < 40 and name not in case_lists.OPTIONS
    ],
)
def test_tiny_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches without an index."""
    inputs = cases.make_inputs(CASES[name], "cpu", seed=4)
    up_rows = 8 if name == "block one expert" else 16
    chosen = plan.Plan("tiny", 16, 16, True, tiny=plan.Tiny(up_rows, 8 * up_rows, 4, 4 * up_rows, 4))
    assert plan.is_legal(chosen, key_of(inputs)) is None
    out, _, _ = interpret(monkeypatch, inputs, chosen)
    accuracy = measure(out, cases.reference(inputs))
    assert accuracy.within(limits(inputs.params)), accuracy


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize(("tile", "fused"), [(16, False), (32, True), (32, False)])
def test_every_plan(block: bool, tile: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting in one launch and in three, tiles of other heights: the same result, bit for bit."""
    inputs = cases.make_inputs(MoeCase(20, 3, 128, 80, top_k=2, block=block, routing="zipf"), "cpu", seed=1)
    usual, _, _ = interpret(monkeypatch, inputs)
    chosen = replace(plan.analytic(key_of(inputs)), tile=tile, fused_index=fused, chunk=16)
    assert plan.is_legal(chosen, key_of(inputs)) is None
    out, _, _ = interpret(monkeypatch, inputs, chosen)
    assert torch.equal(out.view(torch.int16), usual.view(torch.int16))
