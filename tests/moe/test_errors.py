"""Bad input is refused before a launch, with function, argument, expected, got and remedy; empty input is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpc
from hpc.common.errors import InvalidArgument, InvalidDtype
from hpc.moe import cases
from hpc.moe.case_lists import MoeCase

TENSOR = (
    "x", "gate_up_weight", "down_weight", "gate_up_scale", "down_scale", "act_and_mul_scale", "topk_ids", "topk_scale",
)  # fmt: skip
BLOCK = (
    "x", "x_scale", "gate_up_weight", "gate_up_weight_scale", "down_weight", "down_weight_scale", "topk_ids",
    "topk_scale",
)  # fmt: skip


def good(block: bool, device: torch.device | str = "cpu", **fields: Any) -> dict[str, Any]:
    """Arguments of a small right call by name."""
    base: dict[str, Any] = {"tokens": 3, "experts": 4, "hidden": 128, "inter": 64, "top_k": 2, "block": block}
    i = cases.make_inputs(MoeCase(**{**base, **fields}), device, 0)
    tensors = (
        (i.x, i.x_scale, i.w13, i.w13_scale, i.w2, i.w2_scale, i.topk_ids, i.topk_scale)
        if block
        else (i.x, i.w13, i.w2, i.w13_scale, i.w2_scale, i.act_scale, i.topk_ids, i.topk_scale)
    )
    named = dict(zip(BLOCK if block else TENSOR, tensors, strict=True))
    return {**named, "rank_ep": 0, "num_expert_total": 4}


def function(block: bool) -> Callable[..., torch.Tensor]:
    return hpc.fuse_moe_blockwise if block else hpc.fuse_moe


Change = Callable[[dict[str, Any]], Any]
# (scales, argument, what it becomes, exception, words of the message)
BAD: dict[str, tuple[bool, str, Change, type[Exception], str]] = {
    "x in fp16": (False, "x", lambda a: a["x"].half(), InvalidDtype, "float8_e4m3fn or bfloat16"),
    "a scale for e4m3 x": (False, "input_scale", lambda a: torch.ones(1), InvalidArgument, "None for e4m3 x"),
    "no token scales for e4m3 x": (True, "x_scale", lambda a: None, InvalidDtype, "a torch.Tensor"),
    "another activation": (False, "activation", lambda a: "relu", InvalidArgument, "silu, gelu"),
    "a limit of zero": (True, "swiglu_limit", lambda a: 0.0, InvalidArgument, "positive"),
    "alpha as a tensor": (False, "swiglu_alpha", lambda a: torch.ones(1), InvalidArgument, "positive"),
    "x 1-D": (False, "x", lambda a: a["x"][0], InvalidArgument, "2 dimensions"),
    "x strided": (False, "x", lambda a: a["x"].t().contiguous().t(), InvalidArgument, "contiguous"),
    "weight in bf16": (
        False, "gate_up_weight", lambda a: a["gate_up_weight"].bfloat16(), InvalidDtype, "float8.*fuse_moe_bf16",
    ),
    "bias in fp16": (False, "gate_up_bias", lambda a: torch.zeros(4, 128).half(), InvalidDtype, "bfloat16 or float32"),
    "bias of one half": (True, "gate_up_bias", lambda a: torch.zeros(4, 64), InvalidArgument, r"\[4, 128\]"),
    "bias strided": (False, "down_bias", lambda a: torch.zeros(128, 4).t(), InvalidArgument, "contiguous"),
    "no combine as a number": (False, "no_combine", lambda a: 1, InvalidArgument, "a bool"),
    "weight on input as None": (True, "apply_router_weight_on_input", lambda a: None, InvalidArgument, "a bool"),
    "weight of another hidden size": (
        False, "gate_up_weight", lambda a: torch.zeros(4, 128, 64, dtype=torch.float8_e4m3fn), InvalidArgument, "shape",
    ),
    "down weight transposed": (
        False, "down_weight", lambda a: torch.zeros(4, 64, 128, dtype=torch.float8_e4m3fn), InvalidArgument, "E, H, I",
    ),
    "ids in int64": (False, "topk_ids", lambda a: a["topk_ids"].long(), InvalidDtype, "int32"),
    "ids of other tokens": (False, "topk_ids", lambda a: a["topk_ids"][:2], InvalidArgument, "shape"),
    "weights in bf16": (True, "topk_scale", lambda a: a["topk_scale"].bfloat16(), InvalidDtype, "float32"),
    "too many experts a token": (
        False, "topk_ids", lambda a: torch.zeros(3, 129, dtype=torch.int32), InvalidArgument, "1 to 128",
    ),
    "scale a tensor": (False, "gate_up_scale", lambda a: torch.ones(1), InvalidArgument, r"\[4\]"),
    "two activation scales": (False, "act_and_mul_scale", lambda a: torch.ones(2), InvalidArgument, "one float32"),
    "token scales in fp64": (True, "x_scale", lambda a: a["x_scale"].double(), InvalidDtype, "float32"),
    "token scales column-major": (
        True, "x_scale", lambda a: torch.ones(2, 3).t(), InvalidArgument, "shape|contiguous",
    ),
    "block scales of too few rows": (
        True, "gate_up_weight_scale", lambda a: a["gate_up_weight_scale"][:, :0].contiguous(), InvalidArgument, "shape",
    ),
    "block scales of too many columns": (
        True, "down_weight_scale", lambda a: torch.ones(4, 1, 8), InvalidArgument, "128x128",
    ),
    "shared output in fp32": (False, "shared_output", lambda a: torch.zeros(3, 128), InvalidDtype, "bfloat16"),
    "shared output of other tokens": (
        True, "shared_output", lambda a: torch.zeros(4, 128).bfloat16(), InvalidArgument, "shape",
    ),
    "output in fp32": (False, "output", lambda a: torch.zeros(3, 128), InvalidDtype, "bfloat16"),
    "output transposed": (False, "output", lambda a: torch.zeros(128, 3).bfloat16().t(), InvalidArgument, "stride 1"),
    "negative rank": (False, "rank_ep", lambda a: -1, InvalidArgument, "integer"),
    "rank as a tensor": (True, "rank_ep", lambda a: torch.tensor(0), InvalidArgument, "integer"),
    "negative total": (False, "num_expert_total", lambda a: -4, InvalidArgument, ">= 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name: str) -> None:
    block, argument, change, kind, words = BAD[name]
    arguments = good(block)
    arguments[argument] = change(arguments)
    public = function(block)
    with pytest.raises(kind, match=words) as caught:
        public(**arguments)
    text = str(caught.value)
    assert text.startswith(f"hpc.{public.__name__}: argument '{argument}': expected "), text
    assert "; got " in text


def test_arguments_that_exclude_one_another() -> None:
    tensor, block = good(False), good(True)
    with pytest.raises(
        InvalidArgument, match=r"'routed_scaling_factor': expected 1\.0 with no_combine; got 2\.5"
    ):
        hpc.fuse_moe(**tensor, no_combine=True, routed_scaling_factor=2.5)
    shared = torch.zeros(3, 128, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="'shared_output': expected None with no_combine"):
        hpc.fuse_moe_blockwise(**block, no_combine=True, shared_output=shared)
    with pytest.raises(InvalidArgument, match=r"'output': expected shape \[3, 2, 128\]; got \[3, 128\]"):
        hpc.fuse_moe(**tensor, no_combine=True, output=shared)
    with pytest.raises(InvalidArgument, match="'output': expected shape"):
        hpc.fuse_moe(**tensor, output=torch.zeros(3, 2, 128, dtype=torch.bfloat16))
    with pytest.raises(InvalidDtype, match=r"'x': expected dtype bfloat16; got float8_e4m3fn"):
        hpc.fuse_moe_bf16(*(tensor[name] for name in (*TENSOR[:3], *TENSOR[6:])), 0, 4)
    with pytest.raises(
        InvalidArgument, match="'input_scale': expected a scale for BF16 x beside act_and_mul_scale"
    ):
        hpc.fuse_moe(**{**tensor, "x": tensor["x"].to(torch.bfloat16)})
    with pytest.raises(InvalidArgument, match="'x_scale': expected None for BF16 x"):
        hpc.fuse_moe_blockwise(**{**block, "x": block["x"].to(torch.bfloat16)})
    with pytest.raises(InvalidArgument, match="'swiglu_alpha': expected None with this activation"):
        hpc.fuse_moe(**tensor, activation="gelu", swiglu_alpha=1.7)


@pytest.mark.parametrize(("inter", "hidden"), [(72, 128), (64, 96)])
def test_sizes_that_cannot_be_name_a_remedy(inter: int, hidden: int) -> None:
    """What a loader can do about it is part of the message."""
    arguments = good(False)
    arguments["x"] = torch.zeros(3, hidden, dtype=torch.float8_e4m3fn)
    arguments["gate_up_weight"] = torch.zeros(4, 2 * inter, hidden, dtype=torch.float8_e4m3fn)
    arguments["down_weight"] = torch.zeros(4, hidden, inter, dtype=torch.float8_e4m3fn)
    with pytest.raises(InvalidArgument, match=r"multiple of (16|64).*Pad the weights"):
        hpc.fuse_moe(**arguments)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_no_tokens(block: bool, given: bool) -> None:
    """An empty batch gives an empty result, of the caller's buffer if there is one."""
    arguments = good(block, tokens=0)
    output = torch.empty(0, 128, dtype=torch.bfloat16) if given else None
    out = function(block)(**arguments, output=output)
    assert out.shape == (0, 128) and out.dtype == torch.bfloat16
    assert output is None or out is output


