"""Running the kernels of the fused MoE in Triton's interpreter, through the operator's own launch code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc.moe import launch, plan
from hpc.moe.cases import MoeInputs, key_of
from hpc.moe.validate import Arguments
from hpc.testing import poisoned


class InterpretedKernel:
    """Stands for `hpc.common.launch.Kernel`: Triton's interpreter has no compiled kernel to keep."""

    compiled = False

    def __init__(self, fn: Any, name: str, **options: Any) -> None:
        self.fn = fn

    def __call__(self, grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        self.fn[grid](*args)


def arguments(inputs: MoeInputs, output: torch.Tensor | None = None) -> Arguments:
    """The tensors of a case by role."""
    return Arguments(
        inputs.x, inputs.w13, inputs.w2, inputs.w13_scale, inputs.w2_scale, inputs.topk_ids, inputs.topk_scale,
        inputs.x_scale, inputs.act_scale, inputs.shared_output, output, inputs.input_scale,
    )  # fmt: skip


def interpret(
    monkeypatch: pytest.MonkeyPatch, inputs: MoeInputs, chosen: plan.Plan | None = None
) -> tuple[torch.Tensor, torch.Tensor, launch.Call]:
    """(output, scratch, call). Scratch and output are 0xFF bytes before the run: NaN in every format."""
    monkeypatch.setattr(launch, "Kernel", InterpretedKernel)
    p, key = inputs.params, key_of(inputs)
    scales = tuple(
        (s.shape[1], s.shape[2]) if s.dim() == 3 else (1, 1) for s in (inputs.w13_scale, inputs.w2_scale)
    )
    call = launch.Call(
        key, chosen or plan.choose(key), 0, p.rank, p.shared, key.hidden, scales, interpret=True
    )
    scratch = torch.full((call.layout.size,), 255, dtype=torch.uint8)
    out = poisoned((p.tokens, p.hidden), torch.bfloat16)
    call.launch(0, arguments(inputs), p.factor, out, scratch)
    return out, scratch, call


def words(scratch: torch.Tensor, offset: int, count: int) -> list[int]:
    """int32 values at a byte offset of a scratch buffer."""
    values: list[int] = scratch.view(torch.int32)[offset // 4 : offset // 4 + count].tolist()
    return values
