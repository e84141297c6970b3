"""One decode step of a layer: its tensors, and its stages as calls of public functions with PyTorch between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import hpc
from hpc.layer.model import BLOCK, LayerShape
from hpc.testing import PagedCache, make_paged_cache

PAGE = 64
FP8_MAX = 448.0
KV_SCALE = 0.02
"""Dequantisation scale of keys and values: standard normal ones then reach codes of about 200."""
CODE = 60.0
"""Standard deviation of weight codes."""
X_SCALE, ACT_SCALE = 0.02, 0.05
"""Static scales of the experts' inputs, where the model has static ones."""
EXACT_FP8 = torch.float8_e4m3fn


@dataclass
class Weights:
    """A layer's parameters. Projections BF16 [out, in]; router float32; experts e4m3 codes with float32 scales."""

    qkv: torch.Tensor
    o: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    cos_sin: torch.Tensor
    router: hpc.RouterWeight
    router_fp32: torch.Tensor
    router_bias: torch.Tensor | None
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    shared13: torch.Tensor | None
    shared2: torch.Tensor | None


def make_weights(shape: LayerShape, max_len: int, device: torch.device, seed: int) -> Weights:
    """Random weights that keep activations of unit size: std 1 / sqrt(inputs)."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device) * std

    def linear(out: int, inputs: int) -> torch.Tensor:
        return normal(out, inputs, std=inputs**-0.5).to(torch.bfloat16)

    def codes(out: int, inputs: int) -> torch.Tensor:
        found = torch.empty((shape.experts, out, inputs), dtype=EXACT_FP8, device=device)
        for expert in found:
            expert.copy_(normal(out, inputs, std=CODE).clamp_(-FP8_MAX, FP8_MAX))
        return found

    def scales(out: int, inputs: int) -> torch.Tensor:
        size: tuple[int, ...] = (shape.experts,)
        if shape.block_scales:
            columns = (inputs // BLOCK + 3) // 4 * 4  # padded as SGLang does
            size = (shape.experts, out // BLOCK, columns)
        spread = torch.rand(size, generator=generator, device=device) * 0.4 + 0.8
        return spread * (inputs**-0.5 / CODE) * (1.0 if shape.block_scales else _input_scale(inputs, shape))

    half = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
    angles = torch.outer(torch.arange(max_len, device=device).float(), shape.rope_theta**-half)
    routed = shape.experts + shape.zero_experts
    router = normal(routed, shape.hidden, std=shape.hidden**-0.5)
    dims = (shape.hidden, shape.inter, shape.shared_inter)
    return Weights(
        qkv=linear(shape.qkv_width, shape.hidden),
        o=linear(shape.hidden, shape.q_heads * shape.head_dim) if shape.has_attention else normal(0),
        q_norm=normal(shape.head_dim, std=0.1) + 1 if shape.qk_norm else None,
        k_norm=normal(shape.head_dim, std=0.1) + 1 if shape.qk_norm else None,
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1),
        router=hpc.split_router_weight(router),
        router_fp32=router,
        router_bias=normal(routed, std=0.02 if shape.scoring == "sigmoid" else 1e-3) if shape.bias else None,
        w13=codes(2 * dims[1], dims[0]),
        w2=codes(dims[0], dims[1]),
        w13_scale=scales(2 * dims[1], dims[0]),
        w2_scale=scales(dims[0], dims[1]),
        shared13=linear(2 * dims[2], dims[0]) if dims[2] else None,
        shared2=linear(dims[0], dims[2]) if dims[2] else None,
    )


def _input_scale(inputs: int, shape: LayerShape) -> float:
    return X_SCALE if inputs == shape.hidden else ACT_SCALE


class Step:
    """Buffers of decode steps of up to `capacity[b]` tokens a request, and the stages of a step in order.

    `load` says which step; its buffers stay where they are, as under CUDA graphs. Every stage reads what the one before
    left in the attributes and can be repeated. In between stand the engine's parts in PyTorch: norms, projections,
    residual, shared expert, and quantisation of the experts' input.
    """

    def __init__(
        self, shape: LayerShape, capacity: Sequence[int], device: torch.device, seed: int = 0
    ) -> None:
        self.shape, self.capacity, self.device = shape, tuple(capacity), device
        self.weights = make_weights(shape, max(capacity) + 1, device, seed)
        self.generator = torch.Generator(device=device).manual_seed(seed + 1)
        self.x = torch.empty((len(capacity), shape.hidden), dtype=torch.bfloat16, device=device)
        self.act_scale = torch.full((1,), 1 / ACT_SCALE, dtype=torch.float32, device=device)
        if shape.has_attention:
            self.cache: PagedCache = make_paged_cache(
                capacity, shape.kv_heads, shape.head_dim, PAGE, EXACT_FP8, device=device, seed=seed
            )
            self.q_index = torch.arange(len(capacity) + 1, dtype=torch.int32, device=device)
            self.kv_scale = torch.full((1,), KV_SCALE, dtype=torch.float32, device=device)
            self.task_map = hpc.get_attention_decode_task_workspace(
                len(capacity), max(capacity), shape.kv_heads
            )
        self.load(self.capacity, range(len(capacity)))

    def load(self, lens: Sequence[int], joined: Iterable[int]) -> None:
        """The next step: KV lengths with the new token, and the slots whose request is new, its prompt cached."""
        self.lens = tuple(lens)
        self.x.copy_(torch.randn(self.x.shape, generator=self.generator, device=self.device))
        if self.shape.has_attention:
            self.cache.seq_lens.copy_(torch.tensor(self.lens, dtype=torch.int32))
            for slot in joined:
                self._admit(slot)

    def _admit(self, slot: int) -> None:
        """Random rows of unit size for all but the newest token of a slot; NaN behind them."""
        token = torch.arange(self.capacity[slot], device=self.device)
        page = self.cache.block_ids[slot, token // PAGE].long()
        old = self.lens[slot] - 1
        for cache in (self.cache.kcache, self.cache.vcache):
            rows = torch.randn((len(token), *cache.shape[2:]), generator=self.generator, device=self.device)
            codes = (rows / KV_SCALE).clamp(-FP8_MAX, FP8_MAX).to(EXACT_FP8).view(torch.uint8)
            codes[old:] = 0x7F
            cache.view(torch.uint8)[page, token % PAGE] = codes

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.shape.eps).to(torch.bfloat16)

    def run(self) -> torch.Tensor:
        """The whole step: [requests, hidden], BF16."""
        if self.shape.has_attention:
            self.schedule()
            self.project()
            self.prologue()
            self.decode()
        self.attention_output()
        self.route()
        self.prepare_experts()
        self.experts()
        return self.finish()

    def schedule(self) -> None:
        """Once a step, for all layers."""
        hpc.assign_attention_decode_task(
            self.cache.seq_lens, self.task_map, self.shape.kv_heads, mtp=1, new_kv_included=True
        )

    def project(self) -> None:
        self.qkv = F.linear(self.norm(self.x), self.weights.qkv)

    def prologue(self) -> None:
        """QK-norm, rotary embedding, e4m3, keys and values into the cache."""
        cache, weights = self.cache, self.weights
        self.q, q_scale, _ = hpc.rope_norm_store_kv_fp8(
            cache.kcache, cache.vcache, self.qkv, weights.cos_sin, cache.seq_lens, self.q_index, cache.block_ids, False,
            self.kv_scale, self.kv_scale, 1, 1, q_norm_weight=weights.q_norm, k_norm_weight=weights.k_norm,
            qk_norm_policy=2 if self.shape.qk_norm else 0, eps=self.shape.eps,
        )  # fmt: skip
        assert q_scale is not None
        self.q_scale = q_scale

    def decode(self) -> None:
        """Attention over the paged cache, by the step's schedule."""
        cache = self.cache
        out = hpc.attention_decode_fp8(
            self.q, cache.kcache, cache.vcache, cache.block_ids, cache.seq_lens, self.q_scale, self.kv_scale,
            self.kv_scale, new_kv_included=True, task_map=self.task_map,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        self.attention = out

    def attention_output(self) -> None:
        """Output projection and residual; the layer's second norm."""
        self.h = self.x
        if self.shape.has_attention:
            self.h = self.x + F.linear(self.attention.flatten(1), self.weights.o)
        self.y = self.norm(self.h)

    def route(self) -> None:
        """Router product, scores, choice of experts, weights."""
        shape = self.shape
        found = hpc.router_topk(
            self.y, self.weights.router, shape.top_k, scoring=shape.scoring, bias=self.weights.router_bias,
            renormalize=shape.renormalize, routed_scaling=shape.routed_scaling, num_zero_experts=shape.zero_experts,
        )  # fmt: skip
        self.topk_weights, self.topk_ids = found[0], found[1]
        self.zero_weight = found[2] if shape.zero_experts else None

    def prepare_experts(self) -> None:
        """e4m3 input of the experts, with static or block scales; the shared expert; zero experts' share."""
        y, weights = self.y.float(), self.weights
        if self.shape.block_scales:
            groups = y.unflatten(-1, (-1, BLOCK))
            scale = groups.abs().amax(-1).clamp_min(1e-10) / FP8_MAX
            self.x_scale = scale.contiguous()
            y = (groups / scale[..., None]).flatten(-2)
        else:
            y = y / X_SCALE
        self.y8 = y.clamp(-FP8_MAX, FP8_MAX).to(EXACT_FP8)
        self.shared = None
        if weights.shared13 is not None and weights.shared2 is not None:
            gate, up = F.linear(self.y, weights.shared13).chunk(2, -1)
            self.shared = F.linear(F.silu(gate) * up, weights.shared2)
        if self.zero_weight is not None:
            passed = (self.zero_weight[:, None] * self.y.float()).to(torch.bfloat16)
            self.shared = passed if self.shared is None else self.shared + passed

    def experts(self) -> None:
        """Gate and up, SiLU, down, weighted sum, shared output."""
        weights, ids, topk = self.weights, self.topk_ids, self.topk_weights
        total = self.shape.experts
        if self.shape.block_scales:
            self.moe = hpc.fuse_moe_blockwise(
                self.y8, self.x_scale, weights.w13, weights.w13_scale, weights.w2, weights.w2_scale, ids, topk, 0,
                total, shared_output=self.shared,
            )  # fmt: skip
            return
        self.moe = hpc.fuse_moe(
            self.y8, weights.w13, weights.w2, weights.w13_scale, weights.w2_scale, self.act_scale, ids, topk, 0, total,
            shared_output=self.shared,
        )  # fmt: skip

    def finish(self) -> torch.Tensor:
        return self.h + self.moe
