"""Warm-up of decode attention: one tiny call of each kernel that the usual models reach."""

from __future__ import annotations

import itertools

import torch

from hpc.attention.decode import cases
from hpc.attention.decode.case_lists import DecodeCase
from hpc.common.operator import Progress

# (query heads, KV heads) of one rank: groups 4, 5, 7, 8, 12 and 16 at tensor-parallel sizes 1 to 8
HEADS = (
    (64, 8), (32, 8), (32, 4), (16, 2), (8, 1), (4, 1), (40, 8), (5, 1), (28, 4), (7, 1), (12, 1), (64, 4), (16, 1),
)  # fmt: skip
DTYPES = ("fp8", "bf16")


def shapes() -> list[DecodeCase]:
    """Head dim 128, page 64, one new token; both dtypes, both paths."""
    return [
        DecodeCase((65,), *heads, dtype=dtype, dynamic=dynamic)
        for dtype, heads, dynamic in itertools.product(DTYPES, HEADS, (True, False))
    ]


def warmup(device: torch.device | str, progress: Progress | None) -> int:
    """Run every shape once on a CUDA device; returns how many ran."""
    todo = shapes()
    for done, params in enumerate(todo, start=1):
        inputs = cases.make_tensors(params, device, seed=0)
        cases.attend(inputs, cases.make_task_map(inputs) if params.dynamic else None)
        if progress is not None:
            path = "dynamic" if params.dynamic else "static"
            progress(f"{params.dtype} {params.q_heads}/{params.kv_heads} {path}", done, len(todo))
    return len(todo)
