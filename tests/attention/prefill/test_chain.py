"""A small model end to end: prologue, prefill in chunks, then decode steps, against float64 that caches nothing.

Two attention layers between an embedding and a vocabulary. The reference recomputes whole sequences in float64 from
the same weights. Every variant is fed the reference's tokens, so that one wrong step shows as itself. On a CPU the
functions run their references.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpc
from hpc.common.operator import Tolerance
from hpc.rope import reference as rope_reference
from hpc.rope.cases import rotary_table
from hpc.testing import assert_close, fill_nan

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
HQ, HKV, D, PAGE, PAGES, HIDDEN, VOCAB, LAYERS = 8, 2, 128, 64, 3, 256, 96, 2
FP8 = torch.float8_e4m3fn
SCALES = (0.02, 0.015)  # of K and V
# Logits are sums of two layers' results: bf16 rounds at each of ten stages, e4m3 caches add 2.6e-2 of q, k and v each.
TOLERANCES = {"bf16": Tolerance(rms=7e-3, max=2e-2), "fp8": Tolerance(rms=6e-2, max=0.12)}
# Greedy tokens must agree where the best logit leads by this much of the logits' spread: about seven times the
# rms error.
MARGINS = {"bf16": 0.04, "fp8": 0.25}


class Model:
    """Weights, and for one KV format the caches of a few requests, full of NaN at first."""

    def __init__(self, kind: str, where: str, batch: int) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int, scale: float) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).bfloat16().to(where)

        self.kind, self.where, self.batch = kind, where, batch
        self.embedding = draw(VOCAB, HIDDEN, scale=1.0)
        self.into = [draw(HIDDEN, (HQ + 2 * HKV) * D, scale=HIDDEN**-0.5) for _ in range(LAYERS)]
        self.back = [draw(HQ * D, HIDDEN, scale=2 * (HQ * D) ** -0.5) for _ in range(LAYERS)]
        self.head = draw(HIDDEN, VOCAB, scale=HIDDEN**-0.5)
        self.weights = [(torch.randn(D, generator=generator) * 0.2 + 1).to(where) for _ in range(2)]
        self.table = rotary_table(PAGES * PAGE, D, where)
        stored = FP8 if kind == "fp8" else torch.bfloat16
        self.caches = [
            [
                fill_nan(torch.empty((batch * PAGES, PAGE, HKV, D), dtype=stored, device=where))
                for _ in range(2)
            ]
            for _ in range(LAYERS)
        ]
        self.ids = torch.randperm(batch * PAGES, generator=generator).int().view(batch, PAGES).to(where)
        self.scales = [torch.tensor([s], device=where) for s in SCALES]
        self.lens = torch.zeros(batch, dtype=torch.int32, device=where)

    def step(self, tokens: list[list[int]], is_prefill: bool) -> torch.Tensor:
        """Logits of each request's last token."""
        new = [len(x) for x in tokens]
        self.lens += torch.tensor(new, dtype=torch.int32, device=self.where)
        index = torch.tensor([0, *new]).cumsum(0).int().to(self.where)
        hidden = self.embedding[torch.tensor([token for x in tokens for token in x]).to(self.where)]
        for layer in range(LAYERS):
            qkv = hidden @ self.into[layer]
            out = self.attention(layer, qkv, index, is_prefill, max(new))
            hidden = hidden + out.flatten(1) @ self.back[layer]
        return hidden[index[1:].long() - 1] @ self.head

    def attention(
        self, layer: int, qkv: torch.Tensor, index: torch.Tensor, is_prefill: bool, longest: int
    ) -> Any:
        caches = self.caches[layer]
        tensors = (*caches, qkv, self.table, self.lens, index, self.ids, is_prefill)
        norm: dict[str, Any] = {
            "q_norm_weight": self.weights[0], "k_norm_weight": self.weights[1], "qk_norm_policy": 2
        }  # fmt: skip
        if self.kind == "bf16":
            q = hpc.rope_norm_store_kv(*tensors, **norm)
            if is_prefill:
                return hpc.attention_with_kvcache_prefill_bf16(
                    q, *caches, index, self.ids, self.lens, longest
                )
            return hpc.attention_decode_bf16(q, *caches, self.ids, self.lens, new_kv_included=True)
        q, scale, flag = hpc.rope_norm_store_kv_fp8(*tensors, *self.scales, 1, longest, **norm)
        if is_prefill:
            return hpc.attention_with_kvcache_prefill_fp8(
                q, *caches, scale, *self.scales, index, self.ids, self.lens, longest
            )
        return hpc.attention_decode_fp8(
            q, *caches, self.ids, self.lens, scale, *self.scales, new_kv_included=True, split_flag=flag
        )

    def exact(self, tokens: list[int]) -> torch.Tensor:
        """Logits after one whole sequence, in float64."""
        n = len(tokens)
        hidden = self.embedding[torch.tensor(tokens).to(self.where)].double().cpu()
        causal = torch.ones(n, n).tril().bool()
        for layer in range(LAYERS):
            qkv = hidden @ self.into[layer].double().cpu()
            q, k, v = rope_reference.project(
                qkv, self.table.cpu(), torch.arange(n), HKV, D, D, q_norm_weight=self.weights[0].cpu(),
                k_norm_weight=self.weights[1].cpu(), qk_norm_policy=2,
            )  # fmt: skip
            k, v = (x.repeat_interleave(HQ // HKV, 1) for x in (k, v))
            scores = torch.einsum("shd,khd->hsk", q, k) * D**-0.5
            out = torch.einsum("hsk,khd->shd", scores.masked_fill(~causal, -torch.inf).softmax(-1), v)
            hidden = hidden + out.flatten(1) @ self.back[layer].double().cpu()
        return hidden[-1] @ self.head.double().cpu()


@HERE
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_prompts_in_chunks_then_steps(kind: str, where: str) -> None:
    """Prompts of 70, 5, 33 and 20 tokens, each in two chunks, then six greedy steps; one step of the references."""
    steps = 6 if where == "cuda" else 1
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (70, 5, 33, 20)]
    model = Model(kind, where, len(prompts))
    model.step([p[: 3 * len(p) // 5] for p in prompts], is_prefill=True)
    logits = model.step([p[3 * len(p) // 5 :] for p in prompts], is_prefill=True)
    sequences, judged = [list(p) for p in prompts], 0
    for step in range(steps + 1):
        expected = torch.stack([model.exact(s) for s in sequences])
        assert_close(logits.cpu(), expected, TOLERANCES[kind], f"{kind} step {step}")
        best = expected.topk(2).values
        clear = (best[:, 0] - best[:, 1]) > MARGINS[kind] * expected.std()
        judged += int(clear.sum())
        assert (logits.cpu().float().argmax(-1) == expected.argmax(-1))[clear].all(), "a greedy token differs"
        chosen = expected.argmax(-1).tolist()
        for sequence, token in zip(sequences, chosen, strict=True):
            sequence.append(token)
        if step < steps:
            logits = model.step([[token] for token in chosen], is_prefill=False)
    print(
        f"{kind}: {judged} of {4 * (steps + 1)} tokens have a margin of {MARGINS[kind]} of the logits' spread"
    )
    assert judged >= 10 * (steps + 1) // 7


@HERE
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_one_token_by_prefill_is_one_token_by_decode(kind: str, where: str) -> None:
    """Extending by one token through either function gives the same logits within their rounding."""
    tokens = [[5, 9, 11], [1]]
    one, two = Model(kind, where, 2), Model(kind, where, 2)
    for model in (one, two):
        model.step(tokens, is_prefill=True)
    by_prefill, by_decode = one.step([[3], [4]], is_prefill=True), two.step([[3], [4]], is_prefill=False)
    assert_close(by_prefill.cpu(), by_decode.double().cpu(), TOLERANCES[kind], kind)
