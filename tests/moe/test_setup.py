"""Padding of weights and the size of the scratch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hpc
from hpc.common.errors import InvalidArgument, InvalidDtype
from hpc.moe import cases
from hpc.moe.case_lists import MoeCase
from hpc.testing import assert_close


@pytest.mark.parametrize(("inter", "hidden"), [(24, 128), (80, 160), (64, 72), (64, 128)])
def test_padding_gives_the_unpadded_result(inter: int, hidden: int) -> None:
    """Against the reference on the weights as they were: bit for bit, since only zeros are added."""
    inputs = cases.make_inputs(MoeCase(5, 3, hidden, inter, top_k=2), "cpu", 1)
    w13, w2 = hpc.pad_moe_weights(inputs.w13, inputs.w2)
    grown = w2.shape[1]
    assert w13.shape == (3, 2 * w2.shape[2], grown) and w2.shape[2] % 64 == 0 and grown % 64 == 0
    assert w13.is_contiguous() and w2.is_contiguous()
    x = torch.nn.functional.pad(inputs.x.view(torch.uint8), (0, grown - hidden)).view(torch.float8_e4m3fn)
    out = cases.run(replace(inputs, x=x, w13=w13, w2=w2))
    assert not out[:, hidden:].any()
    expected = cases.reference(inputs)
    torch.testing.assert_close(
        out[:, :hidden].double(), expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max())
    )


def test_padding_of_biases_goes_with_that_of_weights() -> None:
    """Whatever the gate: padded gate columns are 0, and so are their products."""
    params = MoeCase(5, 3, 160, 24, top_k=2, bf16_weights=True, bias="float32", swiglu_alpha=1.7)
    inputs = cases.make_inputs(params, "cpu", 1)
    assert inputs.w13_bias is not None and inputs.w2_bias is not None
    w13, w2 = hpc.pad_moe_weights(inputs.w13, inputs.w2)
    b13, b2 = hpc.pad_moe_biases(inputs.w13_bias, inputs.w2_bias)
    assert b13.shape == (3, 128) and b2.shape == (3, 192) and b13.dtype == torch.float32
    x = torch.nn.functional.pad(inputs.x, (0, 32))
    out = cases.run(replace(inputs, x=x, w13=w13, w2=w2, w13_bias=b13, w2_bias=b2))
    assert not out[:, 160:].any()
    assert_close(out[:, :160], cases.reference(inputs), cases.tolerance(params))
    assert hpc.pad_moe_biases(b13, b2) == (b13, b2)
    with pytest.raises(InvalidArgument, match="2 I columns"):
        hpc.pad_moe_biases(b13[:, :5], b2)


@pytest.mark.parametrize("kind", ["tensor", "block", "bf16"])
def test_weights_are_checked_at_load(kind: str) -> None:
    """The call's errors, by the weights' names, before there is an x."""

    def check(hidden: int, inter: int, **changes: torch.Tensor | None) -> None:
        params = MoeCase(
            1, 2, hidden, inter, top_k=1, block=kind == "block", bf16_weights=kind == "bf16", bias="bfloat16"
        )
        i = cases.make_inputs(params, "cpu", 0)
        given = {
            "gate_up_weight": i.w13, "down_weight": i.w2, "gate_up_scale": i.w13_scale, "down_scale": i.w2_scale,
            "gate_up_bias": i.w13_bias, "down_bias": i.w2_bias,
        }  # fmt: skip
        hpc.check_moe_weights(**{**given, **changes})  # type: ignore[arg-type]

    check(128, 80)
    with pytest.raises(
        InvalidArgument, match=r"'gate_up_weight': .*H a multiple of 64; got H = 96.*pad_moe_weights"
    ):
        check(96, 64)
    with pytest.raises(
        InvalidArgument, match=r"'gate_up_weight': .*multiple of 16; got 144 rows.*pad_moe_weights"
    ):
        check(128, 72)
    with pytest.raises(InvalidArgument, match="'down_bias': expected shape"):
        check(128, 64, down_bias=torch.zeros(2, 64))
    with pytest.raises(InvalidDtype, match="'down_weight': expected dtype"):
        check(128, 64, down_weight=torch.zeros(2, 128, 64))
    if kind == "bf16":
        with pytest.raises(InvalidArgument, match="'down_scale': expected None for BF16"):
            check(128, 64, down_scale=torch.ones(2))
    else:
        with pytest.raises(InvalidDtype, match=r"'(down|gate_up)(_weight)?_scale': expected a torch.Tensor"):
            check(128, 64, down_scale=None)


def test_weights_that_fit_are_returned_as_they_are() -> None:
    inputs = cases.make_inputs(MoeCase(1, 2, 128, 64, top_k=1), "cpu", 0)
    w13, w2 = hpc.pad_moe_weights(inputs.w13, inputs.w2)
    assert w13 is inputs.w13 and w2 is inputs.w2


def test_block_scales_keep_their_intermediate_size() -> None:
    inputs = cases.make_inputs(MoeCase(1, 2, 72, 80, top_k=1), "cpu", 0)
    with pytest.raises(InvalidArgument, match=r"a divisor of I = 80 with block scales.*Split experts"):
        hpc.pad_moe_weights(inputs.w13, inputs.w2, block_scales=True)
    w13, w2 = hpc.pad_moe_weights(inputs.w13, inputs.w2, inter_multiple=16, block_scales=True)
    assert w13.shape == (2, 160, 128) and w2.shape == (2, 128, 80)


def test_bad_weights_are_refused() -> None:
    inputs = cases.make_inputs(MoeCase(1, 2, 128, 64, top_k=1), "cpu", 0)
    with pytest.raises(InvalidArgument, match="'down_weight': expected shape"):
        hpc.pad_moe_weights(inputs.w13, inputs.w13)
    with pytest.raises(InvalidDtype, match="'down_weight'"):
        hpc.pad_moe_weights(inputs.w13, inputs.w2.float())
    with pytest.raises(InvalidArgument, match="2 I rows"):
        hpc.pad_moe_weights(inputs.w13[:, :127], inputs.w2)


def test_scratch_follows_the_tokens_and_stays_bounded() -> None:
    sizes = [hpc.get_fuse_moe_scratch_size(t, 8, 4096, 1536, 24) for t in (0, 1, 64, 1024, 8192, 10**6)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert sizes[-1] < 700 * 2**20
    many = hpc.get_fuse_moe_scratch_size(80000, 8, 7168, 2048, 16, 256)
    assert many < 700 * 2**20, "not sized by all ranks' rows"
    wide = hpc.get_fuse_moe_scratch_size(64, 8, 4096, 1536, 24, bf16_weights=True)
    assert (
        wide
        > hpc.get_fuse_moe_scratch_size(64, 8, 4096, 1536, 24, bf16_weights=True, no_combine=True)
        + 2 * 512 * 4096
        - 1
    )
    assert hpc.get_fuse_moe_scratch_size(64, 8, 4096, 1536, 24, bf16_input=True) >= sizes[2] + 64 * 4096
    with pytest.raises(InvalidArgument, match="intermediate_size"):
        hpc.get_fuse_moe_scratch_size(1, 8, 4096, 100, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [False, True])
def test_size_is_what_a_call_allocates(block: bool, device: torch.device) -> None:
    params = MoeCase(300, 16, 512, 192, top_k=4, block=block)
    inputs = cases.make_inputs(params, device, 0)
    out = cases.run(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cases.run(inputs, output=out)
    used = torch.cuda.max_memory_allocated() - before
    size = hpc.get_fuse_moe_scratch_size(300, 4, 512, 192, 16, 16, block_scales=block)
    assert size <= used <= size + 512
