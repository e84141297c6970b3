"""The split of weights and the routers of four models, by hand; the cache of splits."""

from __future__ import annotations

import math

import pytest
import torch

import hpc
from hpc.gemm.router import cases, cases_topk
from hpc.gemm.router.reference import (
    deepseek_v3,
    gemm_reference,
    hunyuan_v3,
    longcat_flash,
    qwen3,
    split_reference,
    topk_reference,
)


def restored(weight: torch.Tensor, terms: int) -> torch.Tensor:
    return sum(part.double() / 256.0**i for i, part in enumerate(split_reference(weight, 1 / 256, terms)))  # type: ignore[return-value]


# --- the split --------------------------------------------------------------------------------------


def test_fr_59_parts_give_the_weight_back() -> None:
    """Two parts to 2^-17 of normal weights, three exactly; nothing overflows, signs stay."""
    tiny = torch.finfo(torch.float32).tiny
    hand = [
        1.0,
        1 + 2.0**-9,
        -(1 + 2.0**-9),
        3e38,
        -3e38,
        1e4,
        -1e4,
        -0.0,
        0.0,
        3.0,
        tiny,
        1e-30,
        math.pi,
        2.0**-126,
    ]
    drawn = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(
        -36, 37, 4000
    )
    weight = torch.cat([torch.tensor(hand), drawn])[None]
    for terms, bound in ((2, 2.0**-17), (3, 0.0)):
        back = restored(weight, terms)
        normal = weight.abs() >= tiny * 2.0 ** (
            0 if terms == 2 else 24
        )  # the rest of the rest needs room below
        error = (back - weight.double()).abs()
        assert torch.isfinite(back).all()
        assert (error[normal] <= bound * weight.double().abs()[normal]).all()


def test_fr_59_exact_bf16_weights_have_no_low_part() -> None:
    weight = torch.randn(8, 40).bfloat16().float()
    high, low = split_reference(weight, 1 / 256, 2)
    assert torch.equal(high.float(), weight) and not low.any()


def test_fr_59_weights_beyond_bf16_stay_finite() -> None:
    largest = torch.finfo(torch.float32).max
    weight = torch.tensor([[largest, -largest, 3.395e38]])
    for terms in (2, 3):
        back = restored(weight, terms)
        assert torch.isfinite(back).all()
        assert ((back - weight.double()).abs() <= 2.0**-15 * weight.double().abs()).all()


@pytest.mark.parametrize(("n", "k"), [(64, 64), (192, 64), (100, 100)])
def test_fr_59_identity_reads_the_weight_back(n: int, k: int) -> None:
    weight = torch.randn(n, k)
    high, low = hpc.split_router_weight(weight).parts
    out = hpc.gemm_bf16xfp32(torch.eye(k).bfloat16(), high, low, 1 / 256, True)
    assert ((out.T - weight).abs() <= 2.0**-15 * weight.abs()).all()


def test_splits_are_kept_and_renewed() -> None:
    weight = torch.randn(16, 32)
    first = hpc.split_router_weight(weight)
    assert hpc.split_router_weight(weight) is first
    assert hpc.split_router_weight(weight, terms=3) is not first
    assert hpc.split_router_weight(weight) is first, "kept beside the one with three parts"
    weight[0, 0] = 5.0
    second = hpc.split_router_weight(weight)
    assert second is not first and float(second.high[0, 0]) == 5.0
    weight.data = torch.ones(16, 32)
    assert torch.equal(hpc.split_router_weight(weight).high, torch.ones(16, 32).bfloat16())
    parameter = torch.nn.Parameter(torch.randn(4, 8))
    assert not hpc.split_router_weight(parameter).high.requires_grad
    with torch.inference_mode():
        loose = torch.randn(4, 8)
        one = hpc.split_router_weight(loose)
        loose.add_(1.0)
        assert not torch.equal(hpc.split_router_weight(loose).high, one.high), (
            "no writes are counted: never kept"
        )


