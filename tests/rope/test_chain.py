"""A layer step by step: prologue, then decode attention over the cache it fills, against float64 that rounds nothing.

The reference keeps its own keys and values in float64. So what is compared is the whole path: rotation, norm, scales,
places in the cache, and that attention reads the same places. On a CPU the functions run their references.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rope_support import capture

import hpc
from hpc.common.operator import Tolerance
from hpc.rope import reference
from hpc.rope.cases import rotary_table
from hpc.testing import assert_close, fill_nan

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

HQ, HKV, D, PAGE, PAGES = 8, 2, 128, 64, 4
FP8 = torch.float8_e4m3fn
# bf16: q, k, v, probabilities and the result are rounded to 8 bits, 2.2e-3 RMS each at most. e4m3: 2.6e-2 each for q, k
# and v; a scale left out, a head or a position exchanged gives errors of the order of 1.
TOLERANCES = {"bf16": Tolerance(rms=6e-3, max=2e-2), "fp8": Tolerance(rms=6e-2, max=0.15)}


class Layer:
    """One attention layer of a few requests; caches start full of NaN, page-table tails are garbage."""

    def __init__(self, kind: str, where: str, batch: int, norm_policy: int, neox: bool, layout: str) -> None:
        self.kind, self.where, self.norm_policy, self.neox = kind, where, norm_policy, neox
        self.generator = torch.Generator().manual_seed(batch)
        stored = FP8 if kind == "fp8" else torch.bfloat16
        shape = (batch * PAGES, PAGE, HKV, D) if layout == "NHD" else (batch * PAGES, HKV, PAGE, D)
        caches = [fill_nan(torch.empty(shape, dtype=stored, device=where)) for _ in range(2)]
        self.caches = caches if layout == "NHD" else [c.permute(0, 2, 1, 3) for c in caches]
        self.ids = torch.randperm(batch * PAGES, generator=self.generator).int().view(batch, PAGES).to(where)
        self.table = rotary_table(PAGES * PAGE, D, where)
        self.weights = [(self.normal(D) * 0.2 + 1).to(where) for _ in range(2)]
        self.scales = [torch.tensor([s], device=where) for s in (0.02, 0.015)]
        self.history: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(batch)]
        self.lens = torch.zeros(batch, dtype=torch.int32, device=where)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def projection(self, rows: int) -> torch.Tensor:
        return self.normal(rows, (HQ + 2 * HKV) * D).bfloat16().to(self.where)

    def prologue(self, qkv: torch.Tensor, index: torch.Tensor, is_prefill: bool, longest: int) -> Any:
        tensors = (*self.caches, qkv, self.table, self.lens, index, self.ids, is_prefill)
        options = {"q_norm_weight": self.weights[0], "k_norm_weight": self.weights[1],
                   "qk_norm_policy": self.norm_policy, "is_neox_style": self.neox}  # fmt: skip
        if self.kind == "bf16":
            return hpc.rope_norm_store_kv(*tensors, **options)
        return hpc.rope_norm_store_kv_fp8(*tensors, *self.scales, 1, longest, **options)

    def step(self, qkv: torch.Tensor, index: torch.Tensor, new: int) -> torch.Tensor:
        """Prologue and decode attention of `new` tokens a request."""
        result = self.prologue(qkv, index, False, new)
        common: dict[str, Any] = {"mtp": new - 1, "new_kv_included": True}
        if self.kind == "bf16":
            return hpc.attention_decode_bf16(result, *self.caches, self.ids, self.lens, **common)
        q, scale, flag = result
        return hpc.attention_decode_fp8(
            q, *self.caches, self.ids, self.lens, scale, *self.scales, split_flag=flag, **common
        )

    def exact(self, qkv: torch.Tensor, new: list[int]) -> torch.Tensor:
        """The same tokens appended to the float64 history, and attention over it."""
        lens = self.lens.cpu()
        index = torch.tensor([0, *new]).cumsum(0).int()
        request, position, _ = reference.token_positions(lens, index, qkv.shape[0])
        q, k, v = reference.project(
            qkv.cpu(), self.table.cpu(), position, HKV, D, D, q_norm_weight=self.weights[0].cpu(),
            k_norm_weight=self.weights[1].cpu(), qk_norm_policy=self.norm_policy, is_neox_style=self.neox,
        )  # fmt: skip
        for row, b in enumerate(request.tolist()):
            self.history[b].append((k[row], v[row]))
        out = torch.zeros(qkv.shape[0], HQ, D, dtype=torch.float64)
        for row, b in enumerate(request.tolist()):
            keys, values = (
                torch.stack(part) for part in zip(*self.history[b][: int(position[row]) + 1], strict=True)
            )
            keys, values = (part.repeat_interleave(HQ // HKV, 1) for part in (keys, values))
            weights = torch.einsum("hd,khd->hk", q[row], keys).mul(D**-0.5).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, values)
        return out

    def index(self, new: list[int]) -> torch.Tensor:
        return torch.tensor([0, *new]).cumsum(0).int().to(self.where)


@HERE
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("norm_policy", "neox", "layout"), [(2, True, "NHD"), (1, False, "HND"), (0, True, "HND")]
)
def test_prompt_in_chunks_then_steps(
    kind: str, where: str, norm_policy: int, neox: bool, layout: str
) -> None:
    """Chunked prompts of three requests, then steps of one and of three tokens."""
    layer = Layer(kind, where, 3, norm_policy, neox, layout)
    for new in ([70, 1, 63], [5, 60, 1]):
        qkv = layer.projection(sum(new))
        layer.lens += torch.tensor(new, dtype=torch.int32, device=where)
        layer.prologue(qkv, layer.index(new), True, max(new))
        layer.exact(qkv, new)
    for new_tokens in (1, 3, 1):
        new = [new_tokens] * 3
        qkv = layer.projection(sum(new))
        layer.lens += new_tokens
        out = layer.step(qkv, layer.index(new), new_tokens)
        assert_close(out.cpu(), layer.exact(qkv, new), TOLERANCES[kind], f"{new_tokens} tokens")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_steps_replayed_from_a_graph(kind: str) -> None:
    """One graph of prologue and attention, replayed for twenty steps of a growing context."""
    layer = Layer(kind, "cuda", 4, 2, True, "NHD")
    new = [60, 3, 64, 1]
    qkv = layer.projection(sum(new))
    layer.lens += torch.tensor(new, dtype=torch.int32, device="cuda")
    layer.prologue(qkv, layer.index(new), True, 64)
    layer.exact(qkv, new)
    fed, index = torch.zeros_like(layer.projection(4)), layer.index([1] * 4)
    layer.lens += 1
    graph, out = capture(lambda: layer.step(fed, index, 1))
    for step in range(20):
        fed.copy_(layer.projection(4))
        fill_nan(out)
        graph.replay()
        assert_close(out.cpu(), layer.exact(fed, [1] * 4), TOLERANCES[kind], f"step {step}")
        layer.lens += 1


@HERE
def test_queries_quantised_alone_serve_the_same_attention(where: str) -> None:
    """An engine that norms, rotates and stores itself: BF16 queries through `quantize_query_fp8` are those of the fused
    call, up to their first rounding to BF16."""
    layer = Layer("fp8", where, 3, 2, True, "NHD")
    new = [70, 1, 63]
    layer.lens += torch.tensor(new, dtype=torch.int32, device=where)
    qkv, index = layer.projection(sum(new)), layer.index(new)
    fused, scale, _ = layer.prologue(qkv, index, True, 70)
    bf16_caches = [torch.empty(c.shape, dtype=torch.bfloat16, device=where) for c in layer.caches]
    q = hpc.rope_norm_store_kv(
        *bf16_caches, qkv, layer.table, layer.lens, index, layer.ids, True, *layer.weights, qk_norm_policy=2
    )
    codes, scales = hpc.quantize_query_fp8(q, index, 70)
    assert scales.shape == scale.shape == (3, HQ, 128)
    torch.testing.assert_close(scales, scale, rtol=2**-8, atol=0)
    request, _, place = reference.token_positions(layer.lens, index, sum(new))
    by_token = [s[request, :, place].unsqueeze(-1).double().cpu() for s in (scales, scale)]
    alone, together = codes.double().cpu() * by_token[0], fused.double().cpu() * by_token[1]
    assert (alone - together).norm() < 3e-2 * together.norm()
