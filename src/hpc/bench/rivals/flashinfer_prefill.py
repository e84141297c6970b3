"""FlashInfer's batch prefill with its kernels for Hopper (backend "fa3"), over pages and over contiguous keys.

They take FP8 queries with one scale a head, keys and values with one a tensor, and quantise probabilities to e4m3.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from hpc.bench.providers import CannotRun, Provider
from hpc.bench.rivals import flashinfer
from hpc.bench.rivals.prefill import neutral, refuse_special, tolerance
from hpc.common import arch
from hpc.testing.buffers import bit_view

HEAD_DIMS = (64, 128, 256)
PAGE_SIZE = flashinfer.MAX_PAGE_SIZE
E4M3_MAX = 448.0


def providers() -> list[Provider]:
    """Both, for inputs of `hpc.attention.prefill.cases`."""
    scales = "float8 queries have one scale per head"
    return [
        Provider("flashinfer", paged, available, tolerance, f"page size {PAGE_SIZE}; {scales}"),
        Provider("flashinfer ragged", ragged, available, tolerance, f"contiguous keys, no paging; {scales}"),
    ]


def available() -> str | None:
    """Why it cannot run here, or None."""
    reason = flashinfer.available()
    return "needs a Hopper GPU" if reason is None and not arch.is_hopper("cuda") else reason


def paged(inputs: Any) -> Callable[[], torch.Tensor]:
    """Keys in pages; the call gives ``[total, Hq, D]`` bfloat16."""
    _refuse(inputs)
    if inputs.params.page_size == 0:
        raise CannotRun("compared over pages only")
    pages = flashinfer.pack(neutral(inputs), PAGE_SIZE)
    wrapper = _wrapper("BatchPrefillWithPagedKVCacheWrapper", inputs)
    wrapper.plan(
        inputs.cu_seqlens.cpu(),
        pages.indptr,
        pages.indices,
        pages.last_page_len,
        page_size=PAGE_SIZE,
        **_options(inputs),
    )
    return _call(wrapper, inputs, (pages.kcache, pages.vcache))


def ragged(inputs: Any) -> Callable[[], torch.Tensor]:
    """Keys of all requests behind one another, gathered before; the call gives ``[total, Hq, D]`` bfloat16."""
    _refuse(inputs)
    if inputs.params.page_size == 0:
        keys, kv_indptr = (inputs.k, inputs.v), inputs.cu_seqlens.cpu()
    else:
        # pages of one token, in the order of the list, are contiguous keys
        pages = flashinfer.pack(neutral(inputs), 1)
        order = pages.indices.long()
        keys = (_rows(pages.kcache, order), _rows(pages.vcache, order))
        kv_indptr = pages.indptr
    wrapper = _wrapper("BatchPrefillWithRaggedKVCacheWrapper", inputs)
    wrapper.plan(inputs.cu_seqlens.cpu(), kv_indptr, **_options(inputs))
    return _call(wrapper, inputs, *keys)


def _refuse(inputs: Any) -> None:
    refuse_special(inputs)
    params = inputs.params
    if params.head_dim not in HEAD_DIMS or params.value_dim != params.head_dim:
        raise CannotRun("compared with head_dim 64, 128, 256 for keys and values alike")
    if min(keys for _, keys in params.lens) == 0:
        raise CannotRun("empty requests are not compared")


def _wrapper(name: str, inputs: Any) -> Any:
    workspace = torch.zeros(flashinfer.WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.q.device)
    return getattr(importlib.import_module("flashinfer"), name)(workspace, "NHD", backend="fa3")


def _options(inputs: Any) -> dict[str, Any]:
    """What both plans take alike."""
    params = inputs.params
    return {
        "num_qo_heads": params.q_heads, "num_kv_heads": params.kv_heads, "head_dim_qk": params.head_dim,
        "causal": True, "sm_scale": params.head_dim**-0.5, "q_data_type": inputs.q.dtype,
        "kv_data_type": inputs.k.dtype, "o_data_type": torch.bfloat16,
        "window_left": -1 if params.window is None else params.window - 1,
    }  # fmt: skip


def _call(wrapper: Any, inputs: Any, *keys: Any) -> Callable[[], torch.Tensor]:
    q: torch.Tensor = inputs.q.contiguous()
    scales: tuple[Any, ...] = ()
    if inputs.params.dtype == "fp8":
        q, per_head = queries_per_head(inputs)
        scales = (per_head, float(inputs.kscale), float(inputs.vscale))
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)

    def prefill() -> torch.Tensor:
        result: torch.Tensor = wrapper.run(q, *keys, *scales, out=out)
        return result

    return prefill


def queries_per_head(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 queries requantised with one scale a head for the whole batch; scales float32 ``[Hq]``."""
    lens = [n for n, _ in inputs.params.lens]
    token_scales = torch.cat([inputs.qscale[b, :, :n].T for b, n in enumerate(lens)])
    values = inputs.q.float() * token_scales[..., None]
    scale = values.abs().amax(dim=(0, 2)).clamp_min(1e-6) / E4M3_MAX
    quantised = (values / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return quantised, scale


def _rows(cache: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Pages of one token in `order`, ``[tokens, Hkv, D]``; by their bits, float8 has no gather."""
    bits, _ = bit_view(cache)
    return bits[order, 0].view(cache.dtype)