# --- the product ------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [2, 3])
def test_reference_on_a_cpu(terms: int) -> None:
    inputs = cases.make_inputs(cases.RouterCase(5, 20, 300, terms=terms, pad=3), "cpu", 0)
    case = cases.Case("x", frozenset(), inputs.params)
    out, want = cases.OPERATOR.call(inputs), cases.OPERATOR.reference(inputs)
    assert ((out.double() - want).norm() / want.norm()) <= cases.OPERATOR.tolerance(case).rms


def test_tolerances_fail_the_next_worse_formulation() -> None:
    """Two parts are too little for the limit of three; a product by the high part is too little for that of two."""
    inputs = cases.make_inputs(cases.RouterCase(64, 64, 4096, terms=3), "cpu", 1)
    want = cases.OPERATOR.reference(inputs)
    for count in (1, 2):
        less = gemm_reference(inputs.x, inputs.parts[:count], 1 / 256)
        assert ((less - want).norm() / want.norm()) > cases.TOLERANCES[count + 1].rms


# --- the routers ------------------------------------------------------------------------------------


def test_deepseek_v3_by_hand() -> None:
    """Groups by the sum of their best two scores with bias; weights without it, renormalised, times 2.5."""
    logits, bias = torch.zeros(1, 256, dtype=torch.float64), torch.zeros(256, dtype=torch.float64)
    for group in (1, 3, 5, 7):
        logits[0, group * 32 + 1], logits[0, group * 32 + 9] = 2.0 + 0.1 * group, 1.0
    logits[0, 0] = 2.5  # the best of its group, whose second is ordinary: the sum is below the others'
    bias[2 * 32] = 0.01
    weights, ids = deepseek_v3(logits, bias)
    assert sorted(ids[0].tolist()) == sorted(g * 32 + o for g in (1, 3, 5, 7) for o in (1, 9))
    assert ids[0, 0] == 7 * 32 + 1
    assert float(weights.sum()) == pytest.approx(2.5)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    weights, ids = hunyuan_v3(torch.cat([logits, logits - 9], 1), torch.cat([bias, bias - 9]), 1.0)
    assert ids[0, 0] == 0
    assert float(weights[0, 0]) < float(weights[0, 1])


def test_qwen3_renormalises_a_softmax() -> None:
    logits = torch.randn(5, 128, dtype=torch.float64)
    weights, ids = qwen3(logits)
    top = logits.topk(8, -1)
    assert torch.equal(ids.long(), top.indices)
    torch.testing.assert_close(weights, top.values.softmax(-1))


def test_longcat_zero_experts() -> None:
    """Ids from 512 on pass x through: id -1, weight 0, their weight in the third result."""
    logits = torch.full((1, 768), -5.0, dtype=torch.float64)
    logits[0, [3, 600, 700]] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    weights, ids, zero = longcat_flash(logits, torch.zeros(768, dtype=torch.float64))
    assert ids[0, :3].tolist() == [-1, -1, 3] and weights[0, :2].tolist() == [0.0, 0.0]
    scores = logits.softmax(-1)[0] * 6.0
    assert float(zero[0]) == pytest.approx(float(scores[600] + scores[700]))
    assert float(weights[0, 2]) == pytest.approx(float(scores[3]))


@pytest.mark.parametrize("model", cases_topk.ROUTERS)
def test_public_function_on_a_cpu(model: str) -> None:
    inputs = cases_topk.make_inputs(cases_topk.TopKCase(model, 4, 64), "cpu", 2)
    got, want = cases_topk.route(inputs), cases_topk.expected(inputs)
    assert got[1].dtype == torch.int32 and torch.equal(got[1].long(), want[1].long())
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-4, atol=1e-6)


def test_fp32_weight_is_split_on_the_way() -> None:
    inputs = cases_topk.make_inputs(cases_topk.TopKCase("Qwen3-235B", 4, 64), "cpu", 3)
    a = hpc.router_topk(inputs.x, inputs.weight, 8, renormalize=True)
    b = cases_topk.route(inputs)
    assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def test_ties_go_to_the_lower_id() -> None:
    _, ids, _ = topk_reference(torch.zeros(1, 10, dtype=torch.float64), 3)
    assert ids.tolist() == [[0, 1, 2]]
