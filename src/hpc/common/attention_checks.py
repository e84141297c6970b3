"""Checks that the attention operators share. Metadata only."""

from __future__ import annotations

import torch

from hpc.common import checks
from hpc.common.errors import fail


def output_and_sinks(
    function: str, q: torch.Tensor, output: torch.Tensor | None, sinks: torch.Tensor | None, v_dim: int
) -> None:
    """The optional output [rows of q, num_q_heads, v_dim] and sinks [num_q_heads]."""
    rows, q_heads = q.shape[:2]
    if output is not None:
        checks.dtype(function, "output", output, torch.bfloat16)
        checks.same_device(function, "output", output, q.device)
        checks.shape(function, "output", output, (rows, q_heads, v_dim))
        checks.inner_contiguous(function, "output", output)
        if not _apart(output):
            remedy = "Pass a tensor that is no expanded or overlapping view."
            fail(function, "output", expected="rows that do not overlap", got=output.stride(), remedy=remedy)
    if sinks is not None:
        checks.dtype(function, "sinks", sinks, torch.float32, "Convert with .float().")
        checks.same_device(function, "sinks", sinks, q.device)
        checks.shape(function, "sinks", sinks, (q_heads,), "One logit a query head.")
        checks.contiguous(function, "sinks", sinks)


def _apart(output: torch.Tensor) -> bool:
    """Whether no two elements share an address: each dimension steps over all that lies inside it."""
    inside = 1
    for stride, size in sorted(zip(output.stride(), output.shape, strict=True)):
        if size > 1:
            if stride < inside:
                return False
            inside += stride * (size - 1)
    return True
