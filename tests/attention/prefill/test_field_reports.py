"""Faults that users of such operators have met, each with its small input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from prefill_support import check, compare, interpret, make

import hpc
from hpc.attention.prefill import cases, plan
from hpc.attention.prefill.case_lists import prompts

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BOTH = pytest.mark.parametrize("dtype", ["bf16", "fp8"])


@HERE
@BOTH
def test_chunks_whose_ends_lie_on_no_block_boundary(dtype: str, where: str) -> None:
    """The causal offset is that of tokens, not of blocks: row i sees keys - n + i + 1 keys."""
    lens = ((100, 357), (1, 65), (63, 64), (64, 64), (129, 4097 if where == "cuda" else 257), (7, 7))
    inputs = make(lens, (4, 2), device=where, dtype=dtype)
    check(inputs)
    out, row = cases.attend(inputs), 0
    for b, (n, keys) in enumerate(lens):  # the last row alone sees every key
        last = replace(
            inputs, params=replace(inputs.params, lens=((1, keys),)), q=inputs.q[row + n - 1 : row + n],
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=where), block_ids=inputs.block_ids[b : b + 1],
            seq_lens=inputs.seq_lens[b : b + 1],
            qscale=None if inputs.qscale is None else inputs.qscale[b : b + 1, :, n - 1 : n].contiguous(),
        )  # fmt: skip
        alone = cases.attend(last)
        torch.testing.assert_close(alone[0].float(), out[row + n - 1].float(), rtol=2e-2, atol=2e-2)
        row += n


@pytest.mark.interpret
@pytest.mark.parametrize("lens", [((36, 93), (1, 65), (31, 32), (7, 7)), ((33, 65),)])
def test_the_same_chunks_by_the_interpreted_kernel(lens: Any) -> None:
    inputs = make(lens, (2, 1), device="cpu", head_dim=32)
    compare(inputs, *interpret(inputs))


@HERE
@BOTH
def test_an_all_zero_query_row_is_the_mean_of_its_values(dtype: str, where: str) -> None:
    """Also where its query scale is zero: the scores are equal, nothing is divided by zero."""
    inputs = make(((20, 90),), (4, 1), device=where, dtype=dtype)
    inputs.q[3] = 0
    if inputs.qscale is not None:
        inputs.qscale[:, :2, 3] = 0.0
    out = cases.attend(inputs)
    assert inputs.block_ids is not None
    values = inputs.v.float()[inputs.block_ids[0, :2].long()].flatten(0, 1)[: 90 - 20 + 4, 0]
    mean = values.mean(0) * (cases.V_SCALE if dtype == "fp8" else 1.0)
    torch.testing.assert_close(out[3].float(), mean.expand(4, -1), rtol=3e-2, atol=3e-2)


@HERE
def test_the_cache_and_the_prologues_own_keys_give_the_same_attention(where: str) -> None:
    """Rotated keys are in the cache or, where asked for, in `out_k` and `out_v`: attention of either agrees, whichever
    kernels the two take."""
    from hpc.rope.cases import rotary_table

    hq, hkv, d, n = 32, 4, 128, 22
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(n, (hq + 2 * hkv) * d, generator=generator).bfloat16().to(where)
    caches = [torch.full((2, 64, hkv, d), float("nan"), device=where).bfloat16() for _ in range(2)]
    lens, index = (torch.tensor(x, dtype=torch.int32, device=where) for x in ([n], [0, n]))
    ids = torch.tensor([[1]], dtype=torch.int32, device=where)
    out_k, out_v = (torch.full((n, hkv, d), float("nan"), device=where).bfloat16() for _ in range(2))
    given = (*caches, qkv, rotary_table(64, d, where), lens, index, ids, True)
    q = hpc.rope_norm_store_kv(*given)
    assert torch.equal(q, hpc.rope_norm_store_kv(*given, out_k=out_k, out_v=out_v))
    paged = hpc.attention_with_kvcache_prefill_bf16(q, *caches, index, ids, lens, n)
    ragged = hpc.attention_prefill_bf16(q, out_k, out_v, lens, index, n)
    torch.testing.assert_close(paged.float(), ragged.float(), rtol=1e-2, atol=1e-2)


@HERE
@BOTH
def test_a_bound_that_is_too_small_drops_nothing(dtype: str, where: str) -> None:
    inputs = make(((150, 200), (3, 3)), (4, 1), device=where, dtype=dtype)
    given = {
        "seqlens_kvcache": inputs.seq_lens,
        "block_ids": inputs.block_ids,
        "cu_seqlens_q": inputs.cu_seqlens,
    }
    given |= {"q": inputs.q, "kcache": inputs.k, "vcache": inputs.v}
    name = "attention_with_kvcache_prefill_" + dtype
    if dtype == "fp8":
        given |= {"qscale": inputs.qscale, "kscale": inputs.kscale, "vscale": inputs.vscale}
    whole = getattr(hpc, name)(**given, max_seqlens_q=150)
    for longest in (0, 1, 10**6 if dtype == "bf16" else 153, torch.tensor(150, device=where)):
        assert torch.equal(getattr(hpc, name)(**given, max_seqlens_q=longest), whole)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("backend", ["portable", "sm90"])
def test_inputs_written_just_before_are_seen(dtype: str, backend: str) -> None:
    """A kernel that starts before the preceding one has ended must wait for what that one writes."""
    inputs = make(prompts(300, 40), (8, 1), dtype=dtype)
    key = cases.key_of(inputs.params, backend == "sm90")
    chosen = plan.sm90(key) if backend == "sm90" else plan.portable(key)
    # As many inputs as turns of the head dim: dead rows, which hold NaN, stay where they are.
    bits = torch.uint8 if dtype == "fp8" else torch.int16
    sources = [
        replace(inputs, **{name: getattr(inputs, name).view(bits).roll(step * turn, -1).view(inputs.q.dtype)
                           for name, step in (("q", 1), ("k", 3), ("v", 8))})
        for turn in range(4)
    ]  # fmt: skip
    wanted = [cases.attend(x, plan=chosen) for x in sources]
    assert all(x.isfinite().all() for x in wanted) and not torch.equal(wanted[0], wanted[1])
    torch.cuda.synchronize()
    for turn in range(400):
        x = sources[turn % 4]
        for mine, theirs in ((inputs.k, x.k), (inputs.v, x.v), (inputs.q, x.q)):
            mine.copy_(theirs)
        assert torch.equal(cases.attend(inputs, plan=chosen), wanted[turn % 4]), f"turn {turn}"
