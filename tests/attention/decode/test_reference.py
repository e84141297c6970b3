"""The oracle against definitions that are simpler still: loops over single keys, a dense softmax, known answers."""

from __future__ import annotations

import math

import pytest
import torch

from hpc.attention.decode.reference import decode_reference
from hpc.testing import make_paged_cache

F64 = torch.float64


def by_loops(q, cache, *, s, included, scale, window=None, cap=None, sinks=None):
    """One query row and one key at a time, in Python floats."""
    rows, heads, _ = q.shape
    page, group = cache.kcache.shape[1], heads // cache.kcache.shape[2]
    out = torch.zeros(rows, heads, cache.vcache.shape[3], dtype=F64)
    lse = torch.full((rows, heads), -math.inf, dtype=F64)
    for row in range(rows):
        b, i = divmod(row, s)
        end = cache.lens[b] + (0 if included else s) - s + 1 + i
        keys = range(max(0, end - window) if window else 0, max(0, end))
        for h in range(heads):
            total, acc = 0.0, torch.zeros(out.shape[2], dtype=F64)
            for j in keys:
                where = int(cache.block_ids[b, j // page]), j % page, h // group
                score = scale * float(q[row, h].to(F64) @ cache.kcache[where].to(F64))
                weight = math.exp(cap * math.tanh(score / cap) if cap else score)
                total += weight
                acc += weight * cache.vcache[where].to(F64)
            if len(keys):
                total += math.exp(float(sinks[h])) if sinks is not None else 0.0
                out[row, h], lse[row, h] = acc / total, math.log(total)
    return out, lse


@pytest.mark.parametrize("layout", ["NHD", "HND", "joint"])
@pytest.mark.parametrize(
    ("lens", "s", "options"),
    [
        ([5, 0, 9, 1], 1, {}),
        ([5, 3, 8], 3, {"window": 2}),
        ([7, 2], 2, {"cap": 1.5, "sinks": True}),
        ([2, 1, 0], 3, {"sinks": True, "window": 4}),  # fewer keys than new tokens
    ],
)
def test_equals_loops_over_keys(layout, lens, s, options):
    cache = make_paged_cache(lens, 2, 8, 4, torch.bfloat16, layout)
    q = torch.randn(len(lens) * s, 6, 8).bfloat16()
    sinks = torch.randn(6) if options.get("sinks") else None
    window, cap = options.get("window"), options.get("cap")
    expected = by_loops(
        q, cache, s=s, included=True, scale=0.3, window=window, cap=cap, sinks=sinks
    )  # fmt: skip
    got = decode_reference(
        q, cache.kcache, cache.vcache, cache.block_ids, cache.seq_lens,
        num_new_tokens=s, new_kv_included=True, softmax_scale=0.3, window=window, logit_cap=cap, sinks=sinks,
    )  # fmt: skip
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_equals_a_dense_softmax():
    cache = make_paged_cache([70], 2, 16, 16, torch.bfloat16)
    q = torch.randn(1, 4, 16).bfloat16()
    pages = cache.block_ids[0, :5].long()
    k, v = (c[pages].flatten(0, 1)[:70].to(F64).repeat_interleave(2, 1) for c in (cache.kcache, cache.vcache))
    weights = (torch.einsum("hd,khd->hk", q[0].to(F64), k) / 4).softmax(-1)
    out, _ = decode_reference(
        q, cache.kcache, cache.vcache, cache.block_ids, cache.seq_lens, num_new_tokens=1, new_kv_included=True
    )
    torch.testing.assert_close(out[0], torch.einsum("hk,khd->hd", weights, v), rtol=1e-12, atol=1e-12)


def test_new_kv_not_included_counts_the_new_tokens():
    cache = make_paged_cache([9, 6], 1, 8, 4, torch.bfloat16)
    q = torch.randn(4, 2, 8).bfloat16()
    args = (q, cache.kcache, cache.vcache, cache.block_ids)
    one = decode_reference(*args, cache.seq_lens, num_new_tokens=2, new_kv_included=True)
    two = decode_reference(*args, cache.seq_lens - 2, num_new_tokens=2, new_kv_included=False)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_zero_queries_give_the_mean_of_the_values():
    lens = [1, 2, 63, 64, 65, 129]
    cache = make_paged_cache(lens, 1, 8, 64, torch.bfloat16)
    out, lse = decode_reference(
        torch.zeros(len(lens), 2, 8).bfloat16(), cache.kcache, cache.vcache, cache.block_ids, cache.seq_lens,
        num_new_tokens=1, new_kv_included=True,
    )  # fmt: skip
    for b, length in enumerate(lens):
        pages = cache.block_ids[b, : -(-length // 64)].long()
        mean = cache.vcache[pages].flatten(0, 1)[:length, 0].to(F64).mean(0)
        torch.testing.assert_close(out[b], mean.expand(2, 8), rtol=1e-12, atol=1e-12)
        assert lse[b, 0].item() == pytest.approx(math.log(length))


def test_a_page_that_does_not_exist_reads_as_zeros():
    """A padded request: length 0 grows by its new token, and its page table holds -1."""
    cache = make_paged_cache([9, 0], 1, 8, 4, torch.bfloat16)
    ids = cache.block_ids.clone()
    for garbage in (-1, cache.kcache.shape[0], 2**31 - 1):
        ids[1] = garbage
        out, lse = decode_reference(
            torch.randn(2, 2, 8).bfloat16(), cache.kcache, cache.vcache, ids, torch.tensor([8, 0]),
            num_new_tokens=1, new_kv_included=False,
        )  # fmt: skip
        assert out.isfinite().all() and (out[1] == 0).all() and (lse[1] == 0).all()


@pytest.mark.parametrize("as_fp32", [False, True])
def test_fp8_equals_the_dequantised_call(as_fp32):
    cache = make_paged_cache([70, 64, 1], 2, 128, 64, torch.float8_e4m3fn, token_scales=True)
    q = torch.randn(3, 4, 128).to(torch.float8_e4m3fn)
    qscale, vscale = torch.rand(3, 4) + 0.01, torch.tensor([3.1, 0.2])
    assert cache.kscale is not None and cache.kscale_float is not None
    scales = cache.kscale_float.permute(0, 1, 3, 2).flatten(1, 2)  # [pages, tokens, heads]
    plain = decode_reference(
        (q.to(F64) * qscale[..., None]), cache.kcache.to(F64) * scales[..., None],
        cache.vcache.to(F64) * vscale[:, None], cache.block_ids, cache.seq_lens,
        num_new_tokens=1, new_kv_included=True,
    )  # fmt: skip
    got = decode_reference(
        q, cache.kcache, cache.vcache, cache.block_ids, cache.seq_lens, num_new_tokens=1, new_kv_included=True,
        qscale=qscale, kscale=cache.kscale_float if as_fp32 else cache.kscale, vscale=vscale, quant_type=0,
    )  # fmt: skip
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_lengths_beyond_the_page_table_are_clamped():
    cache = make_paged_cache([8], 1, 8, 4, torch.bfloat16, garbage_tail=False)
    q = torch.randn(1, 2, 8).bfloat16()
    args = (q, cache.kcache, cache.vcache, cache.block_ids)
    fits = decode_reference(*args, torch.tensor([8]), num_new_tokens=1, new_kv_included=True)
    beyond = decode_reference(*args, torch.tensor([2**31 - 1]), num_new_tokens=1, new_kv_included=False)
    assert torch.equal(fits[0], beyond[0])
