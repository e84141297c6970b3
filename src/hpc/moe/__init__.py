"""Fused MoE: the public names, loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time the table below decides
    from hpc.moe.api import fuse_moe, fuse_moe_blockwise, fuse_moe_blockwise_fp8, fuse_moe_pertensor_fp8
    from hpc.moe.api_bf16 import fuse_moe_bf16
    from hpc.moe.api_parts import count_and_gather, reduce
    from hpc.moe.api_setup import (
        check_moe_weights,
        get_fuse_moe_scratch_size,
        pad_moe_biases,
        pad_moe_weights,
    )

# Public name -> the module that holds it.
_PUBLIC: dict[str, str] = {
    "check_moe_weights": "hpc.moe.api_setup",
    "count_and_gather": "hpc.moe.api_parts",
    "fuse_moe": "hpc.moe.api",
    "fuse_moe_bf16": "hpc.moe.api_bf16",
    "fuse_moe_blockwise": "hpc.moe.api",
    "fuse_moe_blockwise_fp8": "hpc.moe.api",
    "fuse_moe_pertensor_fp8": "hpc.moe.api",
    "get_fuse_moe_scratch_size": "hpc.moe.api_setup",
    "pad_moe_biases": "hpc.moe.api_setup",
    "pad_moe_weights": "hpc.moe.api_setup",
    "reduce": "hpc.moe.api_parts",
}

__all__ = [
    "check_moe_weights",
    "count_and_gather",
    "fuse_moe",
    "fuse_moe_bf16",
    "fuse_moe_blockwise",
    "fuse_moe_blockwise_fp8",
    "fuse_moe_pertensor_fp8",
    "get_fuse_moe_scratch_size",
    "pad_moe_biases",
    "pad_moe_weights",
    "reduce",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'hpc.moe' has no attribute {name!r}")
    from hpc.common import env

    env.require_versions()
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
