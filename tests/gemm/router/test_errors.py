"""Bad input is refused before anything runs, with one text. Off a GPU the reference runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpc
from hpc.common.errors import InvalidArgument, InvalidDtype
from hpc.gemm.router.plan import Plan

X = torch.randn(6, 64).bfloat16()
W = torch.randn(12, 64)
SPLIT = hpc.split_router_weight(W)
HIGH, LOW = SPLIT.parts


def gemm(**changes: Any) -> torch.Tensor:
    given: dict[str, Any] = {"x": X, "w_high": HIGH, "w_low": LOW, "scale": 1 / 256, "use_fp32_output": True}
    return hpc.gemm_bf16xfp32(**{**given, **changes})


def topk(**changes: Any) -> tuple[torch.Tensor, ...]:
    given: dict[str, Any] = {"x": X, "weight": SPLIT, "top_k": 4}
    return hpc.router_topk(**{**given, **changes})


BAD: list[tuple[str, Callable[..., Any], dict[str, Any], str, type[Exception]]] = [
    ("no tensor", gemm, {"x": [1.0]}, "x", InvalidDtype),
    ("x fp32", gemm, {"x": X.float()}, "x", InvalidDtype),
    ("weight fp32", gemm, {"w_high": W}, "w_high", InvalidDtype),
    ("x 1-D", gemm, {"x": X[0]}, "x", InvalidArgument),
    ("k differs", gemm, {"x": X[:, :32]}, "w_high", InvalidArgument),
    ("parts differ", gemm, {"w_low": LOW[:8]}, "w_low", InvalidArgument),
    ("third differs", gemm, {"w_third": LOW[:8]}, "w_third", InvalidArgument),
    ("transposed x", gemm, {"x": torch.randn(64, 6).bfloat16().T}, "x", InvalidArgument),
    ("no rows of weights", gemm, {"w_high": HIGH[:0], "w_low": LOW[:0]}, "w_high", InvalidArgument),
    ("no k", gemm, {"x": X[:, :0], "w_high": HIGH[:, :0], "w_low": LOW[:, :0]}, "w_high", InvalidArgument),
    ("scale of two", gemm, {"scale": torch.ones(2)}, "scale", InvalidArgument),
    ("scale nan", gemm, {"scale": float("nan")}, "scale", InvalidArgument),
    ("scale text", gemm, {"scale": "1"}, "scale", InvalidArgument),
    ("flag fp32", gemm, {"split_flag": torch.zeros(3)}, "split_flag", InvalidDtype),
    ("output dtype", gemm, {"output": torch.empty(6, 12).bfloat16()}, "output", InvalidDtype),
    ("output shape", gemm, {"output": torch.empty(6, 13)}, "output", InvalidArgument),
    ("output overlaps", gemm, {"output": torch.empty(12).expand(6, 12)}, "output", InvalidArgument),
    ("int flag", gemm, {"use_fp32_output": 1}, "use_fp32_output", InvalidDtype),
    ("int splitk", gemm, {"use_splitk": 0}, "use_splitk", InvalidDtype),
    ("top_k 0", topk, {"top_k": 0}, "top_k", InvalidArgument),
    ("top_k over experts", topk, {"top_k": 13}, "top_k", InvalidArgument),
    ("top_k over groups", topk, {"top_k": 5, "num_groups": 3}, "top_k", InvalidArgument),
    ("groups do not divide", topk, {"num_groups": 5}, "num_groups", InvalidArgument),
    ("top_groups over groups", topk, {"num_groups": 3, "top_groups": 4}, "top_groups", InvalidArgument),
    ("scoring", topk, {"scoring": "tanh"}, "scoring", InvalidArgument),
    ("bias shape", topk, {"bias": torch.zeros(11)}, "bias", InvalidArgument),
    ("bias dtype", topk, {"bias": torch.zeros(12).half()}, "bias", InvalidDtype),
    ("zero experts", topk, {"num_zero_experts": 13}, "num_zero_experts", InvalidArgument),
    ("renormalize", topk, {"renormalize": 1}, "renormalize", InvalidDtype),
    ("scaling", topk, {"routed_scaling": float("inf")}, "scale", InvalidArgument),
    ("weight bf16", topk, {"weight": HIGH}, "weight", InvalidDtype),
    ("weight a list", topk, {"weight": [1]}, "weight", InvalidDtype),
    ("terms", topk, {"weight": W, "terms": 4}, "terms", InvalidArgument),
    ("split bf16", lambda **_: hpc.split_router_weight(HIGH), {}, "weight", InvalidDtype),
    ("split scale", lambda **_: hpc.split_router_weight(W, scale=2.0), {}, "scale", InvalidArgument),
    ("no tokens", lambda **_: hpc.get_gemm_bf16xfp32_workspace(64, 0), {}, "max_tokens", InvalidArgument),
]


@pytest.mark.parametrize(
    ("call", "changes", "argument", "kind"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_bad_input_is_refused(
    call: Callable[..., Any], changes: dict[str, Any], argument: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=rf"hpc\.\w+: argument '{argument}': expected .*; got ") as caught:
        call(**changes)
    assert isinstance(caught.value, RuntimeError), "engines expect this type"


def test_scale_forms() -> None:
    want = gemm()
    for scale in (torch.tensor(1 / 256), torch.tensor([1 / 256])):
        assert torch.equal(gemm(scale=scale), want)


def test_defaults_and_output() -> None:
    assert hpc.gemm_bf16xfp32(X, HIGH, LOW, 1 / 256).dtype == torch.bfloat16
    out = torch.full((6, 12), float("nan"))
    assert gemm(output=out) is out and torch.equal(out, gemm())
    assert gemm(x=X[:0]).shape == (0, 12)
    assert topk(x=X[:0])[1].shape == (0, 4)


def test_workspace() -> None:
    flag = hpc.get_gemm_bf16xfp32_workspace(192)
    assert flag.shape == (8192, 3) and flag.dtype == torch.int32 and int(flag.abs().sum()) == 0
    flag.fill_(5)
    assert torch.equal(gemm(split_flag=flag), gemm()) and int(flag.min()) == 5


@pytest.mark.gpu
def test_a_plan_that_cannot_run_is_refused() -> None:
    x, high, low = (tensor.cuda() for tensor in (X, HIGH, LOW))
    for plan in (Plan("tile", 128, 128, 1, 8, 0, 9), "tile"):
        with pytest.raises(InvalidArgument, match="argument 'plan'"):
            hpc.gemm_bf16xfp32(x, high, low, 1 / 256, plan=plan)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="device"):
        hpc.gemm_bf16xfp32(x, HIGH, low, 1 / 256)
