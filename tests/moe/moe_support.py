"""Running the kernels of the fused MoE in Triton's interpreter, through the operator's own launch code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc.moe import launch, plan
from hpc.moe.cases import MoeInputs, arguments, key_of, result_shape
from hpc.moe.entry import scale_sizes
from hpc.testing import poisoned


class InterpretedKernel:
    """Stands for `hpc.common.launch.Kernel`: Triton's interpreter has no compiled kernel to keep."""

    compiled = False

    def __init__(self, fn: Any, name: str, **options: Any) -> None:
        self.fn = fn

    def __call__(self, grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        self.fn[grid](*args)


def interpret(
    monkeypatch: pytest.MonkeyPatch, inputs: MoeInputs, chosen: plan.Plan | None = None
) -> tuple[torch.Tensor, torch.Tensor, launch.Call]:
    """(output, scratch, call). Scratch and output are 0xFF bytes before the run: NaN in every format."""
    monkeypatch.setattr(launch, "Kernel", InterpretedKernel)
    p, key = inputs.params, key_of(inputs)
    scales = scale_sizes(inputs.w13_scale, inputs.w2_scale)
    call = launch.Call(
        key, chosen or plan.analytic(key), 0, p.rank, p.shared, key.hidden, scales, interpret=True
    )
    scratch = torch.full((call.layout.size,), 255, dtype=torch.uint8)
    out = poisoned(result_shape(p), torch.bfloat16)
    call.launch(0, arguments(inputs), p.factor, out, scratch)
    return out, scratch, call


def words(scratch: torch.Tensor, offset: int, count: int) -> list[int]:
    """int32 values at a byte offset of a scratch buffer."""
    values: list[int] = scratch.view(torch.int32)[offset // 4 : offset // 4 + count].tolist()
    return values
