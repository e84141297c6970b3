"""Warm-up of the fused MoE: the kernels that the usual models reach, compiled in parallel, then loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from hpc.common import arch
from hpc.common.compiling import compile_or_raise
from hpc.common.offline import compiling_for
from hpc.common.operator import Progress
from hpc.moe import case_lists, choose, entry, launch, plan, validate
from hpc.moe.case_lists import MoeCase
from hpc.moe.validate import Arguments

# (name, multiprocessors) of no GPU in particular: no table, and a count as good as any, since it sets grids alone
ANY_GPU = ("", 132)


def shapes() -> list[tuple[str, MoeCase]]:
    """Every measured shape at every number of tokens."""
    return [(case.name, case.params) for case in case_lists.target_cases()]


def warmup(device: torch.device | str, progress: Progress | None) -> int:
    """Compile every shape for a CUDA device or a named target (`sm90`); on a device also run each once.

    Compilation fills Triton's cache from `HPC_WARMUP_JOBS` processes. Returns how many calls are ready.
    """
    todo = shapes()
    if isinstance(device, str):
        target, gpu = device, ANY_GPU
    else:
        target = "sm{}{}".format(*arch.capability(device))
        gpu = arch.device_name(device), arch.sm_count(device)
    compile_or_raise(compile_shape, [(name, (params, target, None, gpu)) for name, params in todo], progress)
    if isinstance(device, torch.device):
        for _, params in todo:
            entry.fused("warmup", meta_arguments(params, device), 0, params.experts, params.bf16_mul)
    return len(todo)


def meta_arguments(params: MoeCase, device: torch.device | str = "cpu") -> Arguments:
    """The tensors of a call, of the right shapes and of whatever values: all pairs go to expert 0."""
    tokens, experts, hidden, inter = params.tokens, params.experts, params.hidden, params.inter

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # on a CPU nothing of it is ever touched, so even gigabytes of weights take no memory
        return torch.empty(shape, dtype=dtype, device=device)

    def packed(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
        return empty(*shape, dtype=dtype)

    blocks = plan.ceil_div
    if params.bf16_weights:
        s13, s2, x_scale, act = None, None, None, None
    elif params.block:
        s13 = empty(experts, blocks(2 * inter, 128), 4 * blocks(hidden, 512))
        s2 = empty(experts, blocks(hidden, 128), 4 * blocks(inter, 512))
        x_scale, act = empty(tokens, blocks(hidden, 128)), None
    else:
        s13, s2, x_scale, act = (
            empty(experts),
            empty(experts),
            None,
            empty(1) if params.static else None,
        )
    wide, given = torch.bfloat16, None
    of_weights = wide if params.bf16_weights else torch.float8_e4m3fn
    x = packed(tokens, hidden, dtype=wide if params.bf16_input else of_weights)
    if params.bf16_input:
        given, x_scale = empty(1) if params.kind == "tensor" and params.static else None, None
    up_bias = down_bias = None
    if params.bias is not None:
        dtype = getattr(torch, params.bias)
        up_bias, down_bias = empty(experts, 2 * inter, dtype=dtype), empty(experts, hidden, dtype=dtype)
    return Arguments(
        x, packed(experts, 2 * inter, hidden, dtype=of_weights), packed(experts, hidden, inter, dtype=of_weights),
        s13, s2,
        torch.zeros(tokens, params.top_k, dtype=torch.int32, device=device), empty(tokens, params.top_k), x_scale, act,
        packed(tokens, hidden, dtype=wide) if params.shared else None, None, given, up_bias, down_bias,
        params.kind,
    )  # fmt: skip


def key_of(params: MoeCase, target: str, gpu: tuple[str, int] = ANY_GPU) -> plan.Key:
    """What decides the plan of a call on `target`; its GPU by name and multiprocessors decides on measured plans."""
    gate = (params.activation, params.swiglu_limit, params.swiglu_alpha)
    options = (params.bf16_mul, *gate, params.no_combine, params.weight_on_input, params.shared_experts)
    key = validate.call("warmup", meta_arguments(params), 0, params.experts, *options)
    return replace(
        key,
        sm90=target.startswith("sm90"),
        hardware_fp8=int(target[2:].rstrip("a")) >= 89,
        gpu=gpu[0],
        sms=gpu[1],
    )


def compile_shape(
    params: MoeCase, target: str, chosen: plan.Plan | None = None, gpu: tuple[str, int] = ANY_GPU
) -> None:
    """Compile the launches of one call for `target`, with CPU tensors in the place of the device's."""
    args, key = meta_arguments(params), key_of(params, target, gpu)
    scales = entry.scale_sizes(args.w13_scale, args.w2_scale)
    call = launch.Call(key, chosen or choose.choose(key), 0, 0, params.shared, key.hidden, scales)
    shape = (key.num_tokens, key.top_k, key.hidden)
    out = torch.empty(shape if params.no_combine else shape[::2], dtype=torch.bfloat16)
    with compiling_for(target):
        call.launch(0, args, 1.0, out, torch.empty(call.layout.size, dtype=torch.uint8))
