"""Operators for LLM inference on NVIDIA Hopper, in Triton and Gluon.

The public functions are plain Python functions, listed in one table below and loaded on first use. So
`import hpc` reads no GPU, imports neither torch nor triton, and compiles nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpc._version import __version__

if TYPE_CHECKING:  # for editors and type checkers; at run time the table below decides
    from hpc.attention import (
        assign_attention_decode_task,
        attention_decode_bf16,
        attention_decode_fp8,
        attention_prefill_bf16,
        attention_with_kvcache_prefill_bf16,
        attention_with_kvcache_prefill_fp8,
        get_attention_decode_scratch_size,
        get_attention_decode_task_workspace,
        print_attention_decode_task,
    )
    from hpc.common.quant import QuantType
    from hpc.common.warmup import warmup
    from hpc.gemm import (
        RouterWeight,
        gemm_bf16xfp32,
        get_gemm_bf16xfp32_workspace,
        router_topk,
        split_router_weight,
    )
    from hpc.moe import (
        check_moe_weights,
        count_and_gather,
        fuse_moe,
        fuse_moe_bf16,
        fuse_moe_blockwise,
        fuse_moe_blockwise_fp8,
        fuse_moe_pertensor_fp8,
        get_fuse_moe_scratch_size,
        pad_moe_biases,
        pad_moe_weights,
        reduce,
    )
    from hpc.rope import quantize_query_fp8, rope_norm_store_kv, rope_norm_store_kv_fp8

    __built_json__: str

# Public name -> the module that holds it.
_PUBLIC: dict[str, str] = {
    "QuantType": "hpc.common.quant",
    "RouterWeight": "hpc.gemm",
    "assign_attention_decode_task": "hpc.attention",
    "attention_decode_bf16": "hpc.attention",
    "attention_decode_fp8": "hpc.attention",
    "attention_prefill_bf16": "hpc.attention",
    "attention_with_kvcache_prefill_bf16": "hpc.attention",
    "attention_with_kvcache_prefill_fp8": "hpc.attention",
    "check_moe_weights": "hpc.moe",
    "count_and_gather": "hpc.moe",
    "fuse_moe": "hpc.moe",
    "fuse_moe_bf16": "hpc.moe",
    "fuse_moe_blockwise": "hpc.moe",
    "fuse_moe_blockwise_fp8": "hpc.moe",
    "fuse_moe_pertensor_fp8": "hpc.moe",
    "get_fuse_moe_scratch_size": "hpc.moe",
    "pad_moe_biases": "hpc.moe",
    "pad_moe_weights": "hpc.moe",
    "reduce": "hpc.moe",
    "gemm_bf16xfp32": "hpc.gemm",
    "get_attention_decode_scratch_size": "hpc.attention",
    "get_attention_decode_task_workspace": "hpc.attention",
    "get_gemm_bf16xfp32_workspace": "hpc.gemm",
    "print_attention_decode_task": "hpc.attention",
    "quantize_query_fp8": "hpc.rope",
    "rope_norm_store_kv": "hpc.rope",
    "rope_norm_store_kv_fp8": "hpc.rope",
    "router_topk": "hpc.gemm",
    "split_router_weight": "hpc.gemm",
    "warmup": "hpc.common.warmup",
}

# Submodules that can be reached as attributes without an import of their own.
_MODULES = ("attention", "bench", "common", "gemm", "moe", "rope", "testing")

__all__ = [
    "QuantType",
    "RouterWeight",
    "__built_json__",
    "__version__",
    "assign_attention_decode_task",
    "attention_decode_bf16",
    "attention_decode_fp8",
    "attention_prefill_bf16",
    "attention_with_kvcache_prefill_bf16",
    "attention_with_kvcache_prefill_fp8",
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
    "gemm_bf16xfp32",
    "get_attention_decode_scratch_size",
    "get_attention_decode_task_workspace",
    "get_gemm_bf16xfp32_workspace",
    "print_attention_decode_task",
    "quantize_query_fp8",
    "rope_norm_store_kv",
    "rope_norm_store_kv_fp8",
    "router_topk",
    "split_router_weight",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hpc.{name}")
    from hpc.common import env

    if name == "__built_json__":
        return env.built_json()
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'hpc' has no attribute {name!r}")
    env.require_versions()
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_MODULES, "__built_json__"})
