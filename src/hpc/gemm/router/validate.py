"""Checks of router calls. Metadata only; a signature that passed once is not checked again."""

from __future__ import annotations

import math

import torch

from hpc.common import arch, checks
from hpc.common.errors import InvalidDtype, fail
from hpc.gemm.router.launch import Layout, TopK
from hpc.gemm.router.plan import Key

MAX_EXPERTS = 4096
MAX_TOP_K = 64


def scale_value(function: str, scale: object) -> float:
    """A Python float from a number or a CPU tensor of one element; reading a CUDA tensor would stop the host."""
    remedy = "Pass the factor of the low part as a Python float, for example 1/256."
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 or scale.device.type != "cpu":
            got = f"a tensor of {scale.numel()} elements on {scale.device}"
            fail(
                function, "scale", expected="a number or a CPU tensor of one element", got=got, remedy=remedy
            )
        scale = scale.item()
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        fail(function, "scale", expected="a finite number", got=repr(scale), remedy=remedy)
    return float(scale)


def flag(function: str, name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        fail(function, name, expected="True or False", got=repr(value), kind=InvalidDtype)
    return value


def product(
    function: str,
    x: torch.Tensor,
    parts: tuple[torch.Tensor, ...],
    output: torch.Tensor | None,
    dtype: torch.dtype,
    names: tuple[str, ...] = ("w_high", "w_low", "w_third"),
) -> tuple[Key, Layout]:
    """Check the operands of a product; the key that decides its plan, and the strides."""
    remedy = "Convert with .to(torch.bfloat16); hpc.split_router_weight makes the parts of a float32 weight."
    for name, tensor in (("x", x), *zip(names, parts, strict=False)):
        checks.dtype(function, name, tensor, torch.bfloat16, remedy)
        checks.ndim(function, name, tensor, 2, "Pass x as [m, k] and weights as [n, k].")
        checks.inner_contiguous(function, name, tensor)
        checks.same_device(function, name, tensor, x.device)
    m, k = x.shape
    n = parts[0].shape[0]
    for name, part in zip(names, parts, strict=False):
        checks.shape(
            function, name, part, (n, k), "The parts of a weight have one shape [n, k], with the k of x."
        )
    if n == 0 or k == 0:
        fail(function, names[0], expected="n and k of at least 1", got=list(parts[0].shape))
    if output is not None:
        checks.dtype(function, "output", output, dtype, "It has the dtype that use_fp32_output asks for.")
        checks.shape(function, "output", output, (m, n))
        checks.same_device(function, "output", output, x.device)
        checks.inner_contiguous(function, "output", output)
        if m > 1 and output.stride(0) < n:
            fail(function, "output", expected="rows that do not overlap", got=f"strides {output.stride()}")
    if x.is_cuda:
        arch.require_gpu(function, x.device)
    operands = (x, *parts)
    aligned = all(
        t.data_ptr() % 16 == 0 and (t.shape[0] <= 1 or (t.stride(0) > 0 and t.stride(0) % 8 == 0))
        for t in operands
    )
    key = Key(
        gpu=arch.device_name(x.device) if x.is_cuda else "", sm90=x.is_cuda and arch.is_hopper(x.device),
        sms=arch.sm_count(x.device), m=m, n=n, k=k, terms=len(parts), aligned=aligned,
    )  # fmt: skip
    rows = [_row_stride(t, k) for t in (*operands, *((parts[1],) if len(parts) == 2 else ()))]
    return key, Layout(rows[0], rows[1], rows[2], rows[3], n if output is None else _row_stride(output, n))


def _row_stride(tensor: torch.Tensor, width: int) -> int:
    """Stride of rows; that of a single row never matters and may be anything."""
    return tensor.stride(0) if tensor.shape[0] > 1 else -(-width // 8) * 8


def split_flag(function: str, value: torch.Tensor | None, device: torch.device) -> None:
    """An int32 tensor on the device of x, or None."""
    if value is not None:
        checks.dtype(function, "split_flag", value, torch.int32, "Make it with get_gemm_bf16xfp32_workspace.")
        checks.same_device(function, "split_flag", value, device)


def weight(function: str, tensor: torch.Tensor, terms: int, scale: float) -> None:
    """Check an FP32 weight that is to be split."""
    checks.dtype(
        function, "weight", tensor, torch.float32, "A BF16 weight needs no split: multiply as it is."
    )
    checks.ndim(function, "weight", tensor, 2, "Pass the weight as [n, k].")
    checks.one_of(
        function, "terms", terms, (2, 3), "Two parts keep 16 bits and more of a weight, three all of fp32."
    )
    if not 0.0 < scale <= 1.0:
        fail(function, "scale", expected="a factor in (0, 1]", got=scale, remedy="1/256 suits BF16 parts.")


def topk(
    function: str,
    experts: int,
    top_k: int,
    scoring: str,
    bias: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
    num_zero_experts: int,
    renormalize: bool,
    device: torch.device,
) -> TopK:
    """Check the arguments of the expert choice."""
    checks.one_of(function, "scoring", scoring, ("softmax", "sigmoid"))
    if experts > MAX_EXPERTS:
        fail(function, "weight", expected=f"at most {MAX_EXPERTS} experts", got=experts)
    num_groups = checks.int_range(function, "num_groups", num_groups, 1, experts)
    top_groups = checks.int_range(function, "top_groups", top_groups, 1, num_groups)
    if experts % num_groups:
        expected = f"a divisor of the {experts} experts"
        fail(function, "num_groups", expected=expected, got=num_groups, remedy="Groups have equal sizes.")
    most = min(MAX_TOP_K, experts // num_groups * top_groups)
    remedy = "A token takes distinct experts, all of them from its best groups."
    top_k = checks.int_range(function, "top_k", top_k, 1, most, remedy)
    zero = checks.int_range(function, "num_zero_experts", num_zero_experts, 0, experts)
    if bias is not None:
        checks.dtype(function, "bias", bias, (torch.float32, torch.bfloat16))
        checks.shape(function, "bias", bias, (experts,))
        checks.same_device(function, "bias", bias, device)
        checks.contiguous(function, "bias", bias)
    flag(function, "renormalize", renormalize)
    return TopK(top_k, scoring == "sigmoid", bias is not None, num_groups, top_groups, renormalize, zero)
