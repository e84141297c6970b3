"""Warm-up of the prologue: the kernels that the usual models reach, compiled in parallel, then loaded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from hpc.common.compiling import compile_or_raise
from hpc.common.offline import compiling_for
from hpc.common.operator import Progress
from hpc.rope import cases, entry, launch, plan, validate
from hpc.rope.case_lists import RopeCase
from hpc.rope.validate import Arguments

# (query heads, KV heads) of one rank
HEADS = ((64, 8), (32, 8), (32, 4), (16, 2), (8, 1), (4, 1), (40, 8), (28, 4), (64, 4), (16, 1))
DTYPES = ("fp8", "bf16")


def shapes(sm90: bool = True) -> list[tuple[RopeCase, plan.Plan]]:
    """Head dim 128, page 64, NeoX over all dims; both dtypes, prefill (few tokens, 8192 and many) and decode, with and
    without a norm before."""
    found = []
    for dtype, heads, policy in itertools.product(DTYPES, HEADS, (0, 2)):
        warp = sm90 and plan.fits_warp(heads[0], 128, 128, 128, True, 1e-6)
        few, some, many = (
            plan.choose(plan.Key(tokens, *heads, 128, 128, warp)) for tokens in (1, 8192, 1 << 20)
        )
        for chosen, is_prefill in (*((p, True) for p in dict.fromkeys((few, some, many))), (few, False)):
            params = RopeCase((65,), (1,), *heads, dtype=dtype, is_prefill=is_prefill, norm_policy=policy)
            found.append((params, chosen))
    return found


def warmup(device: torch.device | str, progress: Progress | None) -> int:
    """Compile every shape for a CUDA device or a named target (`sm90`); on a device also run each once.

    Compilation fills Triton's cache from `HPC_WARMUP_JOBS` processes. Returns how many calls are ready.
    """
    target = device if isinstance(device, str) else "sm{}{}".format(*torch.cuda.get_device_capability(device))
    todo = shapes(target.startswith("sm9"))
    compile_or_raise(compile_shape, [(label(each[0]), (each[0], target, each[1])) for each in todo], progress)
    if isinstance(device, torch.device):
        for params, chosen in todo:
            cases.prologue(cases.make_tensors(params, device, seed=0), plan=chosen)
    return len(todo)


def label(params: RopeCase) -> str:
    """Name of a shape in the progress bar."""
    return f"{params.dtype} {params.q_heads}/{params.kv_heads} {'prefill' if params.is_prefill else 'decode'}"


def compile_shape(params: RopeCase, target: str, chosen: plan.Plan | None = None) -> None:
    """Compile the launch of one call for `target`, with CPU tensors in the place of the device's."""
    inputs = cases.make_tensors(params, "cpu", seed=0)
    x = arguments(inputs)
    q_heads = validate.call(x)
    out_q, q_scale, flag = entry.allocate(x, q_heads)
    key = launch.key_of(x, q_heads, target.startswith("sm9"), out_q)
    facts = launch.facts_of(x, q_heads, chosen or plan.choose(key), out_q)
    facts = replace(
        facts, sm90=target.startswith("sm9"), soft=int(target.removeprefix("sm").rstrip("a")) < 89,
        k_in_memory=x.fp8, v_in_memory=x.fp8,
    )  # fmt: skip
    call = launch.Call(facts, entry.sizes_of(x))
    with compiling_for(target):
        call.launch(0, entry.pointers(x, (out_q, q_scale, flag), facts), (1e-6, 448.0, 1.0, 1.0))


def arguments(inputs: cases.RopeInputs) -> Arguments:
    """The call of a case as the entry takes it, without outputs."""
    p, cache, fp8 = inputs.params, inputs.cache, inputs.params.dtype == "fp8"
    return Arguments(
        "rope_norm_store_kv_fp8" if fp8 else "rope_norm_store_kv", cache.kcache, cache.vcache, inputs.qkv,
        inputs.cos_sin, inputs.seq_lens, inputs.q_index, cache.block_ids, p.is_prefill, inputs.k_scale, inputs.v_scale,
        p.quant_policy if fp8 else 0, max(p.new, default=0), p.upper_max, inputs.q_scale_inv, inputs.q_weight,
        inputs.k_weight, None, inputs.out_k, inputs.out_v, p.norm_policy, p.eps, p.neox,
    )  # fmt: skip
