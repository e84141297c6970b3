"""FlashInfer's batch decode over a paged cache. It compiles its kernels at first use (needs nvcc)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hpc.bench.providers import CannotRun, Provider
from hpc.bench.rivals.decode import DecodeInputs, repack, rival_tolerance
from hpc.common import arch

# Its documentation recommends 128 MiB of float workspace.
WORKSPACE_BYTES = 128 << 20
MAX_PAGE_SIZE = 64


def available() -> str | None:
    """Why FlashInfer cannot run here, or None."""
    if importlib.util.find_spec("flashinfer") is None:
        return "not installed: pip install flashinfer-python"
    if not arch.gpu_available():
        return "needs a GPU"
    try:
        importlib.import_module("flashinfer")
    except Exception as error:
        return f"flashinfer does not import: {type(error).__name__}: {error}"
    return None


def provider(adapt: Callable[[Any], DecodeInputs], name: str = "flashinfer") -> Provider:
    """A provider for an operator whose inputs ``adapt`` turns into :class:`DecodeInputs`."""
    return Provider(
        name=name,
        prepare=lambda inputs: prepare(adapt(inputs)),
        available=available,
        tolerance=lambda inputs: rival_tolerance(adapt(inputs)),
        note="tensor-core decode, planned ahead of the call; with a float8 cache queries are bfloat16 and a kernel "
        "of its own multiplies by the values' scale",
    )


class Pages(NamedTuple):
    """A cache and its page lists: pages of request b are ``indices[indptr[b] : indptr[b + 1]]``.

    What `plan` reads, `indptr` and `last_page_len`, stays on the host.
    """

    kcache: torch.Tensor
    vcache: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def pack(inputs: DecodeInputs, page_size: int) -> Pages:
    """The caches repacked to `page_size`, with the page lists that FlashInfer takes."""
    kcache, vcache, table, used = repack(inputs, page_size)
    counts = torch.tensor(used, dtype=torch.int32)
    indptr = torch.zeros(inputs.batch + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    indices = torch.cat([table[request, :count] for request, count in enumerate(used)])
    last_page_len = torch.tensor(inputs.lens, dtype=torch.int32) - (counts - 1) * page_size
    return Pages(kcache, vcache, indptr, indices, last_page_len)


def prepare(inputs: DecodeInputs) -> Callable[[], torch.Tensor]:
    """Plan one batch; the returned call gives ``[B, Hq, D]`` bfloat16."""
    if inputs.num_new_tokens != 1:
        raise CannotRun("compared with one new token a request only")
    if inputs.sinks is not None or inputs.key_scales_per_token or min(inputs.lens) == 0:
        raise CannotRun("sinks, per-token key scales and empty requests are not compared")
    wrapper_type = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    page_size = min(MAX_PAGE_SIZE, inputs.kcache.shape[1])
    pages = pack(inputs, page_size)
    device = inputs.q.device
    wrapper = wrapper_type(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty_like(pages.indptr, device=device),
        paged_kv_indices_buffer=torch.empty_like(pages.indices),
        paged_kv_last_page_len_buffer=torch.empty_like(pages.last_page_len, device=device),
    )
    wrapper.plan(
        pages.indptr,
        pages.indices,
        pages.last_page_len,
        inputs.q.shape[1],
        pages.kcache.shape[2],
        inputs.q.shape[2],
        page_size,
        window_left=-1 if inputs.window is None else inputs.window - 1,
        logits_soft_cap=inputs.logit_cap or 0.0,
        q_data_type=torch.bfloat16,
        kv_data_type=pages.kcache.dtype,
        sm_scale=inputs.softmax_scale,
    )
    q = inputs.q_float().to(torch.bfloat16) if inputs.is_fp8 else inputs.q.contiguous()
    k_scale, v_scale = (None if s is None else float(s.flatten()[0]) for s in (inputs.kscale, inputs.vscale))
    cache = (pages.kcache, pages.vcache)

    def decode() -> torch.Tensor:
        out: torch.Tensor = wrapper.run(q, cache, k_scale=k_scale, v_scale=v_scale)
        return out

    return decode
