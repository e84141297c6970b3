"""Warm-up of the router: the kernels that measured shapes reach, compiled in parallel, then loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpc.common import arch
from hpc.common.compiling import compile_or_raise
from hpc.common.offline import compiling_for
from hpc.common.operator import Progress
from hpc.gemm.router import cases, cases_topk, launch, plan, validate

TARGET_SMS = 132  # a count as good as any: it sets grids and splits, which no kernel is compiled for
TARGET_GPU = "NVIDIA H200"  # whose measured plans a named SM90 target gets
# Token counts whose plans use the same kernels: measured ones, and others that fall between them.
TOKENS = cases.TOKENS

Job = tuple[str, int, int, int]  # (model or "", m, n, k)


def shapes() -> list[Job]:
    """Every measured shape at every measured token count."""
    return [("", m, n, k) for n, k in cases.SHAPES for m in TOKENS]


def choices() -> list[Job]:
    """The four models' routers at few, some and many tokens."""
    return [
        (model, m, spec[0], spec[1]) for model, spec in cases_topk.ROUTERS.items() for m in (1, 16, 256, 4096)
    ]


def warmup(device: torch.device | str, progress: Progress | None) -> int:
    """Compile the product for a CUDA device or a named target (`sm90`); on a device also run each call once."""
    return _warm(shapes(), device, progress)


def warmup_topk(device: torch.device | str, progress: Progress | None) -> int:
    """The same for product and expert choice."""
    return _warm(choices(), device, progress)


def _warm(jobs: Sequence[Job], device: torch.device | str, progress: Progress | None) -> int:
    target = device if isinstance(device, str) else "sm{}{}".format(*torch.cuda.get_device_capability(device))
    gpu = TARGET_GPU if isinstance(device, str) else arch.device_name(device)
    distinct = list({kernels_of(job, target, gpu): job for job in jobs}.values())
    compile_or_raise(compile_job, [(label(job), (job, target, gpu)) for job in distinct], progress)
    if isinstance(device, torch.device):
        for job in distinct:
            run_job(job, device)
    return len(distinct)


def label(job: Job) -> str:
    """Name of a job in the progress bar."""
    model, m, n, k = job
    return f"{model or f'{n}x{k}'} M={m}"


def key_of(job: Job, target: str, gpu: str) -> plan.Key:
    """The key that a call of this size on the target has."""
    _, m, n, k = job
    return plan.Key(gpu, target.startswith("sm90"), TARGET_SMS, m, n, k)


def kernels_of(job: Job, target: str, gpu: str) -> tuple[Any, ...]:
    """What Triton would compile for, so that each kernel is compiled once."""
    model, _, n, k = job
    chosen = plan.choose(key_of(job, target, gpu))
    facts = (chosen.kernel, chosen.block_m, chosen.block_n, chosen.warps, chosen.chunks, chosen.stages)
    return (
        *facts,
        plan.power_of_two(chosen.splits),
        plan.power_of_two(k) if chosen.kernel == "row" else 0,
        model,
        n % 16,
    )


def compile_job(job: Job, target: str, gpu: str) -> None:
    """Compile the launches of one call for `target`, with CPU tensors in the place of the device's."""
    with compiling_for(target):
        launch_job(job, key_of(job, target, gpu))


def launch_job(job: Job, key: plan.Key, chosen: plan.Plan | None = None) -> None:
    """All launches of a call, on CPU tensors."""
    model, m, n, k = job
    x, weight = (torch.empty(rows, k, dtype=torch.bfloat16) for rows in (m, n))
    topk, bias = choice_of(model)
    call = launch.Call(key, chosen or plan.choose(key), 0, launch.Layout(k, k, k, k, n), torch.float32, topk)
    out = torch.empty(m, n)
    call._product(0, x, (weight, weight, weight), out, cases.DEFAULT_SCALE)
    finish: Callable[..., None] | None = call._finish
    if topk is not None and finish is not None:
        weights, ids = torch.empty(m, topk.top_k), torch.empty(m, topk.top_k, dtype=torch.int32)
        finish(0, out, bias, 1.0, (weights, ids, out) if topk.num_zero_experts else (weights, ids))
    elif finish is not None:
        finish(0, out, out)


def choice_of(model: str) -> tuple[launch.TopK | None, torch.Tensor | None]:
    """Facts of a model's expert choice, and its bias."""
    if not model:
        return None, None
    experts, _, top_k, options, has_bias = cases_topk.ROUTERS[model]
    bias = torch.zeros(experts) if has_bias else None
    facts = validate.topk(
        "router_topk", experts, top_k, options.get("scoring", "softmax"), bias, options.get("num_groups", 1),
        options.get("top_groups", 1), options.get("num_zero_experts", 0), options.get("renormalize", False),
        torch.device("cpu"),
    )  # fmt: skip
    return facts, bias


def run_job(job: Job, device: torch.device) -> None:
    """One call on the device: loads the kernels."""
    model, m, n, k = job
    if model:
        cases_topk.route(cases_topk.make_inputs(cases_topk.TopKCase(model, m), device, 0))
    else:
        cases.multiply(cases.make_inputs(cases.RouterCase(m, n, k), device, 0))
