"""Stand-ins with the interface of SGLang's classes, and one step's tensors as SGLang's scheduler makes them."""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from typing import Any

import torch
from sglang_support import BF16_TOLERANCE_RMS, FP8, Pool, attention, put, rms

# Queries are rounded to e4m3 as well, which the reference does not do: 2^-4 / sqrt(3) of the scores at most.
FP8_RMS = 5e-2


class ForwardMode(enum.Enum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2, DLLM_EXTEND = range(7)

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_dllm_extend(self) -> bool:
        return self is ForwardMode.DLLM_EXTEND

    def is_extend(self) -> bool:
        return self in (
            ForwardMode.EXTEND,
            ForwardMode.MIXED,
            ForwardMode.TARGET_VERIFY,
            ForwardMode.DLLM_EXTEND,
        )


class AttentionBackend:
    """SGLang's base class as far as a step goes through it."""

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):  # type: ignore[no-untyped-def]
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        to = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend  # type: ignore[attr-defined]
        return to(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class KVWriteLoc:
    def __init__(self, loc: torch.Tensor, swa_loc: torch.Tensor | None = None) -> None:
        self.loc, self.swa_loc = loc, swa_loc


class KVPool:
    """`MHATokenToKVPool` of one layer; with `window_pool`, `SWAKVPool`: full layers even, window layers odd."""

    def __init__(self, pool: Pool, window_pool: Pool | None = None) -> None:
        self.pools = (pool, window_pool or pool)
        if window_pool is not None:
            self.layers_mapping = {layer: (layer // 2, bool(layer % 2)) for layer in range(4)}
            mapping = torch.full((pool.k_buffer.shape[0] + 1,), -1, dtype=torch.int64)
            for request in range(len(pool.lens)):
                mapping[pool.slots(request)] = window_pool.slots(request)
            self.full_to_swa_index_mapping = mapping.to(pool.device)

    def translate_loc_from_full_to_swa(self, slots: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[slots]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.pools[layer_id % 2]
        return pool.k_buffer, pool.v_buffer

    def set_kv_buffer(
        self, layer: Any, where: KVWriteLoc, k: Any, v: Any, k_scale: Any, v_scale: Any
    ) -> None:
        slots = where.swa_loc if layer.layer_id % 2 and self.pools[0] is not self.pools[1] else where.loc
        assert slots is not None
        for buffer, rows, scale in zip(
            self.get_kv_buffer(layer.layer_id), (k, v), (k_scale, v_scale), strict=True
        ):
            put(buffer, slots, rows.float() if scale is None else rows.float() / scale)


class RadixAttention(torch.nn.Module):
    """The attributes of SGLang's layer that a backend reads."""

    def __init__(self, heads: tuple[int, int], head_dim: int, layer_id: int = 0, **more: Any) -> None:
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num = heads
        self.tp_v_head_num, self.head_dim, self.v_head_dim = heads[1], head_dim, head_dim
        self.layer_id, self.scaling, self.logit_cap, self.sliding_window_size = (
            layer_id,
            head_dim**-0.5,
            0.0,
            -1,
        )
        self.k_scale = self.v_scale = None
        self.attn_type, self.is_cross_attention, self.xai_temperature_len = "decoder", False, -1
        self.logit_capping_method = "tanh"
        for name, value in more.items():
            assert hasattr(self, name)
            setattr(self, name, value)


def runner(pool: Pool, layers: Sequence[RadixAttention], kv_pool: KVPool | None = None, **more: Any) -> Any:
    dtype = torch.bfloat16 if pool.k_buffer.dtype != FP8 else FP8
    values = {
        "use_mla_backend": False,
        "model_config": types.SimpleNamespace(is_encoder_decoder=False),
        "token_to_kv_pool": kv_pool or KVPool(pool),
        "page_size": pool.page,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": dtype,
        "is_draft_worker": False,
        "req_to_token_pool": types.SimpleNamespace(
            req_to_token=pool.req_to_token.to(pool.device), size=pool.req_to_token.shape[0] - 1
        ),
        "model": torch.nn.ModuleList(layers),
        **more,
    }
    return types.SimpleNamespace(**values)


def batch_of(pool: Pool, mode: Any, fresh: Sequence[int], pad_to: int = 0, **more: Any) -> Any:
    """A `ForwardBatch` in which the last fresh[b] tokens of each request are new."""
    verify = mode.is_target_verify()
    lens = torch.tensor(
        [length - (new if verify else 0) for length, new in zip(pool.lens, fresh, strict=True)]
    )
    slots = torch.cat([pool.slots(b, pool.lens[b] - new) for b, new in enumerate(fresh)])
    padding = max(0, pad_to - len(fresh))
    values = {
        "forward_mode": mode,
        "batch_size": len(fresh) + padding,
        "seq_lens": torch.nn.functional.pad(lens, (0, padding), value=1),
        "seq_lens_cpu": None if verify else torch.nn.functional.pad(lens, (0, padding), value=1),
        "req_pool_indices": torch.nn.functional.pad(pool.req_pool_indices, (0, padding)),
        "out_cache_loc": torch.nn.functional.pad(slots, (0, padding * fresh[0])),
        "extend_seq_lens": torch.tensor(fresh),
        "extend_seq_lens_cpu": list(fresh),
        "extend_prefix_lens_cpu": [length - new for length, new in zip(pool.lens, fresh, strict=True)],
        "spec_info": types.SimpleNamespace(topk=1, tree_topk=1, draft_token_num=fresh[0]) if verify else None,
        **more,
    }
    tensors = {
        name: v.to(pool.device) if isinstance(v, torch.Tensor) and not name.endswith("_cpu") else v
        for name, v in values.items()
    }
    return types.SimpleNamespace(**tensors)


def draw(rows: int, layer: RadixAttention, device: torch.device, seed: int = 1) -> list[torch.Tensor]:
    """q `[rows, heads * dim]`, k and v `[rows, KV heads, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, layer.tp_q_head_num * layer.head_dim, generator=generator)
    k = torch.randn(rows, layer.tp_k_head_num, layer.head_dim, generator=generator)
    v = torch.randn(rows, layer.tp_v_head_num, layer.v_head_dim, generator=generator)
    return [t.to(device, torch.bfloat16) for t in (q, k, v)]


def expected(pool: Pool, q: torch.Tensor, fresh: Sequence[int], layer: RadixAttention) -> torch.Tensor:
    """Attention of the tokens in the pool, request by request."""
    window = None if layer.sliding_window_size < 0 else layer.sliding_window_size + 1
    scales = [1.0 if s is None else float(s) for s in (layer.k_scale, layer.v_scale)]
    out, at = [], 0
    queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
    for request, count in enumerate(fresh):
        slots = pool.slots(request).to(pool.device)
        rows = [
            (b.view(torch.uint8)[slots].view(FP8) if b.dtype == FP8 else b[slots]).float() * scale
            for b, scale in zip((pool.k_buffer, pool.v_buffer), scales, strict=True)
        ]
        out.append(attention(queries[at : at + count], *rows, scale=layer.scaling, window=window))
        at += count
    return torch.cat(out).flatten(1)


def check(out: torch.Tensor, want: torch.Tensor, fp8: bool) -> None:
    assert out.dtype == torch.bfloat16 and out.shape == want.shape
    assert rms(out, want) < (FP8_RMS if fp8 else BF16_TOLERANCE_RMS)
