"""The same functions as `torch.ops.hpc.*`, for tracing. Eager calls bypass the dispatcher.

An op never returns an alias of an input: the default overloads return fresh queries, the `.out` overloads write the
given `out_q`. A scale that does not exist is an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch

_HEAD = (
    "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor qkv, Tensor cos_sin, Tensor num_seqlen_per_req, "
    "Tensor q_index, Tensor kvcache_indices, bool is_prefill, "
)
_NORM = "Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, "
_KEEP = "Tensor(c!)? out_k=None, Tensor(d!)? out_v=None, int qk_norm_policy=0, float eps=1e-6, bool is_neox_style=True"
_QUANT = (
    "Tensor? k_scale, Tensor? v_scale, int quant_policy, int max_seqlens=0, float? upper_max=None, "
    "Tensor? q_scale_inv=None, "
)
_OUT = ", *, Tensor(e!) out_q"
_QUERY = "Tensor q, Tensor? q_index=None, int max_seqlens=0, float? upper_max=None"

_LIBRARY = torch.library.Library("hpc", "FRAGMENT")
_LIBRARY.define(f"rope_norm_store_kv({_HEAD}{_NORM}{_KEEP}) -> Tensor")
_LIBRARY.define(f"rope_norm_store_kv.out({_HEAD}{_NORM}{_KEEP}{_OUT}) -> ()")
_LIBRARY.define(f"rope_norm_store_kv_fp8({_HEAD}{_QUANT}{_NORM}{_KEEP}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"rope_norm_store_kv_fp8.out({_HEAD}{_QUANT}{_NORM}{_KEEP}{_OUT}) -> (Tensor, Tensor)")
_LIBRARY.define(f"quantize_query_fp8({_QUERY}) -> (Tensor, Tensor)")
_LIBRARY.define(f"quantize_query_fp8.out({_QUERY}, *, Tensor(a!) out_q) -> Tensor")

_FP8 = torch.float8_e4m3fn


def _run(
    function: str, head: tuple[Any, ...], norm: tuple[Any, ...], keep: tuple[Any, ...], out_q: Any
) -> Any:
    from hpc.rope import entry
    from hpc.rope.validate import Arguments

    out_k, out_v, policy, eps, neox = keep
    rest: dict[str, Any] = {
        "q_norm_weight": norm[0], "k_norm_weight": norm[1], "out_q": out_q, "out_k": out_k, "out_v": out_v,
        "qk_norm_policy": policy, "eps": eps, "is_neox_style": neox,
    }  # fmt: skip
    x = Arguments(**dict(zip(Arguments._fields, (function, *head), strict=False)), **rest)
    return entry.prologue(x)


def _bf16(key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices, is_prefill,
          q_norm_weight=None, k_norm_weight=None, out_k=None, out_v=None, qk_norm_policy=0, eps=1e-6,
          is_neox_style=True, out_q=None):  # type: ignore[no-untyped-def]  # fmt: skip
    head = (key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices, is_prefill)
    keep = (out_k, out_v, qk_norm_policy, eps, is_neox_style)
    return _run("rope_norm_store_kv", head, (q_norm_weight, k_norm_weight), keep, out_q)[0]


def _fp8(key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices, is_prefill, k_scale,
         v_scale, quant_policy, max_seqlens=0, upper_max=None, q_scale_inv=None, q_norm_weight=None, k_norm_weight=None,
         out_k=None, out_v=None, qk_norm_policy=0, eps=1e-6, is_neox_style=True, out_q=None):  # type: ignore[no-untyped-def]  # fmt: skip
    head = (key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices, is_prefill, k_scale,
            v_scale, quant_policy, max_seqlens, upper_max, q_scale_inv)  # fmt: skip
    keep = (out_k, out_v, qk_norm_policy, eps, is_neox_style)
    queries, scale, flag = _run("rope_norm_store_kv_fp8", head, (q_norm_weight, k_norm_weight), keep, out_q)
    return queries, _no_scale(qkv) if scale is None else scale, flag


def _query(q, q_index=None, max_seqlens=0, upper_max=None, out_q=None):  # type: ignore[no-untyped-def]
    from hpc.rope import entry

    return entry.quantize("quantize_query_fp8", q, q_index, max_seqlens, upper_max, out_q)


def _no_scale(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=like.device)


def _empty_queries(key_cache: torch.Tensor, value_cache: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
    kv_heads, dim = key_cache.shape[2:]
    heads = (qkv.shape[1] - kv_heads * (dim + value_cache.shape[3])) // dim
    dtype = _FP8 if key_cache.dtype == _FP8 else torch.bfloat16
    return torch.empty((qkv.shape[0], heads, dim), dtype=dtype, device=qkv.device)


def _bf16_fake(key_cache, value_cache, qkv, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _empty_queries(key_cache, value_cache, qkv)


def _fp8_fake(key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices, is_prefill, k_scale,
              v_scale, quant_policy, max_seqlens=0, *args, **kwargs):  # type: ignore[no-untyped-def]  # fmt: skip
    queries, requests = _empty_queries(key_cache, value_cache, qkv), num_seqlen_per_req.shape[0]
    scale = _no_scale(qkv)
    if quant_policy == 1:
        scale = scale.new_empty(_scale_shape(queries, requests if is_prefill else None, max_seqlens))
    flag = torch.empty((requests, key_cache.shape[2]), dtype=torch.int32, device=qkv.device)
    return queries, scale, flag


def _query_fake(q, q_index=None, max_seqlens=0, upper_max=None, out_q=None):  # type: ignore[no-untyped-def]
    requests = None if q_index is None else q_index.shape[0] - 1
    scale = _no_scale(q).new_empty(_scale_shape(q, requests, max_seqlens))
    return torch.empty(q.shape, dtype=_FP8, device=q.device), scale


def _scale_shape(queries: torch.Tensor, requests: int | None, max_seqlens: int) -> tuple[int, ...]:
    if requests is None:
        return tuple(queries.shape[:2])
    return requests, queries.shape[1], (max_seqlens + 127) // 128 * 128


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _register() -> None:
    def bf16_out(*args: Any, **kwargs: Any) -> None:
        _bf16(*args, **kwargs)

    def but_first(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs)[1:]

    def second(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs)[1]

    for name, run, fake in (
        ("rope_norm_store_kv", _bf16, _bf16_fake),
        ("rope_norm_store_kv.out", bf16_out, _nothing),
        ("rope_norm_store_kv_fp8", _fp8, _fp8_fake),
        ("rope_norm_store_kv_fp8.out", but_first(_fp8), but_first(_fp8_fake)),
        ("quantize_query_fp8", _query, _query_fake),
        ("quantize_query_fp8.out", second(_query), second(_query_fake)),
    ):
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hpc::{name}", fake, lib=_LIBRARY)


_register()


def traced(args: tuple[Any, ...], out_q: torch.Tensor | None, *keep: Any) -> torch.Tensor:
    """`rope_norm_store_kv` as a node of the traced graph; `args` up to the norm weights."""
    if out_q is None:
        queries: torch.Tensor = torch.ops.hpc.rope_norm_store_kv.default(*args, *keep)
        return queries
    torch.ops.hpc.rope_norm_store_kv.out(*args, *keep, out_q=out_q)
    return out_q


def traced_fp8(
    args: tuple[Any, ...], out_q: torch.Tensor | None, *keep: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`rope_norm_store_kv_fp8` as a node of the traced graph; `args` up to the norm weights."""
    scales = tuple(_as_tensor(scale, args[2]) for scale in args[8:10])
    args = (*args[:8], *scales, *args[10:])
    if out_q is None:
        out_q, scale, flag = torch.ops.hpc.rope_norm_store_kv_fp8.default(*args, *keep)
    else:
        scale, flag = torch.ops.hpc.rope_norm_store_kv_fp8.out(*args, *keep, out_q=out_q)
    return out_q, None if args[10] == 2 else scale, flag


def traced_query(
    q: torch.Tensor, q_index: torch.Tensor | None, max_seqlens: int, upper_max: float | None,
    out_q: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`quantize_query_fp8` as a node of the traced graph."""
    args = (q, q_index, max_seqlens, upper_max)
    if out_q is None:
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.hpc.quantize_query_fp8.default(*args)
        return result
    return out_q, torch.ops.hpc.quantize_query_fp8.out(*args, out_q=out_q)


def _as_tensor(scale: Any, like: torch.Tensor) -> Any:
    """A number as a tensor: the op's schema takes tensors only."""
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return torch.full((1,), float(scale), dtype=torch.float32, device=like.device)
    return scale
