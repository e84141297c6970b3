"""What must hold for odd inputs, on the reference and on the GPU: zeros, tiny, non-finite values, odd ids and sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hpc.moe import cases
from hpc.moe.case_lists import MoeCase
from hpc.moe.cases import MoeInputs
from hpc.testing import assert_close

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BLOCK = pytest.mark.parametrize("block", [False, True])
TOKENS = pytest.mark.parametrize("tokens", [2, 9])  # two kernels on a GPU


def make(where: str, tokens: int, block: bool, seed: int = 0, **fields: Any) -> MoeInputs:
    base: dict[str, Any] = {"experts": 4, "hidden": 256, "inter": 192, "top_k": 2}
    return cases.make_inputs(MoeCase(tokens, block=block, **{**base, **fields}), where, seed)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@HERE
@BLOCK
@TOKENS
def test_an_all_zero_row_gives_zeros(where: str, block: bool, tokens: int) -> None:
    """No division of zero by a scale of zero."""
    inputs = make(where, tokens, block)
    expected = cases.run(inputs).clone()
    bits(inputs.x)[1] = 0
    if inputs.x_scale is not None:
        inputs.x_scale[1] = 0
    out = cases.run(inputs)
    assert (out[1] == 0).all()
    assert same(out[0], expected[0])


@HERE
@TOKENS
def test_activations_of_zero(where: str, tokens: int) -> None:
    """Up rows of zero: silu(g) * 0, a 128-column group without a largest value."""
    inputs = make(where, tokens, True)
    bits(inputs.w13)[:, 192:] = 0
    assert (cases.run(inputs) == 0).all()


@HERE
@TOKENS
def test_a_dormant_expert_harms_nobody(where: str, tokens: int) -> None:
    """Activations near 1e-37, whose reciprocal overflows: finite, and the other expert's part is left."""
    inputs = make(where, tokens, True, experts=2)
    inputs.w13_scale[0] *= 1e-19
    inputs.topk_ids.copy_(torch.tensor([0, 1], dtype=torch.int32).expand(tokens, 2))
    out = cases.run(inputs)
    alone = inputs.topk_ids.clone()
    alone[:, 0] = -1
    assert torch.isfinite(out.float()).all()
    assert same(out, cases.run(replace(inputs, topk_ids=alone)))


@HERE
@BLOCK
@TOKENS
def test_nan_stays_in_its_row(where: str, block: bool, tokens: int) -> None:
    inputs = make(where, tokens, block, bf16_input=True)
    expected = cases.run(inputs).clone()
    inputs.x[1, 5] = torch.nan
    out = cases.run(inputs)
    assert out[1].isnan().any()
    others = [t for t in range(tokens) if t != 1]
    assert same(out[others], expected[others])


@HERE
@BLOCK
@TOKENS
def test_infinity_stays_in_its_row(where: str, block: bool, tokens: int) -> None:
    """e4m3 has no infinity: per tensor it saturates, with block scales its row becomes NaN."""
    inputs = make(where, tokens, block, bf16_input=True)
    expected = cases.run(inputs).clone()
    inputs.x[0, 3] = torch.inf
    out = cases.run(inputs)
    assert out[0].isnan().any() == block
    assert same(out[1:], expected[1:])


@HERE
@BLOCK
@TOKENS
def test_expert_zero_counts(where: str, block: bool, tokens: int) -> None:
    """Id 0 is an expert like any other, and on rank 1 its first local expert has another id."""
    inputs = make(where, tokens, block, top_k=1)
    inputs.topk_ids.zero_()
    inputs.topk_scale.fill_(1.0)
    out = cases.run(inputs)
    assert_close(out, cases.reference(inputs), cases.tolerance(inputs.params))
    assert (out != 0).any()
    shifted = replace(inputs, params=replace(inputs.params, ranks=2, rank=1), topk_ids=inputs.topk_ids + 4)
    assert same(cases.run(shifted), out)


