"""To which part of a step a kernel belongs, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

STAGES: tuple[tuple[str, str], ...] = (
    ("experts", r"_moe_|fused_moe|moe_align|moe_sum|count_and_sort|fuse_moe|group_gemm"),
    ("activation", r"act_and_mul|[Aa]ctivation"),
    ("router", r"_router|topk|gate|grouped_topk"),
    ("prologue", r"rope|rotary|_prologue|qknorm|qk_norm|store_cache|StoreKV|kv_cache|set_kv|_store|quantize_query"),
    (
        "attention",
        r"attention|_decode_|_prefill_|[Ff]lash|_assign|prepare_varlen|_merge|Combine|page_table|graph_metadata",
    ),
    ("dense FP8 products", r"scaled_mm|cutlass.*e4m3|_w8a8|deep_gemm|fp8_gemm|sm90_fp8"),
    ("other products", r"gemm|gemv|nvjet|cutlass|cublas|splitK"),
    ("quantisation", r"quant"),
    ("norms", r"[Nn]orm"),
)  # fmt: skip
"""First match counts. SGLang's experts use the activation kernel of its dense layers, so that is a part of its own."""


def stage_of(kernel: str) -> str:
    """Name of a stage; "other" for copies, additions, sampling."""
    return next((stage for stage, pattern in STAGES if re.search(pattern, kernel)), "other")


def alone(runs: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, int]]:
    """(time, launches) of each kernel of runs (name, start, end), each instant counted once.

    A kernel that is launched before its predecessor ends stands waiting for it, so an instant belongs to the kernel
    that has been there longest. The sum is the time in which the GPU is busy.
    """
    found: dict[str, tuple[float, int]] = {}
    until = float("-inf")
    for name, start, end in sorted(runs, key=lambda run: run[1:]):
        time, launches = found.get(name, (0.0, 0))
        found[name] = (time + max(0.0, end - max(start, until)), launches + 1)
        until = max(until, end)
    return found


def by_stage(kernels: Iterable[list[Any]]) -> dict[str, float]:
    """Microseconds of each stage of rows [name, microseconds, launches]."""
    times: dict[str, float] = {}
    for name, microseconds, _ in kernels:
        stage = stage_of(name)
        times[stage] = round(times.get(stage, 0.0) + microseconds, 2)
    return dict(sorted(times.items(), key=lambda item: -item[1]))
