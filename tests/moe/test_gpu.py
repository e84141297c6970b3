"""Every case on the GPU, against float64; poisoned outputs, repeatability, what a call must not touch."""

from __future__ import annotations

import pytest
import torch

from hpc.moe import case_lists, cases, plan
from hpc.testing import assert_close, guarded, measure, poisoned

pytestmark = pytest.mark.gpu

CASES = {case.name: case.params for case in case_lists.gpu_cases()}


@pytest.mark.parametrize("name", CASES)
def test_against_reference(name: str, device: torch.device) -> None:
    """Output in a poisoned buffer between guards; two runs give the same bits."""
    params = CASES[name]
    inputs = cases.make_inputs(params, device, seed=5)
    target = guarded(cases.result_shape(params), torch.bfloat16, device)
    out = cases.run(inputs, output=target.tensor)
    assert out is target.tensor
    first = out.clone()
    assert_close(out, cases.reference(inputs), cases.tolerance(params), name)
    target.check_guards(name)
    values = params.tokens * params.top_k * params.inter
    if values > cases.FEW and params.routing not in ("none", "invalid") and not params.bf16_weights:
        # Flipped codes are as near to the value as the reference's: no farther from the unquantised result than it is.
        plain = cases.reference(inputs, requantised=False)
        ideal = measure(cases.reference(inputs).bfloat16(), plain).rms_rel
        assert measure(out, plain).rms_rel <= cases.UNQUANTISED_FACTOR * ideal, name
    again = cases.run(inputs, output=poisoned(out.shape, torch.bfloat16, device))
    assert torch.equal(again.view(torch.int16), first.view(torch.int16))


# 300 tokens are 75 rows of an expert, 1200 in skew: nine full tiles and a tail; 2049 leave tails everywhere.
MANY = [name for name, p in CASES.items() if p.tokens >= 130 and p.inter in (80, 256, 320)]


@pytest.mark.parametrize("name", MANY)
def test_plans_for_many_rows(name: str, device: torch.device) -> None:
    """The pair kernels, whether or not they are the choice."""
    inputs = cases.make_inputs(CASES[name], device, seed=5)
    offered = plan.alternatives(cases.key_of(inputs))
    plans = {label: offered[label] for label in ("pair 64", "pair 128") if label in offered}
    if not plans:
        pytest.skip("none is legal here")
    want = cases.reference(inputs)
    usual = cases.tolerance(CASES[name])
    limits = {"pair 64": usual, "pair 128": max(usual, cases.PAIR_128_TOLERANCE, key=lambda each: each.rms)}
    for label, chosen in plans.items():
        target = guarded(want.shape, torch.bfloat16, device)
        first = cases.run(inputs, plan=chosen, output=target.tensor).clone()
        assert_close(first, want, limits[label], f"{name}, {label}")
        target.check_guards(f"{name}, {label}")
        again = cases.run(inputs, plan=chosen, output=poisoned(want.shape, torch.bfloat16, device))
        assert torch.equal(again.view(torch.int16), first.view(torch.int16))


@pytest.mark.parametrize("block", [False, True])
def test_strided_output(block: bool, device: torch.device) -> None:
    inputs = cases.make_inputs(cases.MoeCase(33, 8, 512, 192, block=block), device, seed=1)
    wide = poisoned((33, 1024), torch.bfloat16, device)
    cases.run(inputs, output=wide[:, 256:768])
    assert torch.equal(wide[:, 256:768], cases.run(inputs))
    assert wide[:, :256].isnan().all() and wide[:, 768:].isnan().all()


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("tokens", [3, 200, 500])  # at 200 and 500 the pair kernels
def test_ranks_add_up(block: bool, tokens: int, device: torch.device) -> None:
    """Outputs of expert-parallel ranks, each with its part of the weights, sum to that of all experts."""
    whole = cases.make_inputs(cases.MoeCase(tokens, 16, 512, 256, block=block, shared=True), device, seed=2)
    total = torch.zeros(tokens, 512, dtype=torch.float64, device=device)
    for rank in range(4):
        mine = slice(4 * rank, 4 * rank + 4)
        part = cases.replace(
            whole, params=cases.replace(whole.params, experts=4, ranks=4, rank=rank),
            w13=whole.w13[mine], w13_scale=whole.w13_scale[mine].contiguous(),
            w2=whole.w2[mine], w2_scale=whole.w2_scale[mine].contiguous(),
            shared_output=whole.shared_output if rank == 1 else None,
        )  # fmt: skip
        total += cases.run(part).double()
    assert_close(total, cases.reference(whole), cases.tolerance(whole.params))


@pytest.mark.parametrize("block", [False, True])
def test_result_is_the_callers(block: bool, device: torch.device) -> None:
    """An engine scales the result in place; the next call must not see that."""
    inputs = cases.make_inputs(cases.MoeCase(9, 8, 256, 128, block=block), device, seed=3)
    first = cases.run(inputs)
    kept = first.clone()
    first.mul_(0.0)
    assert torch.equal(cases.run(inputs), kept)
