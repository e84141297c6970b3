"""What engines run for an FP32 router today: cuBLAS in FP32, in TF32, and, for scale, one plain BF16 product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpc.bench.providers import BOUND, Provider
from hpc.common import arch
from hpc.common.operator import Tolerance


@dataclass(frozen=True)
class RouterInputs:
    """x BF16 [m, k], weight float32 [n, k] and the same weight rounded to BF16."""

    x: torch.Tensor
    weight: torch.Tensor
    rounded: torch.Tensor


def providers(adapt: Callable[[Any], RouterInputs]) -> list[Provider]:
    """The rivals of an operator whose inputs `adapt` turns into `RouterInputs`."""
    return [
        Provider("cublas fp32", lambda inputs: fp32(adapt(inputs)), note="cast of x included"),
        Provider(
            "cublas tf32", lambda inputs: fp32(adapt(inputs), tf32=True), _needs_gpu, Tolerance(2e-3, 5e-3),
            "cast of x included; 10-bit mantissas",
        ),
        Provider(
            "one bf16 product", lambda inputs: bf16(adapt(inputs)), _needs_gpu, Tolerance(1e-2, 2e-2),
            f"{BOUND}half of the work; weight and result rounded to 8 bits",
        ),
    ]  # fmt: skip


def _needs_gpu() -> str | None:
    return None if arch.gpu_available() else "needs a GPU"


def fp32(inputs: RouterInputs, tf32: bool = False) -> Callable[[], torch.Tensor]:
    """x.float() @ weight^T, as F.linear with an FP32 weight does; TF32 is on for this call alone."""
    transposed = inputs.weight.T

    def call() -> torch.Tensor:
        matmul = torch.backends.cuda.matmul
        before, matmul.allow_tf32 = matmul.allow_tf32, tf32
        try:
            return torch.mm(inputs.x.float(), transposed)
        finally:
            matmul.allow_tf32 = before

    return call


def bf16(inputs: RouterInputs) -> Callable[[], torch.Tensor]:
    """x @ bf16(weight)^T with a BF16 result."""
    transposed = inputs.rounded.T
    return lambda: torch.mm(inputs.x, transposed)
