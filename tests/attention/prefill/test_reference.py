"""The oracle against the plainest possible formulation, token by token, and against torch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from prefill_support import make

from hpc.attention.prefill import cases
from hpc.attention.prefill.case_lists import BATCHES, prompts


def by_hand(inputs: cases.PrefillInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """One token and head at a time, keys gathered one by one."""
    p = inputs.params
    out, lse = (
        torch.zeros(*inputs.q.shape[:2], p.value_dim).double(),
        torch.full(inputs.q.shape[:2], -math.inf).double(),
    )
    row = 0
    for b, (n, keys) in enumerate(p.lens):
        keys = n if p.page_size == 0 else keys
        for i in range(n):
            position = keys - n + i
            first = 0 if p.window is None else max(0, position - p.window + 1)
            seen = range(first, min(position + 1, keys) if p.causal else keys)
            for head in range(p.q_heads):
                if not seen:
                    continue
                h, scores, values = head // p.group, [], []
                for j in seen:
                    at: Any = (row - i + j,)
                    if p.page_size:
                        at = (int(inputs.block_ids[b, j // p.page_size]), j % p.page_size)
                    k, v = inputs.k[at][h].double(), inputs.v[at][h].double()
                    score = inputs.q[row, head].double() @ k * p.head_dim**-0.5
                    if p.dtype == "fp8":
                        score, v = (
                            score * inputs.qscale[b, head, i].double() * inputs.kscale.double(),
                            v * inputs.vscale,
                        )
                    if p.logit_cap is not None:
                        score = p.logit_cap * torch.tanh(score / p.logit_cap)
                    scores.append(score.reshape(()))
                    values.append(v)
                total = torch.stack(scores)
                if p.sinks:
                    total = torch.cat([total, inputs.sinks[head].double()[None]])
                lse[row, head] = total.logsumexp(0)
                weights = torch.exp(torch.stack(scores) - lse[row, head])
                out[row, head] = (weights[:, None] * torch.stack(values)).sum(0)
            row += 1
    return out, lse


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {}, "window": {"window": 5}, "cap, sinks": {"logit_cap": 1.0, "sinks": True}, "full": {"causal": False},
    "full window": {"causal": False, "window": 5}, "fp8": {"dtype": "fp8"}, "HND": {"layout": "HND"},
    "extra rows": {"extra_rows": 3},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_equals_one_token_at_a_time(options: str) -> None:
    inputs = make(((3, 20), (5, 5), (0, 4), (1, 9), (4, 2)), (4, 2), device="cpu", head_dim=16, page_size=8,
                  **OPTIONS[options])  # fmt: skip
    for got, expected in zip(cases.reference(inputs), by_hand(inputs), strict=True):
        torch.testing.assert_close(got, expected)


def test_ragged_equals_one_token_at_a_time() -> None:
    inputs = make(prompts(6, 0, 1, 9), (4, 2), device="cpu", head_dim=16, page_size=0, extra_rows=2)
    for got, expected in zip(cases.reference(inputs), by_hand(inputs), strict=True):
        torch.testing.assert_close(got, expected)


def test_whole_prompts_are_torchs_attention() -> None:
    inputs = make(prompts(50, 20), (4, 1), device="cpu", head_dim=32, page_size=0)
    out, row = cases.reference(inputs)[0], 0
    for n in (50, 20):
        q, k, v = (x[row : row + n].double().transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out[row : row + n], expected.transpose(0, 1))
        row += n


def test_paged_and_ragged_agree() -> None:
    paged = make(prompts(40, 7), (4, 2), device="cpu", head_dim=32, page_size=16)
    keys, values = [], []
    for b, n in enumerate((40, 7)):
        pages = paged.block_ids[b, : -(-n // 16)].long()
        keys.append(paged.k[pages].flatten(0, 1)[:n])
        values.append(paged.v[pages].flatten(0, 1)[:n])
    import hpc

    got = hpc.attention_prefill_bf16(paged.q, torch.cat(keys), torch.cat(values), paged.cu_seqlens.diff(),
                                     paged.cu_seqlens, 40)  # fmt: skip
    assert torch.equal(got, cases.attend(paged))


def test_pieces_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc.attention.prefill import reference

    inputs = make(BATCHES["chunks"], (4, 2), device="cpu", head_dim=16, dtype="fp8")
    whole = cases.reference(inputs)
    monkeypatch.setattr(reference, "_MOST_SCORES", 9000)
    for got, expected in zip(cases.reference(inputs), whole, strict=True):
        torch.testing.assert_close(got, expected)
