"""Warm-up of decode attention: the kernels that the usual models reach, compiled in parallel, then loaded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from hpc.attention.decode import cases, launch, validate
from hpc.attention.decode.arguments import Arguments
from hpc.attention.decode.case_lists import DecodeCase
from hpc.attention.decode.choose import Plan, choose
from hpc.common.compiling import compile_or_raise
from hpc.common.offline import compiling_for
from hpc.common.operator import Progress

# (query heads, KV heads) of one rank: groups 4, 5, 7, 8, 12 and 16 at tensor-parallel sizes 1 to 8
HEADS = (
    (64, 8), (32, 8), (32, 4), (16, 2), (8, 1), (4, 1), (40, 8), (5, 1), (28, 4), (7, 1), (12, 1), (64, 4), (16, 1),
)  # fmt: skip
DTYPES = ("fp8", "bf16")
TARGET_SMS = 132  # a count as good as any: it sets grids and splits, which no kernel is compiled for


def shapes() -> list[DecodeCase]:
    """Head dim 128, page 64, one new token; both dtypes, both paths."""
    return [
        DecodeCase((65,), *heads, dtype=dtype, dynamic=dynamic)
        for dtype, heads, dynamic in itertools.product(DTYPES, HEADS, (True, False))
    ]


def warmup(device: torch.device | str, progress: Progress | None) -> int:
    """Compile every shape for a CUDA device or a named target (`sm90`); on a device also run each once.

    Compilation fills Triton's cache from `HPC_WARMUP_JOBS` processes. Returns how many calls are ready.
    """
    todo = shapes()
    target = device if isinstance(device, str) else "sm{}{}".format(*torch.cuda.get_device_capability(device))
    compile_or_raise(compile_shape, [(label(params), (params, target)) for params in todo], progress)
    if isinstance(device, torch.device):
        for params in todo:
            inputs = cases.make_tensors(params, device, seed=0)
            cases.attend(inputs, cases.make_task_map(inputs) if params.dynamic else None)
    return len(todo)


def label(params: DecodeCase) -> str:
    """Name of a shape in the progress bar."""
    return f"{params.dtype} {params.q_heads}/{params.kv_heads} {'dynamic' if params.dynamic else 'static'}"


def compile_shape(params: DecodeCase, target: str, chosen: Plan | None = None) -> None:
    """Compile the launches of one call for `target`, with CPU tensors in the place of the device's."""
    inputs = cases.make_tensors(params, "cpu", seed=0)
    cache, scales = inputs.cache, (inputs.qscale, inputs.kscale, inputs.vscale)
    task_map = cases.make_task_map(inputs) if params.dynamic else None
    arguments = Arguments(
        "warmup", inputs.q, cache.kcache, cache.vcache, cache.block_ids, inputs.seq_lens, scales,
        params.quant_type if params.dtype == "fp8" else -1, params.num_new_tokens - 1, params.new_kv_included,
        task_map=task_map, **inputs.options,
    )  # fmt: skip
    key, layout = validate.call(arguments)
    key = replace(key, sm90=target.startswith("sm90"), sms=TARGET_SMS)
    call = launch.Call(key, chosen or choose(key), 0, layout, params.window)
    out = torch.empty((*inputs.q.shape[:2], params.value_dim), dtype=torch.bfloat16)
    tensors = (inputs.q, cache.kcache, cache.vcache, cache.block_ids, inputs.seq_lens, task_map, *scales, inputs.sinks,
               out, None, torch.empty(call.words))  # fmt: skip
    with compiling_for(target):
        call.launch(0, tensors, call.default_scale, 1.0)
