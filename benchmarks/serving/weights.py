"""Random weights by which two sets of kernels can be compared; SGLang's plugin `hpc_bench_weights`.

With `--load-format dummy` SGLang draws every tensor from +-1e-3, scales included: in FP8 nearly all codes are then zero
and scales have random signs. Here a tensor depends on its name alone, so every process has the same model, activations
stay near one from layer to layer, and FP8 weights use the format's range:

    codes ~ N(0, 32^2) cut at 448,  scale = 1 / (32 sqrt(fan in))   so that a product of unit inputs is a unit output
    norms 1; those of queries and keys 1.5: logits of attention then have a standard deviation of 2.25 and a token
    attends to a few others. With unit norms it would average hundreds of values to nothing, and hide an error.
"""

from __future__ import annotations

import importlib
import math
import zlib
from typing import Any

import torch

TARGET = "sglang.srt.model_loader.loader.initialize_dummy_weights"
CODES = 32.0  # standard deviation of e4m3 codes
ACTIVATION_SCALE = 16.0 / 448.0  # static scale of activations: values up to 16
PEAKED = 1.5  # weights of the norms of queries and keys
LOGITS = 4.0  # standard deviation of the logits
KEPT = ("k_scale", "v_scale", "kv_scale", "inv_freq", "cos_sin_cache")  # SGLang's own defaults are right


def register() -> None:
    """Entry point of the plugin: SGLang calls it in each of its processes."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(TARGET, fill, hooks.HookType.REPLACE)


def fill(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Write all floating tensors of a model."""
    state = model.state_dict()
    for name, tensor in state.items():
        leaf = name.rpartition(".")[2]
        if tensor.is_floating_point() and tensor.numel() and not leaf.endswith(KEPT):
            _fill(name, leaf, tensor.data, state)


def _fill(name: str, leaf: str, tensor: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
    if leaf.endswith("input_scale"):
        tensor.fill_(ACTIVATION_SCALE)
    elif "scale" in leaf:
        _fill_scale(name, tensor, state, generator)
    elif "bias" in leaf:
        _normal(tensor, 1e-3, generator)  # corrections of the router's choice stay small beside its scores
    elif tensor.dim() <= 1:
        tensor.fill_(PEAKED if ".q_norm" in name or ".k_norm" in name else 1.0)
    elif tensor.element_size() == 1:
        _normal(tensor, CODES, generator)
    elif "embed" in name:
        _normal(tensor, 1.0, generator)
    else:
        _normal(tensor, (LOGITS if "lm_head" in name else 1.0) / math.sqrt(tensor.shape[-1]), generator)


def _fill_scale(
    name: str, tensor: torch.Tensor, state: dict[str, torch.Tensor], generator: torch.Generator
) -> None:
    """Scales of a weight: block by block up to 25 % apart; otherwise one an expert or layer, so that the shards of a
    fused weight share theirs and are not requantised."""
    weight = state.get(name.replace("_scale_inv", "").replace("_scale", ""))
    fan_in = 4096 if weight is None else weight.shape[-1]
    codes = CODES if weight is not None and weight.element_size() == 1 else 1.0
    blocks = name.endswith("_scale_inv")
    shape = tensor.shape if blocks else (*tensor.shape[:1], *(1 for _ in tensor.shape[1:]))
    spread = torch.rand(shape, generator=generator, device=tensor.device)
    if not blocks and tensor.dim() < 2 and "expert" not in name:
        spread.fill_(0.5)
    tensor.copy_(((0.75 + 0.5 * spread) / (codes * math.sqrt(fan_in))).expand(tensor.shape))


def _normal(tensor: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Normal numbers, drawn by the first dimension so that a stack of experts needs little room beside itself."""
    rows = max(1, (1 << 27) // max(1, tensor[0].numel())) if tensor.dim() > 1 else tensor.numel()
    for part in tensor.split(rows):
        values = torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.float32).mul_(
            std
        )
        part.copy_((values.clamp_(-448.0, 448.0) if part.element_size() == 1 else values).to(part.dtype))
