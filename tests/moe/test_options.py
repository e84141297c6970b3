"""What beside the engine's arguments a call can ask for, by identities that hold whatever the reference says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hpc.common.errors import InvalidArgument
from hpc.common.operator import Tolerance
from hpc.moe import cases, plan
from hpc.moe.case_lists import MoeCase
from hpc.moe.cases import MoeInputs
from hpc.testing import assert_close

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
KIND = pytest.mark.parametrize("kind", ["tensor", "block", "bf16"])
# y rounded once more, as a sum that the caller makes of it is
SUM = Tolerance(rms=4e-3, max=1e-2)


def make(where: str, kind: str, **fields: Any) -> MoeInputs:
    base: dict[str, Any] = {"tokens": 9, "experts": 4, "hidden": 256, "inter": 192, "top_k": 2}
    return cases.make_inputs(
        MoeCase(block=kind == "block", bf16_weights=kind == "bf16", **{**base, **fields}), where, 3
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@HERE
@KIND
def test_uncombined_results_sum_to_the_combined_one(kind: str, where: str) -> None:
    """y is not weighted; rows of other ranks' experts and of no expert are zeros; weights do not matter."""
    inputs = make(where, kind, ranks=2, rank=1, routing="invalid")
    y = cases.run(inputs, no_combine=True)
    ours = (inputs.topk_ids >= 4) & (inputs.topk_ids < 8)
    assert y.shape == (9, 2, 256) and not y[~ours].any() and y[ours].any(-1).all()
    weights = inputs.topk_scale.masked_fill(~ours, 0)
    total = (weights.double()[..., None] * y.double()).sum(1)
    assert_close(cases.run(inputs), total, SUM)
    zero = replace(inputs, topk_scale=torch.zeros_like(inputs.topk_scale))
    assert same(cases.run(zero, no_combine=True), y)


@HERE
@KIND
def test_weight_on_input_is_the_input_times_the_weight(kind: str, where: str) -> None:
    """By powers of two, which scale x or its scales exactly; weights of the sum are then 1, whatever K."""
    inputs = make(where, kind, bf16_input=kind == "tensor", static=False)
    ones = torch.ones_like(inputs.topk_scale)
    factors = torch.tensor([0.5, 2.0, 1.0, 4.0, 0.25, 1.0, 8.0, 1.0, 2.0], device=where)
    scaled = replace(inputs, topk_scale=ones)
    if inputs.x_scale is None:
        scaled = replace(scaled, x=inputs.x * factors[:, None].to(inputs.x.dtype))
    else:
        scaled = replace(scaled, x_scale=inputs.x_scale * factors[:, None])
    on_input = replace(inputs, topk_scale=factors[:, None].expand(9, 2).contiguous())
    out = cases.run(on_input, apply_router_weight_on_input=True)
    assert_close(out, cases.run(scaled).double(), cases.FEW_TOLERANCE)
    assert not same(out, cases.run(on_input))


@HERE
@KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_without_weights(kind: str, where: str, dtype: torch.dtype) -> None:
    """Weights of zero leave down_bias of the token's experts, in the order of its experts."""
    inputs = make(where, kind, bias=str(dtype).removeprefix("torch."))
    inputs.w13.view(torch.uint8).zero_()
    inputs.w2.view(torch.uint8).zero_()
    assert inputs.w2_bias is not None and inputs.w2_bias.dtype == dtype
    y = cases.run(inputs, no_combine=True)
    assert same(y, inputs.w2_bias[inputs.topk_ids.long()].bfloat16())


@HERE
@KIND
def test_gate_up_bias_reaches_the_activation(kind: str, where: str) -> None:
    """Up rows without weights and with a bias of 1, alpha: the product is g * sigmoid(g) * 2, as limit cuts nothing."""
    inputs = make(where, kind, bias="float32", static=kind != "tensor")
    assert inputs.w13_bias is not None
    inputs.w13.view(torch.uint8)[:, 192:].zero_()
    inputs.w13_bias[:, :192] = 0
    inputs.w13_bias[:, 192:] = 1.0
    once = cases.run(inputs, down_bias=None).double()
    twice = cases.run(inputs, down_bias=None, swiglu_alpha=1.0, swiglu_limit=1e4).double()
    assert_close(twice, 2 * once, cases.TOLERANCE)


@HERE
def test_dynamic_scales_are_those_of_block_scales(where: str) -> None:
    """One scale an expert, x and activations by 128 columns: as block scales that are equal within an expert."""
    inputs = make(where, "tensor", bf16_input=True, static=False, bf16_mul=False)
    assert inputs.w13_scale is not None and inputs.w2_scale is not None
    blocks = replace(
        inputs, params=replace(inputs.params, block=True),
        w13_scale=inputs.w13_scale[:, None, None].expand(4, 3, 2).contiguous(),
        w2_scale=inputs.w2_scale[:, None, None].expand(4, 2, 2).contiguous(),
    )  # fmt: skip
    assert_close(cases.run(inputs), cases.run(blocks).double(), cases.FEW_TOLERANCE)


@HERE
def test_dynamic_activations_of_any_size(where: str) -> None:
    """Rows a thousand times larger or smaller keep their precision: no scale was calibrated for them."""
    inputs = make(where, "tensor", bf16_input=True, static=False)
    inputs.x[1] *= 1024
    inputs.x[2] /= 1024
    out, want = cases.run(inputs), cases.reference(inputs)
    for row in range(3):
        assert_close(out[row], want[row], cases.FEW_TOLERANCE)


