"""FlashAttention-3 as shipped in sglang-kernel: paged decode with its own split heuristic."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from hpc.bench.providers import CannotRun, Provider
from hpc.bench.rivals.decode import DecodeInputs, repack, rival_tolerance
from hpc.common import arch

# The page size at which its TMA path runs for head_dim 128.
PAGE_SIZE = 128
HEAD_DIMS = (64, 128, 256)


def available() -> str | None:
    """Why FlashAttention-3 cannot run here, or None."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return "not installed: pip install sglang-kernel"
    if not arch.gpu_available() or not arch.is_hopper("cuda"):
        return "needs a Hopper GPU"
    try:
        importlib.import_module("sgl_kernel.flash_attn")
    except Exception as error:
        return f"sgl_kernel.flash_attn does not import: {type(error).__name__}: {error}"
    return None


def provider(adapt: Callable[[Any], DecodeInputs], name: str = "fa3") -> Provider:
    """A provider for an operator whose inputs ``adapt`` turns into :class:`DecodeInputs`."""
    return Provider(
        name=name,
        prepare=lambda inputs: prepare(adapt(inputs)),
        available=available,
        tolerance=lambda inputs: rival_tolerance(adapt(inputs)),
        note=f"page size {PAGE_SIZE}; float8 queries have one scale per request and KV head",
    )


def prepare(inputs: DecodeInputs) -> Callable[[], torch.Tensor]:
    """Repack the cache to its page size; the returned call gives ``[B * S, Hq, Dv]`` bfloat16."""
    if inputs.sinks is not None or inputs.logit_cap is not None:
        raise CannotRun("sinks and logit caps are not compared")
    if inputs.key_scales_per_token:
        raise CannotRun("reads no per-token key scales")
    head_dim = inputs.q.shape[2]
    if head_dim not in HEAD_DIMS or inputs.vcache.shape[3] != head_dim:
        raise CannotRun(f"compared with head_dim {', '.join(map(str, HEAD_DIMS))} for keys and values alike")
    flash_attn_with_kvcache = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    kcache, vcache, table, _ = repack(inputs, PAGE_SIZE)
    rows, num_heads, _ = inputs.q.shape
    num_kv_heads = kcache.shape[2]
    q, q_descale = _queries(inputs, num_kv_heads)
    lens = torch.tensor(inputs.lens, dtype=torch.int32, device=q.device)
    call = {
        "q": q.view(inputs.batch, inputs.num_new_tokens, num_heads, head_dim),
        "k_cache": kcache,
        "v_cache": vcache,
        "cache_seqlens": lens,
        "page_table": table,
        "q_descale": q_descale,
        "k_descale": _per_request(inputs.kscale, inputs.batch, num_kv_heads),
        "v_descale": _per_request(inputs.vscale, inputs.batch, num_kv_heads),
        "softmax_scale": inputs.softmax_scale,
        "causal": True,
        "window_size": (-1, -1) if inputs.window is None else (inputs.window - 1, 0),
        "num_splits": 0,
    }

    def decode() -> torch.Tensor:
        out: torch.Tensor = flash_attn_with_kvcache(**call)
        return out.view(rows, num_heads, -1)

    return decode


def _queries(inputs: DecodeInputs, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float8 queries requantised: the kernel takes one scale per request and KV head, not one per head."""
    if not inputs.is_fp8:
        return inputs.q.contiguous(), None
    rows, num_heads, head_dim = inputs.q.shape
    shape = (inputs.batch, inputs.num_new_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    values = inputs.q_float().view(shape)
    scale = values.abs().amax(dim=(1, 3, 4), keepdim=True).clamp_min(1e-6) / 448.0
    q8 = (values / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return q8.view(rows, num_heads, head_dim), scale.view(inputs.batch, num_kv_heads).contiguous()


def _per_request(scale: torch.Tensor | None, batch: int, num_kv_heads: int) -> torch.Tensor | None:
    return None if scale is None else scale.reshape(1, -1).expand(batch, num_kv_heads).contiguous()
