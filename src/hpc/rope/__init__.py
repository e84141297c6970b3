"""The attention prologue: QK-norm, rotary embedding, FP8 and the paged KV store, loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time the table below decides
    from hpc.rope.api import quantize_query_fp8, rope_norm_store_kv, rope_norm_store_kv_fp8

_API = "hpc.rope.api"

# Public name -> the module that holds it.
_PUBLIC: dict[str, str] = {
    "quantize_query_fp8": _API,
    "rope_norm_store_kv": _API,
    "rope_norm_store_kv_fp8": _API,
}

__all__ = ["quantize_query_fp8", "rope_norm_store_kv", "rope_norm_store_kv_fp8"]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'hpc.rope' has no attribute {name!r}")
    from hpc.common import env

    env.require_versions()
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
