"""Checks of a prologue call. Metadata only; a signature that passed once is not checked again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hpc.common import arch, checks
from hpc.common.errors import fail

FP8, BF16, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.int32
MIN_HEAD_DIM, MAX_HEAD_DIM, FP8_MAX = 16, 256, 448.0


class Arguments(NamedTuple):
    """The arguments of `rope_norm_store_kv_fp8` (and, without scales, of `rope_norm_store_kv`), in their order."""

    function: str
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    qkv: torch.Tensor
    cos_sin: torch.Tensor
    seq_lens: torch.Tensor
    q_index: torch.Tensor
    block_ids: torch.Tensor
    is_prefill: bool
    k_scale: Any = None
    v_scale: Any = None
    quant_policy: int = 0
    max_seqlens: int = 0
    upper_max: float | None = None
    q_scale_inv: torch.Tensor | None = None
    q_norm_weight: torch.Tensor | None = None
    k_norm_weight: torch.Tensor | None = None
    out_q: torch.Tensor | None = None
    out_k: torch.Tensor | None = None
    out_v: torch.Tensor | None = None
    qk_norm_policy: int = 0
    eps: float = 1e-6
    is_neox_style: bool = True

    @property
    def fp8(self) -> bool:
        return self.function == "rope_norm_store_kv_fp8"


def call(x: Arguments) -> int:
    """Check every argument; the number of query heads."""
    name = x.function
    checks.dtype(name, "qkv", x.qkv, BF16)
    _caches(x)
    kv_heads, head_dim = x.key_cache.shape[2:]
    v_dim = x.value_cache.shape[3]
    checks.ndim(name, "qkv", x.qkv, 2, "Pass the projection's output, [tokens, q heads | k heads | v heads].")
    checks.inner_contiguous(name, "qkv", x.qkv)
    rest = x.qkv.shape[1] - kv_heads * (head_dim + v_dim)
    if rest < head_dim or rest % head_dim:
        expected = f"a width of q heads * {head_dim} + {kv_heads} * {head_dim} + {kv_heads} * {v_dim}"
        remedy = "The number of query heads follows from the width and the caches' shapes."
        fail(name, "qkv", expected=expected, got=f"{x.qkv.shape[1]}", remedy=remedy)
    _index(x)
    _rotation(x)
    if x.fp8:
        _quantisation(x)
    rows, q_heads = x.qkv.shape[0], rest // head_dim
    stored = FP8 if x.fp8 else BF16
    for label, tensor, shape in (
        ("out_q", x.out_q, (rows, q_heads, head_dim)),
        ("out_k", x.out_k, (rows, kv_heads, head_dim)),
        ("out_v", x.out_v, (rows, kv_heads, v_dim)),
    ):
        if tensor is not None:
            checks.dtype(name, label, tensor, stored)
            checks.shape(name, label, tensor, shape)
            checks.inner_contiguous(name, label, tensor)
            checks.same_device(name, label, tensor, x.qkv.device)
    if x.qkv.is_cuda:
        arch.require_gpu(name, x.qkv.device)
    return q_heads


def _caches(x: Arguments) -> None:
    name, stored = x.function, FP8 if x.fp8 else BF16
    other = "rope_norm_store_kv" if x.fp8 else "rope_norm_store_kv_fp8"
    for label, cache in (("key_cache", x.key_cache), ("value_cache", x.value_cache)):
        checks.dtype(name, label, cache, stored, f"See hpc.{other} for the other format.")
        remedy = "Pass caches as [num_pages, page_size, num_kv_heads, head_dim]; an HND buffer by permute(0, 2, 1, 3)."
        checks.ndim(name, label, cache, 4, remedy)
        checks.inner_contiguous(name, label, cache)
        checks.same_device(name, label, cache, x.qkv.device)
        dim = cache.shape[3]
        if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM or dim % 8:
            expected = f"a head dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, a multiple of 8"
            fail(name, label, expected=expected, got=dim, remedy="Pad the heads with zeros.")
    shape = (*x.key_cache.shape[:3], "v_head_dim")
    checks.shape(name, "value_cache", x.value_cache, shape, "K and V share pages and heads.")
    if x.key_cache.shape[1] < 1 or x.key_cache.shape[2] < 1:
        got = list(x.key_cache.shape)
        fail(name, "key_cache", expected="at least one token a page and one KV head", got=got)


def _index(x: Arguments) -> None:
    name = x.function
    for label, tensor in (
        ("num_seqlen_per_req", x.seq_lens),
        ("q_index", x.q_index),
        ("kvcache_indices", x.block_ids),
    ):
        checks.dtype(name, label, tensor, I32, "Convert with .to(torch.int32).")
        checks.same_device(name, label, tensor, x.qkv.device)
    checks.ndim(
        name, "num_seqlen_per_req", x.seq_lens, 1, "Pass one length a request, the new tokens included."
    )
    requests = x.seq_lens.shape[0]
    checks.shape(
        name, "q_index", x.q_index, (requests + 1,), "Prefix sums of the new tokens, one more than requests."
    )
    checks.shape(name, "kvcache_indices", x.block_ids, (requests, "max_pages"), "Pass one row a request.")
    checks.contiguous(name, "num_seqlen_per_req", x.seq_lens)
    checks.contiguous(name, "q_index", x.q_index)
    checks.inner_contiguous(name, "kvcache_indices", x.block_ids)


def _rotation(x: Arguments) -> None:
    name, head_dim = x.function, x.key_cache.shape[3]
    checks.dtype(name, "cos_sin", x.cos_sin, (torch.float32, BF16))
    checks.ndim(name, "cos_sin", x.cos_sin, 2, "Pass [max_position, rotary_dim]: cosines, then sines.")
    checks.inner_contiguous(name, "cos_sin", x.cos_sin)
    checks.same_device(name, "cos_sin", x.cos_sin, x.qkv.device)
    rotary = x.cos_sin.shape[1]
    if rotary < 2 or rotary % 2 or rotary > head_dim:
        expected = f"an even width of 2 to {head_dim}, the head dim"
        fail(
            name, "cos_sin", expected=expected, got=rotary, remedy="Its width is the number of rotated dims."
        )
    if x.cos_sin.shape[0] == 0:
        fail(
            name,
            "cos_sin",
            expected="at least one position",
            got=0,
            remedy="Build the table for the model's length.",
        )
    checks.one_of(
        name, "qk_norm_policy", x.qk_norm_policy, (0, 1, 2), "0 none, 1 rotate then norm, 2 norm then rotate."
    )
    for label, weight in (("q_norm_weight", x.q_norm_weight), ("k_norm_weight", x.k_norm_weight)):
        if weight is None and x.qk_norm_policy == 0:
            continue
        remedy = "A norm needs its weight, float32; pass ones for none."
        checks.dtype(name, label, weight, torch.float32, remedy)  # type: ignore[arg-type]
        assert weight is not None
        checks.shape(name, label, weight, (head_dim,))
        checks.contiguous(name, label, weight)
        checks.same_device(name, label, weight, x.qkv.device)
    if not _is_number(x.eps) or not 0 <= x.eps < float("inf"):
        fail(name, "eps", expected="a number that is not negative", got=repr(x.eps))


def _quantisation(x: Arguments) -> None:
    name = x.function
    checks.one_of(
        name, "quant_policy", x.quant_policy, (1, 2), "1 scales each query head, 2 takes q_scale_inv."
    )
    scale(name, "k_scale", x.k_scale, x.qkv.device)
    scale(name, "v_scale", x.v_scale, x.qkv.device)
    upper(name, x.upper_max)
    if x.quant_policy == 2:
        checks.is_tensor(name, "q_scale_inv", x.q_scale_inv, "Policy 2 multiplies by its element 0.")
        assert x.q_scale_inv is not None
        checks.dtype(name, "q_scale_inv", x.q_scale_inv, torch.float32)
        if x.q_scale_inv.numel() < 1:
            fail(name, "q_scale_inv", expected="at least one element", got=list(x.q_scale_inv.shape))
        checks.same_device(name, "q_scale_inv", x.q_scale_inv, x.qkv.device)
    elif x.is_prefill:
        columns(name, x.max_seqlens, x.qkv.shape[0])


def scale(function: str, name: str, value: Any, device: torch.device) -> tuple[torch.Tensor | None, float]:
    """A dequantisation scale as (tensor on the device, or None, and a number): None is 1, a CPU tensor is its value."""
    if value is None:
        return None, 1.0
    if _is_number(value):
        return None, float(value)
    remedy = "Pass a float32 tensor of one element, a number, or None for 1."
    checks.dtype(function, name, value, torch.float32, remedy)
    if value.numel() != 1:
        fail(function, name, expected="one element", got=list(value.shape), remedy=remedy)
    if value.device.type == "cpu" and device.type == "cuda":
        return None, float(value)  # no synchronisation: its memory is the host's
    checks.same_device(function, name, value, device)
    return value, 1.0


def upper(function: str, value: Any) -> float:
    """`upper_max` as a number."""
    if value is None:
        return FP8_MAX
    if not _is_number(value) or not 0 < value <= FP8_MAX:
        remedy = "It is the largest code that a scaled query takes."
        fail(function, "upper_max", expected="a number above 0 and up to 448", got=repr(value), remedy=remedy)
    return float(value)


def columns(function: str, max_seqlens: Any, rows: int) -> int:
    """Columns of prefill scales, `max_seqlens` rounded up to a multiple of 128."""
    remedy = "Pass the longest request's number of new tokens: it sizes q_scale."
    number = checks.int_range(
        function, "max_seqlens", max_seqlens, 0 if rows == 0 else 1, 2**31 - 129, remedy
    )
    return -(-number // 128) * 128


def query(
    function: str, q: torch.Tensor, q_index: torch.Tensor | None, max_seqlens: int, upper_max: Any,
    out_q: torch.Tensor | None,
) -> int:  # fmt: skip
    """Checks of `quantize_query_fp8`; columns of its scales, 0 without `q_index`."""
    checks.dtype(function, "q", q, BF16)
    checks.ndim(function, "q", q, 3, "Pass q as [tokens, heads, head_dim].")
    checks.inner_contiguous(function, "q", q)
    if not MIN_HEAD_DIM <= q.shape[2] <= MAX_HEAD_DIM or q.shape[2] % 8 or q.shape[1] < 1:
        expected = f"one head or more of {MIN_HEAD_DIM} to {MAX_HEAD_DIM} values, a multiple of 8"
        fail(function, "q", expected=expected, got=list(q.shape))
    upper(function, upper_max)
    if out_q is not None:
        checks.dtype(function, "out_q", out_q, FP8)
        checks.shape(function, "out_q", out_q, tuple(q.shape))
        checks.inner_contiguous(function, "out_q", out_q)
        checks.same_device(function, "out_q", out_q, q.device)
    if q.is_cuda:
        arch.require_gpu(function, q.device)
    if q_index is None:
        return 0
    checks.dtype(function, "q_index", q_index, I32, "Convert with .to(torch.int32).")
    checks.ndim(function, "q_index", q_index, 1, "Prefix sums of the requests' tokens.")
    checks.contiguous(function, "q_index", q_index)
    checks.same_device(function, "q_index", q_index, q.device)
    if q_index.shape[0] < 1:
        fail(function, "q_index", expected="at least one entry", got=0, remedy="It starts with 0.")
    return columns(function, max_seqlens, q.shape[0])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
