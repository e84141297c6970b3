"""Rivals of prefill attention: cuDNN and FlashAttention-2 through torch, FlashAttention-3 of sglang-kernel.

Each gets the inputs in the form it likes best, outside of what is timed: torch's attention contiguous keys of equal
prompts without any paging, FlashAttention-3 pages of 128 tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from hpc.bench.providers import CannotRun, Provider
from hpc.bench.rivals import fa3
from hpc.bench.rivals.decode import DecodeInputs, repack
from hpc.common import arch
from hpc.common.operator import Tolerance

# bf16 probabilities, and for FlashAttention-3 in FP8 e4m3 ones and queries scaled per request and KV head
_TOLERANCES = {"bf16": Tolerance(rms=0.005, max=0.03), "fp8": Tolerance(rms=0.08, max=0.25)}


def providers() -> list[Provider]:
    """All of them, for inputs of `hpc.attention.prefill.cases`."""
    return [
        Provider(
            "cudnn", lambda x: _torch(x, "CUDNN_ATTENTION"), _gpu, tolerance, "contiguous keys, no paging"
        ),
        Provider(
            "fa2", lambda x: _torch(x, "FLASH_ATTENTION"), _gpu, tolerance, "contiguous keys, no paging"
        ),
        Provider("fa3", _fa3, fa3.available, tolerance, f"page size {fa3.PAGE_SIZE}"),
        *importlib.import_module("hpc.bench.rivals.flashinfer_prefill").providers(),
    ]


def _gpu() -> str | None:
    return None if arch.gpu_available() else "needs a GPU"


def tolerance(inputs: Any) -> Tolerance:
    """What a rival may be off by."""
    return _TOLERANCES[inputs.params.dtype]


def refuse_special(inputs: Any) -> None:
    """Raise `CannotRun` for what no rival of prefill is compared on."""
    params = inputs.params
    if params.sinks or params.logit_cap is not None or not params.causal or params.extra_rows:
        raise CannotRun("sinks, logit caps, full attention and padded rows are not compared")
    if params.dtype == "fp8" and params.quant_type == 0:
        raise CannotRun("reads no per-token key scales")


def neutral(inputs: Any) -> DecodeInputs:
    """Caches and lengths in the form that `repack` reads."""
    p = inputs.params
    return DecodeInputs(
        inputs.q, inputs.k, inputs.v, inputs.block_ids, tuple(n for _, n in p.lens), 1, p.head_dim**-0.5
    )


def _torch(inputs: Any, backend: str) -> Callable[[], torch.Tensor]:
    """`scaled_dot_product_attention` over equal whole prompts; the call gives ``[total, Hq, DV]``."""
    refuse_special(inputs)
    params = inputs.params
    n, keys = params.lens[0]
    if (
        params.dtype != "bf16"
        or params.window is not None
        or any(x != (n, n) for x in params.lens)
        or keys != n
    ):
        raise CannotRun("compared with equal whole prompts in bf16 only")
    attention = importlib.import_module("torch.nn.attention")
    batch = len(params.lens)

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(batch, -1, *x.shape[-2:]).transpose(1, 2).contiguous()

    if params.page_size == 0:
        k, v = inputs.k, inputs.v
    else:
        cache = neutral(inputs)
        kcache, vcache, table, _ = repack(cache, min(n, 128))
        k, v = (x[table.long()].flatten(1, 2)[:, :n] for x in (kcache, vcache))
    q, k, v = heads_first(inputs.q), heads_first(k), heads_first(v)
    chosen = getattr(attention.SDPBackend, backend)

    def call() -> torch.Tensor:
        with attention.sdpa_kernel(chosen):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    try:
        call()
    except RuntimeError as error:
        raise CannotRun(str(error).splitlines()[0]) from error
    return call


def _fa3(inputs: Any) -> Callable[[], torch.Tensor]:
    """FlashAttention-3 over pages of 128 tokens."""
    refuse_special(inputs)
    params = inputs.params
    if params.page_size == 0 or params.head_dim not in fa3.HEAD_DIMS or params.value_dim != params.head_dim:
        raise CannotRun("compared over pages with the same head dim for keys and values")
    flash = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    kcache, vcache, table, _ = repack(neutral(inputs), fa3.PAGE_SIZE)
    batch, longest = len(params.lens), max(n for n, _ in params.lens)
    q, descale = inputs.q, dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    if params.dtype == "fp8":
        q, q_descale = _queries(inputs)
        per_head = (inputs.kscale.view(1, 1), inputs.vscale.view(1, 1))
        k_descale, v_descale = (s.expand(batch, params.kv_heads).contiguous() for s in per_head)
        descale = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    call = {
        "q": q, "k_cache": kcache, "v_cache": vcache, "cache_seqlens": inputs.seq_lens, "page_table": table,
        "cu_seqlens_q": inputs.cu_seqlens, "max_seqlen_q": longest, "softmax_scale": params.head_dim**-0.5,
        "causal": True, "window_size": (-1, -1) if params.window is None else (params.window - 1, 0), **descale,
    }  # fmt: skip

    def prefill() -> torch.Tensor:
        out: torch.Tensor = flash(**call)
        return out

    return prefill


def _queries(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 queries requantised: the kernel takes one scale per request and KV head, not one per token and head."""
    params, pieces, scales, row = inputs.params, [], [], 0
    for b, (n, _) in enumerate(params.lens):
        values = inputs.q[row : row + n].float() * inputs.qscale[b, :, :n].T[..., None]
        grouped = values.view(n, params.kv_heads, -1)
        scale = grouped.abs().amax(dim=(0, 2)).clamp_min(1e-6) / 448.0
        pieces.append((grouped / scale[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(n, -1))
        scales.append(scale)
        row += n
    return torch.cat(pieces).view(inputs.q.shape), torch.stack(scales)
