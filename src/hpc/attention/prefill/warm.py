"""Warm-up of prefill attention: the kernels that the usual models reach, compiled in parallel, then loaded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from hpc.attention.prefill import case_lists, cases, launch, plan, validate
from hpc.attention.prefill.case_lists import PrefillCase
from hpc.common.compiling import compile_or_raise
from hpc.common.offline import compiling_for
from hpc.common.operator import Progress

# (query heads, KV heads) of one rank: groups 4, 5, 7, 8 and 16 at tensor-parallel sizes 1 to 8
HEADS = (
    (64, 8),
    (32, 8),
    (32, 4),
    (16, 2),
    (8, 1),
    (4, 1),
    (40, 8),
    (5, 1),
    (28, 4),
    (7, 1),
    (64, 4),
    (16, 1),
)
DTYPES = ("fp8", "bf16")


def shapes() -> list[PrefillCase]:
    """Head dim 128, page 64, causal."""
    lens = case_lists.prompts(65)
    return [PrefillCase(lens, *heads, dtype=dtype) for dtype, heads in itertools.product(DTYPES, HEADS)]


def warmup(device: torch.device | str, progress: Progress | None) -> int:
    """Compile every shape for a CUDA device or a named target (`sm90`); on a device also run each once.

    Compilation fills Triton's cache from `HPC_WARMUP_JOBS` processes. Returns how many calls are ready.
    """
    todo = shapes()
    target = device if isinstance(device, str) else "sm{}{}".format(*torch.cuda.get_device_capability(device))
    compile_or_raise(compile_shape, [(label(params), (params, target)) for params in todo], progress)
    if isinstance(device, torch.device):
        for params in todo:
            cases.attend(cases.make_tensors(params, device, seed=0))
    return len(todo)


def label(params: PrefillCase) -> str:
    """Name of a shape in the progress bar."""
    return f"{params.dtype} {params.q_heads}/{params.kv_heads}"


def compile_shape(params: PrefillCase, target: str) -> None:
    """Compile the launches of one call for `target`, with CPU tensors in the place of the device's."""
    x = cases.make_tensors(params, "cpu", seed=0)
    scales = (x.qscale, x.kscale, x.vscale)
    arguments = validate.Arguments(
        "warmup", x.q, x.k, x.v, x.cu_seqlens, x.block_ids, x.seq_lens, params.rows, scales,
        params.quant_type if params.dtype == "fp8" else -1, **x.options,
    )  # fmt: skip
    key, layout = validate.call(arguments)
    key = replace(key, sm90=target.startswith("sm90"))
    call = launch.Call(key, plan.choose(key), 0, layout, params.window)
    table = torch.empty(plan.HEADER_WORDS, dtype=torch.int32)
    out = torch.empty((*x.q.shape[:2], params.value_dim), dtype=torch.bfloat16)
    tensors = (x.q, x.k, x.v, out, None, table, x.block_ids, *scales, x.sinks)
    with compiling_for(target):
        for short in (False, True)[: 1 + call.plan.short_kernel]:
            call.launch(0, tensors, x.cu_seqlens, x.seq_lens, 1, call.default_scale, 1.0, short)
        for parts in (8, 32):
            call.launch(0, tensors, x.cu_seqlens, x.seq_lens, 1, call.default_scale, 1.0, parts=parts)
