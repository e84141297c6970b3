"""Products with dense weights: the public names of every folder below, loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time the table below decides
    from hpc.gemm.router.api import (
        gemm_bf16xfp32,
        get_gemm_bf16xfp32_workspace,
        router_topk,
        split_router_weight,
    )
    from hpc.gemm.router.weight import RouterWeight

_ROUTER = "hpc.gemm.router.api"

# Public name -> the module that holds it.
_PUBLIC: dict[str, str] = {
    "RouterWeight": "hpc.gemm.router.weight",
    "gemm_bf16xfp32": _ROUTER,
    "get_gemm_bf16xfp32_workspace": _ROUTER,
    "router_topk": _ROUTER,
    "split_router_weight": _ROUTER,
}

__all__ = [
    "RouterWeight",
    "gemm_bf16xfp32",
    "get_gemm_bf16xfp32_workspace",
    "router_topk",
    "split_router_weight",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'hpc.gemm' has no attribute {name!r}")
    from hpc.common import env

    env.require_versions()
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
