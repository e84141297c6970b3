"""Attention operators: the public names of every folder below, loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time the table below decides
    from hpc.attention.decode.api import attention_decode_bf16, attention_decode_fp8
    from hpc.attention.decode.api_tasks import (
        assign_attention_decode_task,
        get_attention_decode_scratch_size,
        get_attention_decode_task_workspace,
        print_attention_decode_task,
    )
    from hpc.attention.prefill.api import (
        attention_prefill_bf16,
        attention_with_kvcache_prefill_bf16,
        attention_with_kvcache_prefill_fp8,
    )

_DECODE = "hpc.attention.decode.api"
_TASKS = "hpc.attention.decode.api_tasks"
_PREFILL = "hpc.attention.prefill.api"

# Public name -> the module that holds it.
_PUBLIC: dict[str, str] = {
    "assign_attention_decode_task": _TASKS,
    "attention_decode_bf16": _DECODE,
    "attention_decode_fp8": _DECODE,
    "attention_prefill_bf16": _PREFILL,
    "attention_with_kvcache_prefill_bf16": _PREFILL,
    "attention_with_kvcache_prefill_fp8": _PREFILL,
    "get_attention_decode_scratch_size": _TASKS,
    "get_attention_decode_task_workspace": _TASKS,
    "print_attention_decode_task": _TASKS,
}

__all__ = [
    "assign_attention_decode_task",
    "attention_decode_bf16",
    "attention_decode_fp8",
    "attention_prefill_bf16",
    "attention_with_kvcache_prefill_bf16",
    "attention_with_kvcache_prefill_fp8",
    "get_attention_decode_scratch_size",
    "get_attention_decode_task_workspace",
    "print_attention_decode_task",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'hpc.attention' has no attribute {name!r}")
    from hpc.common import env

    env.require_versions()
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