@HERE
@KIND
def test_uncombined_results_of_no_tokens_and_of_a_given_output(kind: str, where: str) -> None:
    assert cases.run(make(where, kind, tokens=0), no_combine=True).shape == (0, 2, 256)
    inputs = make(where, kind)
    out = torch.full((9, 2, 256), torch.nan, dtype=torch.bfloat16, device=where)
    assert cases.run(inputs, no_combine=True, output=out) is out
    assert same(out, cases.run(inputs, no_combine=True))


@HERE
@KIND
def test_shared_experts_are_experts_that_every_token_takes(kind: str, where: str) -> None:
    """As ids appended by hand, with weights that undo the factor; ids of other ranks do not reach them."""
    inputs = make(where, kind, experts=5, shared_experts=2, ranks=2, rank=1, factor=2.0)
    out = cases.run(inputs)
    ids = torch.where(inputs.topk_ids >= 3, inputs.topk_ids - 3, -1)
    more = torch.tensor([3, 4], dtype=torch.int32, device=where).expand(9, 2)
    half = torch.full((9, 2), 0.5, device=where)
    by_hand = replace(
        inputs, params=replace(inputs.params, shared_experts=0, ranks=1, rank=0),
        topk_ids=torch.cat([ids, more], 1), topk_scale=torch.cat([inputs.topk_scale, half], 1),
    )  # fmt: skip
    assert same(out, cases.run(by_hand))
    assert cases.run(inputs, no_combine=True, routed_scaling_factor=1.0).shape == (9, 4, 256)
    with pytest.raises(InvalidArgument, match="'num_fused_shared_experts'"):
        cases.run(inputs, num_fused_shared_experts=5)
    with pytest.raises(InvalidArgument, match="'routed_scaling_factor': expected another than 0"):
        cases.run(inputs, routed_scaling_factor=0.0)
    with pytest.raises(InvalidArgument, match=r"'routed_scaling_factor': expected 1\.0 with the router"):
        cases.run(inputs, apply_router_weight_on_input=True)


def test_the_plans_say_what_only_the_portable_kernels_know() -> None:
    """No combining and scales found inside run on the SM90 kernels; the rest names what it is."""

    def key(**fields: Any) -> plan.Key:
        return plan.Key(**{**KEY, **fields})

    assert plan.analytic(key(combined=False)).backend == "sm90"
    assert plan.analytic(key(combined=False, num_tokens=1)).backend == "sm90"
    assert plan.analytic(key(num_tokens=1)).backend == "tiny"
    dynamic = cases.key_of(make("cpu", "tensor", bf16_input=True, static=False))
    assert (
        dynamic.block_scales
        and plan.analytic(replace(dynamic, sm90=True, hardware_fp8=True)).backend == "sm90"
    )
    for fields, words in (
        ({"bf16_weights": True, "bf16_input": True}, "BF16 weights"), ({"up_bias": True}, "a bias"),
        ({"dynamic_act": True}, "scales found inside for the activations"),
        ({"weight_on_input": True}, "the router's weight"),
    ):  # fmt: skip
        for tokens in (1, 64):
            assert plan.analytic(key(num_tokens=tokens, **fields)).backend == "portable"
            why = plan.is_legal(plan.analytic(key(num_tokens=tokens)), key(num_tokens=tokens, **fields))
            assert why is not None and "portable" in why and words in why


KEY: dict[str, Any] = {
    "num_tokens": 64, "top_k": 8, "num_experts": 128, "experts_total": 128, "hidden": 4096, "inter": 192,
    "block_scales": False, "bf16_mul": True, "sms": 132, "sm90": True, "hardware_fp8": True,
}  # fmt: skip


@pytest.mark.gpu
@KIND
@pytest.mark.parametrize("tokens", [1, 33, 260, 900])
def test_uncombined_on_plans_of_each_kind(kind: str, tokens: int, device: torch.device) -> None:
    """The down product writes the result itself: the SM90 kernels of few and of many rows, and the portable ones."""
    inputs = make("cuda", kind, tokens=tokens, experts=16, hidden=512, top_k=4, ranks=2, no_combine=True)
    want = cases.reference(inputs)
    offered = plan.alternatives(cases.key_of(inputs))
    plans = {name: offered[name] for name in ("portable", "pair 64", "two") if name in offered}
    for name, chosen in {"choice": None, **plans}.items():
        out = torch.full(want.shape, torch.nan, dtype=torch.bfloat16, device=device)
        assert_close(cases.run(inputs, plan=chosen, output=out), want, cases.tolerance(inputs.params), name)


@pytest.mark.gpu
def test_options_in_a_graph(device: torch.device) -> None:
    """Captured, then replayed with other activations and ids."""
    for kind in ("tensor", "block", "bf16"):
        inputs = make("cuda", kind, bias="bfloat16", no_combine=True)
        for _ in range(2):
            cases.run(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cases.run(inputs)
        other = cases.make_inputs(replace(inputs.params, routing="invalid"), device, 8)
        inputs.topk_ids.copy_(other.topk_ids)
        inputs.x.view(torch.uint8).copy_(other.x.view(torch.uint8))
        if inputs.x_scale is not None and other.x_scale is not None:
            inputs.x_scale.copy_(other.x_scale)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, cases.reference(inputs), cases.tolerance(inputs.params))