@HERE
@BLOCK
@TOKENS
def test_nobodys_pairs(where: str, block: bool, tokens: int) -> None:
    """-1, ids past the end and extreme ids add nothing, whatever their weight; alone they give shared_output."""
    inputs = make(where, tokens, block, shared=True)
    expected = cases.run(inputs).clone()
    ids = torch.cat([inputs.topk_ids, inputs.topk_ids.new_tensor([[-1, 4, 2**31 - 1]]).expand(tokens, 3)], 1)
    weights = torch.cat([inputs.topk_scale, torch.full((tokens, 3), torch.nan, device=where)], 1)
    more = replace(inputs, topk_ids=ids.contiguous(), topk_scale=weights.contiguous())
    assert same(cases.run(more), expected)
    nobody = replace(inputs, topk_ids=torch.full_like(inputs.topk_ids, -1))
    assert inputs.shared_output is not None
    assert same(cases.run(nobody), inputs.shared_output)


@HERE
@TOKENS
def test_padding_of_scales_is_not_read(where: str, tokens: int) -> None:
    """Pad columns hold NaN in every case; here with another finite value the bits must be the same."""
    inputs = make(where, tokens, True)
    expected = cases.run(inputs).clone()
    for scale, used in ((inputs.w13_scale, 2), (inputs.w2_scale, 2)):
        scale[:, :, used:] = 1e30
    assert same(cases.run(inputs), expected)


@HERE
@BLOCK
@TOKENS
def test_bf16_activations_equal_quantised_ones(where: str, block: bool, tokens: int) -> None:
    """Quantising inside is the reference's quantisation in front."""
    from hpc.moe.reference import quantise_input

    inputs = make(where, tokens, block, bf16_input=True, hidden=320)
    q, scale = quantise_input(inputs.x, inputs.input_scale)
    before = replace(inputs, x=q.contiguous(), x_scale=scale, input_scale=None)
    assert_close(cases.run(inputs), cases.reference(before), cases.tolerance(inputs.params))


@HERE
def test_very_small_bf16_rows(where: str) -> None:
    """Groups below the smallest scale flush to zero instead of dividing by it."""
    inputs = make(where, 3, True, bf16_input=True)
    inputs.x[1] = 1e-30
    out = cases.run(inputs)
    assert torch.isfinite(out.float()).all()


@HERE
@BLOCK
def test_scaling_happens_before_the_shared_output(where: str, block: bool) -> None:
    inputs = make(where, 5, block, shared=True)
    plain = cases.run(replace(inputs, shared_output=None)).double()
    out = cases.run(inputs, routed_scaling_factor=2.5).double()
    assert inputs.shared_output is not None
    expected = 2.5 * plain + inputs.shared_output.double()
    torch.testing.assert_close(out, expected, rtol=1.2e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [
    [250, 89, 0, 0, 0, 0, 0, 36, 31, 0, 2, 1, 77, 0, 0, 14],
    [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0, 0],
    [0] * 15 + [130],
    [130] + [0] * 15,
])  # fmt: skip
@BLOCK
def test_uneven_groups(counts: list[int], block: bool) -> None:
    """Empty experts beside huge ones, and every number of rows around a tile."""
    tokens = sum(counts)
    inputs = make("cuda", tokens, block, experts=16, top_k=1, hidden=512, inter=512)
    ids = torch.repeat_interleave(torch.arange(16), torch.tensor(counts))[torch.randperm(tokens)]
    inputs = replace(inputs, topk_ids=ids.to("cuda", torch.int32).view(-1, 1))
    assert_close(cases.run(inputs), cases.reference(inputs), cases.tolerance(inputs.params))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1024, 2047, 2048, 2049])
@BLOCK
def test_averages_at_tile_boundaries(tokens: int, block: bool) -> None:
    inputs = make("cuda", tokens, block, experts=128, top_k=8, hidden=512, inter=512)
    ids = torch.arange(tokens * 8).remainder(128).view(tokens, 8).to("cuda", torch.int32)
    inputs = replace(inputs, topk_ids=ids)
    assert_close(cases.run(inputs), cases.reference(inputs), cases.tolerance(inputs.params))


@pytest.mark.gpu
def test_more_tokens_than_one_pass() -> None:
    """512 experts, top-22, more rows than a launch grid of old had: passes over the tokens."""
    inputs = make("cuda", 40000, False, experts=512, top_k=22, hidden=128, inter=128)
    out = cases.run(inputs)
    part = torch.arange(0, 40000, 997, device="cuda")
    few = replace(inputs, x=inputs.x[part].contiguous(), topk_ids=inputs.topk_ids[part].contiguous(),
                  topk_scale=inputs.topk_scale[part].contiguous())  # fmt: skip
    assert_close(out[part], cases.reference(few), cases.tolerance(inputs.params))
