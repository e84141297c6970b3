"""SGLang plugin `hpc_moe`: the experts of `--moe-runner-backend hpc_ops` with quantisation and routed scaling inside.

SGLang's runner quantises the hidden states with a kernel of its own, calls `hpc.fuse_moe` or `hpc.fuse_moe_blockwise`,
and multiplies the result by the model's routed scaling factor. Here one call does all three. It is used only where
asked for by name, with SGLang's own switch:

    SGLANG_PLUGINS=hpc,hpc_moe sglang serve MODEL --moe-runner-backend hpc_ops ...

What SGLang's runner refuses is refused here in the same words. The hook is one of SGLang's `HookRegistry`; no file of
SGLang is changed.

What has run: the function with the payloads of SGLang 0.5.17 and 0.5.23, through their hook registry and runner pool
(tests/sglang); on an H200 in SGLang 0.5.17's model runner and a server. Its times: `hpc-fused` in docs/sglang.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

import hpc

NAME = "hpc_moe"
_RUNNER = "sglang.srt.layers.moe.moe_runner"
_POOL = f"{_RUNNER}.base.FusedOpPool.get_fused_func"
_REPLACED = ("none", "hpc_ops")


def register() -> None:
    """Hook SGLang's pool of fused experts in this process, if `SGLANG_PLUGINS` names this plugin.

    Raises:
        ImportError: SGLang is not installed.
    """
    asked = importlib.import_module("sglang.srt.environ").envs.SGLANG_PLUGINS.get() or ""
    if NAME not in {name.strip() for name in asked.split(",")}:
        return
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_POOL, choose, hooks.HookType.AROUND)


def choose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The pool's answer, and `fused_experts` in place of SGLang's function for `hpc_ops`."""
    found = original(*args, **kwargs)
    asked = (*args[1:], *kwargs.values())  # behind the class: names of dispatcher and runner
    return fused_experts if found is not None and asked == _REPLACED else found


def fused_experts(dispatch_output: Any, quant_info: Any, runner_config: Any) -> Any:
    """SGLang's `fused_experts_none_to_hpc_ops` in one call.

    Args:
        dispatch_output: hidden states BF16 [T, H] and top-k weights and global ids [T, K].
        quant_info: `HpcOpsMoeQuantInfo`: e4m3 weights with block scales, or with one scale an expert and static input
            scales.
        runner_config: `MoeRunnerConfig`; silu without limits, as SGLang's own function asks for.

    Returns:
        `StandardCombineInput` with BF16 [T, H].

    Raises:
        ValueError: a configuration that SGLang's own function refuses.
    """
    own = importlib.import_module(f"{_RUNNER}.hpc_ops")
    standard = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
    if not isinstance(quant_info, own.HpcOpsMoeQuantInfo):
        raise ValueError(f"{NAME} takes FP8 experts (HpcOpsMoeQuantInfo), got {type(quant_info).__name__}")
    own._check_runner_config_supported(runner_config)
    x = dispatch_output.hidden_states
    topk_weights, topk_ids = dispatch_output.topk_output[:2]
    # 0.5.17 keeps the rank with the weights, 0.5.23 with the configuration.
    rank = getattr(quant_info, "moe_ep_rank", None)
    rank = runner_config.moe_ep_rank if rank is None else rank
    routing = (topk_ids.to(torch.int32), topk_weights.to(torch.float32), rank, quant_info.global_num_experts)
    factor = runner_config.routed_scaling_factor
    scaling = 1.0 if factor is None else float(factor)
    if quant_info.block_quant:
        if quant_info.block_shape != [own.HPC_OPS_BLOCK_SIZE] * 2:
            raise ValueError(f"{NAME} takes blocks of {own.HPC_OPS_BLOCK_SIZE}, got {quant_info.block_shape}")
        output = hpc.fuse_moe_blockwise(
            x, None, quant_info.w13_weight, quant_info.w13_weight_scale_inv, quant_info.w2_weight,
            quant_info.w2_weight_scale_inv, *routing, routed_scaling_factor=scaling,
        )  # fmt: skip
    else:
        output = hpc.fuse_moe(
            x, quant_info.w13_weight, quant_info.w2_weight, quant_info.gate_up_alphas, quant_info.down_alphas,
            quant_info.w2_input_scale.reshape(1).reciprocal(), *routing,
            input_scale=quant_info.w13_input_scale.reshape(1), routed_scaling_factor=scaling,
        )  # fmt: skip
    return standard.StandardCombineInput(hidden_states=output)
