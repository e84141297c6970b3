"""The functions as `torch.ops.hpc.*`: schemas, fakes, tracing. On a CPU the ops run the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hpc
from hpc.gemm.router import ops

assert ops  # registers torch.ops.hpc.*

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SCALE = 1 / 256


def operands(where: str, m: int = 6, n: int = 20, k: int = 64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=where).manual_seed(0)
    x = torch.randn(m, k, generator=generator, device=where).bfloat16()
    weight = torch.randn(n, k, generator=generator, device=where)
    split = hpc.split_router_weight(weight, terms=3)
    assert split.third is not None
    return x, split.high, split.low, split.third


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with rows further apart."""
    wide = torch.zeros(tensor.shape[0], tensor.shape[1] + 8, dtype=tensor.dtype, device=tensor.device)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


@HERE
@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("three", [True, False])
def test_fr_71_gemm_op(where: str, fp32: bool, three: bool) -> None:
    x, high, low, third = operands(where)
    flag = hpc.get_gemm_bf16xfp32_workspace(20, 64, device=where)
    kwargs = {"w_third": third if three else None}
    for tokens in (x, spread(x), x[:0]):
        args = (tokens, high, low, SCALE, fp32, True, flag)
        torch.library.opcheck(torch.ops.hpc.gemm_bf16xfp32.default, args, kwargs, test_utils=TESTS)
        want = hpc.gemm_bf16xfp32(*args, **kwargs)
        assert torch.equal(torch.ops.hpc.gemm_bf16xfp32(*args, **kwargs), want)
        out = torch.empty_like(want)
        torch.library.opcheck(
            torch.ops.hpc.gemm_bf16xfp32.out, args, {**kwargs, "output": out}, test_utils=TESTS
        )
        torch.ops.hpc.gemm_bf16xfp32.out(*args, **kwargs, output=out)
        assert torch.equal(out, want)
    assert int(flag.abs().max()) == 0


@HERE
@pytest.mark.parametrize("zero", [0, 5])
def test_fr_71_topk_op(where: str, zero: int) -> None:
    x, high, low, _ = operands(where)
    bias = torch.zeros(20, device=where)
    args = (x, high, low, None, SCALE, 3, "sigmoid", bias, 4, 2, True, 2.5, zero)
    torch.library.opcheck(torch.ops.hpc.router_topk.default, args, {}, test_utils=TESTS)
    weights, ids, rest = torch.ops.hpc.router_topk(*args)
    assert weights.shape == ids.shape == (6, 3) and rest.numel() == (6 if zero else 0)


def test_fakes_know_shapes_dtypes_and_strides() -> None:
    with FakeTensorMode():
        x = torch.empty(64, 7, dtype=torch.bfloat16, device="cuda").T
        w = torch.empty(192, 64, dtype=torch.bfloat16, device="cuda")
        out = torch.ops.hpc.gemm_bf16xfp32(x, w, w, SCALE, True)
        assert out.shape == (7, 192) and out.stride() == (192, 1) and out.dtype == torch.float32
        assert out.device.type == "cuda"


@HERE
def test_traced_without_graph_breaks(where: str) -> None:
    """Eager and traced calls agree, for other token counts too."""
    x, high, low, third = operands(where)
    split = hpc.RouterWeight(high, low, third, SCALE)

    def model(tokens: torch.Tensor) -> tuple[Any, ...]:
        logits = hpc.gemm_bf16xfp32(tokens, high, low, SCALE, use_fp32_output=True, w_third=third)
        into = torch.empty_like(logits)
        hpc.gemm_bf16xfp32(tokens, high, low, SCALE, use_fp32_output=True, output=into)
        return (logits, into, *hpc.router_topk(tokens, split, 4, renormalize=True))

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 3, 5):
        for mine, want in zip(compiled(x[:rows]), model(x[:rows]), strict=True):
            assert torch.equal(mine, want)
