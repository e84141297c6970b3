"""The router GEMM as `linear_bf16_fp32` calls it."""

from __future__ import annotations

import pytest
import torch
from sglang_support import call, rms

WEIGHT_SCALE = 1.0 / 256.0

# (M, N, K): LongCat's small router at its smallest M, DeepSeek-V4's smallest M with the widest N that is not 2^n.
SHAPES = {"longcat_lite": (128, 384, 3072), "longcat": (64, 768, 1536), "smallest_m": (8, 192, 4096)}


def split(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves that SGLang makes once and keeps on the weight."""
    high = weight.to(torch.bfloat16)
    return high, ((weight - high.float()) / WEIGHT_SCALE).to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_router_gemm(shape: tuple[int, int, int], device: torch.device) -> None:
    """fp32 logits of fp32 weights: two bf16 halves leave 2^-17 of a weight, one alone 2^-9."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(device)
    high, low = split(weight)
    flag = call("get_gemm_bf16xfp32_workspace", n)
    assert flag.dtype == torch.int32 and flag.shape == (131072 // 16, -(-n // 64)) and not flag.any()
    for _ in range(2):  # the cached halves and flag serve every later call
        out = call(
            "gemm_bf16xfp32",
            x,
            high,
            low,
            WEIGHT_SCALE,
            use_fp32_output=True,
            use_splitk=True,
            split_flag=flag,
        )
        assert out.dtype == torch.float32 and out.shape == (m, n) and out.is_contiguous()
        expected = x.double() @ weight.double().T
        assert rms(out, expected) < 2e-5, "one bf16 half would give 2e-3"
        assert float((out.double() - expected).abs().max()) < 1.8e-3
        assert not flag.any(), "SGLang expects the flag zero after each call"


def test_router_weights_are_not_changed(device: torch.device) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).to(device)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(4)).to(device, torch.bfloat16)
    high, low = split(weight)
    before = [t.clone() for t in (x, high, low)]
    flag = call("get_gemm_bf16xfp32_workspace", 64)
    call("gemm_bf16xfp32", x, high, low, WEIGHT_SCALE, use_fp32_output=True, use_splitk=True, split_flag=flag)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, high, low), strict=True))