@pytest.mark.parametrize("block", [False, True])
def test_total_of_zero_and_wrong_totals_change_nothing(block: bool) -> None:
    """num_expert_total decides tile sizes only."""
    arguments = good(block)
    expected = function(block)(**arguments)
    for total in (0, 1, 1024):
        assert torch.equal(function(block)(**{**arguments, "num_expert_total": total}), expected)


def test_the_functions_without_output_are_the_same() -> None:
    tensor, block = good(False), good(True)
    assert torch.equal(hpc.fuse_moe(**tensor), hpc.fuse_moe_pertensor_fp8(**tensor))
    assert torch.equal(hpc.fuse_moe_blockwise(**block), hpc.fuse_moe_blockwise_fp8(**block))
    with pytest.raises(InvalidDtype, match=r"hpc\.fuse_moe_blockwise_fp8: argument 'x'"):
        hpc.fuse_moe_blockwise_fp8(**{**block, "x": block["x"].float()})


def test_positional_order_of_the_engine() -> None:
    """Ten positional arguments, as SGLang calls."""
    tensor, block = good(False), good(True)
    assert torch.equal(hpc.fuse_moe(*tensor.values()), hpc.fuse_moe(**tensor))
    assert torch.equal(hpc.fuse_moe_blockwise(*block.values()), hpc.fuse_moe_blockwise(**block))


@pytest.mark.gpu
def test_devices_must_agree(device: torch.device) -> None:
    arguments = good(False, device)
    arguments["topk_ids"] = arguments["topk_ids"].cpu()
    with pytest.raises(RuntimeError, match="'topk_ids': expected device cuda"):
        hpc.fuse_moe(**arguments)
