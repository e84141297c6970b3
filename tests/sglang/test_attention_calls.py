"""The calls of `HPCOpsAttnBackend`, in the order of a step, on tensors laid out as it lays them out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from sglang_support import (
    BF16_TOLERANCE_RMS,
    FP8,
    HEAD_DIM,
    GraphBuffers,
    Pool,
    attend_pool,
    call,
    nan_,
    need,
    rms,
    to_fp8,
)

import hpc

HEADS = {"group8": (8, 1), "group4": (8, 2), "hy3": (64, 8)}
# Both sides use the stored codes: what is left is the rounding of the result and of probabilities to 16 bits.
FP8_RMS = 6e-3
MIN_PROCESS_LEN = 512


def draw(shape: Sequence[int], seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def make_tasks(max_bs: int, context_len: int, num_kv_heads: int) -> torch.Tensor:
    """`init_cuda_graph_state`: once, for the largest batch."""
    return call(
        "get_attention_decode_task_workspace",
        max_bs,
        context_len,
        num_kv_heads,
        min_process_len=MIN_PROCESS_LEN,
    )


def assign(cache_seqlens: torch.Tensor, tasks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """`_assign_decode_tasks`: once a step, or inside the graph. mtp here is tokens a request."""
    call(
        "assign_attention_decode_task", cache_seqlens, tasks, num_kv_heads, mtp=1, new_kv_included=True,
        min_process_len=MIN_PROCESS_LEN,
    )  # fmt: skip
    return tasks


def decode_bf16(
    q: torch.Tensor,
    pool: Pool,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    tasks: torch.Tensor | None,
) -> torch.Tensor:
    """`forward_decode` without FP8; q arrives as `[tokens, heads * dim]`."""
    more = {} if tasks is None else {"task_map": tasks}
    heads = q.shape[1] // HEAD_DIM
    o = call(
        "attention_decode_bf16", q.view(-1, heads, HEAD_DIM), *pool.caches(), page_table, cache_seqlens, mtp=0,
        new_kv_included=True, splitk=True, **more,
    )  # fmt: skip
    return o.view(-1, heads * HEAD_DIM)


# --- bf16 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False], ids=["task_map", "no_graphs"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_bf16_decode_eager(heads: tuple[int, int], dynamic: bool, device: torch.device) -> None:
    """An eager step: uninitialised table tails, NaN in every slot without a token. Without graphs there is no task map.

    q is a slice of the fused projection, with the projection's row stride, as in models without q-norm.
    """
    q_heads, kv_heads = heads
    pool = Pool((300, 1, 65, 64), kv_heads, torch.bfloat16, device)
    pool.fill()
    qkv = draw((4, (q_heads + 2 * kv_heads) * HEAD_DIM), 1, device)
    q = qkv[:, : q_heads * HEAD_DIM]
    tasks = assign(pool.cache_seqlens(), make_tasks(8, 512, kv_heads), kv_heads) if dynamic else None
    before = [t.clone() for t in (qkv, pool.page_table(), *pool.caches())]
    o = decode_bf16(q, pool, pool.page_table(), pool.cache_seqlens(), tasks)
    assert o.dtype == torch.bfloat16 and o.shape == q.shape
    expected = attend_pool(pool, q.view(-1, q_heads, HEAD_DIM), [1] * 4).flatten(1)
    assert rms(o, expected) < BF16_TOLERANCE_RMS
    after = (qkv, pool.page_table(), *pool.caches())
    same = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, after, strict=True)]
    assert all(same), "decode writes nothing but its output"


def test_bf16_decode_in_graph_buffers(device: torch.device) -> None:
    """Static buffers for 8 requests, a captured batch of 4 with two real requests, then one of 8 with others.

    Both share one task workspace, and stale rows of the earlier step stay in the buffers.
    """
    q_heads, kv_heads = 8, 2
    first = Pool((200, 70), kv_heads, torch.bfloat16, device, seed=1)
    buffers, tasks = GraphBuffers(8, first), make_tasks(8, 512, kv_heads)
    for seed, (lens, bs) in enumerate((((200, 70), 4), ((511, 3, 128, 64, 9), 8), ((33,), 4))):
        pool = Pool(lens, kv_heads, torch.bfloat16, device, seed=seed + 1)
        pool.fill()
        cache_seqlens, page_table = buffers.load(pool, bs)
        assert page_table.data_ptr() == buffers.page_table.data_ptr()
        q = draw((bs, q_heads * HEAD_DIM), seed, device)
        o = decode_bf16(q, pool, page_table, cache_seqlens, assign(cache_seqlens, tasks, kv_heads))
        live = len(lens)
        expected = attend_pool(pool, q[:live].view(-1, q_heads, HEAD_DIM), [1] * live).flatten(1)
        assert o.shape == (bs, q_heads * HEAD_DIM)
        assert rms(o[:live], expected) < BF16_TOLERANCE_RMS


def prefill_bf16(q: torch.Tensor, pool: Pool, q_lens: Sequence[int]) -> torch.Tensor:
    """`forward_extend` without FP8."""
    heads = q.shape[1] // HEAD_DIM
    cu_seqlens_q = torch.nn.functional.pad(torch.tensor(q_lens).cumsum(0, dtype=torch.int32), (1, 0))
    o = call(
        "attention_with_kvcache_prefill_bf16", q.view(-1, heads, HEAD_DIM), *pool.caches(),
        cu_seqlens_q.to(q.device), pool.page_table(), pool.cache_seqlens(), max(q_lens),
    )  # fmt: skip
    return o.view(-1, heads * HEAD_DIM)


EXTENDS = {
    "whole_prompts": ((100, 64, 1), (100, 64, 1)),
    "chunk_and_prefix_hit": ((300, 129), (70, 65)),
    "mixed_chunk": ((200, 77, 128), (90, 1, 1)),
}


@pytest.mark.parametrize("case", EXTENDS.values(), ids=EXTENDS)
def test_bf16_extend(case: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device) -> None:
    """Lengths count the new tokens; requests start at 0, at a chunk's or a prefix's end; one-token rows decode."""
    lens, q_lens = case
    q_heads, kv_heads = 8, 2
    need("attention_with_kvcache_prefill_bf16")
    pool = Pool(lens, kv_heads, torch.bfloat16, device)
    pool.fill()
    q = draw((sum(q_lens), (q_heads + 2 * kv_heads) * HEAD_DIM), 2, device)[:, : q_heads * HEAD_DIM]
    o = prefill_bf16(q, pool, q_lens)
    expected = attend_pool(pool, q.view(-1, q_heads, HEAD_DIM), q_lens).flatten(1)
    assert rms(o, expected) < BF16_TOLERANCE_RMS


def test_extend_of_a_padded_batch(device: torch.device) -> None:
    """Rows of q behind the last request (data-parallel padding) are no request's: finite, and no one's business."""
    need("attention_with_kvcache_prefill_bf16")
    pool = Pool((40, 90), 1, torch.bfloat16, device)
    pool.fill()
    q_lens = (40, 20)
    q = nan_(torch.empty(70, 4 * HEAD_DIM, dtype=torch.bfloat16, device=device))
    q[:60] = draw((60, 4 * HEAD_DIM), 3, device)
    o = prefill_bf16(q, pool, q_lens)
    assert (
        rms(o[:60], attend_pool(pool, q[:60].view(-1, 4, HEAD_DIM), q_lens).flatten(1)) < BF16_TOLERANCE_RMS
    )
    assert bool(torch.isfinite(o[60:].float()).all())


# --- fp8: the fused prologue, then attention ----------------------------------------------------------


class Fp8Layer:
    """What HunYuan V3 hands to the prologue: fp32 table and norm weights, per-tensor KV scales of shape [1]."""

    def __init__(self, heads: tuple[int, int], device: torch.device, norm: bool = True) -> None:
        generator = torch.Generator().manual_seed(11)
        self.heads, self.policy = heads, 2 if norm else 0
        angles = torch.outer(torch.arange(512.0), 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
        weights = [(torch.rand(HEAD_DIM, generator=generator) + 0.5).to(device) for _ in range(2)]
        self.q_norm, self.k_norm = weights if norm else (None, None)
        scales = torch.tensor([0.02, 0.03], dtype=torch.bfloat16, device=device)
        # layer.k_scale is a 0-d parameter of any dtype
        self.k_scale, self.v_scale = (scale.reshape(1).float() for scale in scales)

    def prologue(
        self, pool: Pool, qkv: torch.Tensor, out_q: torch.Tensor, q_index: torch.Tensor, page_table: torch.Tensor,
        cache_seqlens: torch.Tensor, is_extend: bool, max_seqlens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`_run_fp8_rope_store_kv`: (q_scale, split_k_flag); queries go to `out_q`."""
        key_cache, value_cache = pool.caches()
        _, q_scale, split_k_flag = call(
            "rope_norm_store_kv_fp8",
            key_cache=key_cache, value_cache=value_cache, qkv=qkv, cos_sin=self.cos_sin,
            num_seqlen_per_req=cache_seqlens, q_index=q_index, kvcache_indices=page_table, is_prefill=is_extend,
            k_scale=self.k_scale, v_scale=self.v_scale,
            quant_policy=hpc.QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR.value, max_seqlens=max_seqlens,
            q_norm_weight=self.q_norm, k_norm_weight=self.k_norm, out_q=out_q, qk_norm_policy=self.policy,
        )  # fmt: skip
        return q_scale, split_k_flag

    def expected(
        self, qkv: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v `[tokens, heads, dim]` in float64, before any rounding to e4m3. RMS norm's eps is 1e-6."""
        q_heads, kv_heads = self.heads
        q, k, v = qkv.double().unflatten(1, (-1, HEAD_DIM)).split((q_heads, kv_heads, kv_heads), 1)
        cos, sin = self.cos_sin.double()[positions.to(qkv.device)][:, None].chunk(2, -1)

        def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
            if weight is not None:
                x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        return turned(q, self.q_norm), turned(k, self.k_norm), v

    def attend(
        self, pool: Pool, codes: torch.Tensor, scale: torch.Tensor, q_lens: Sequence[int]
    ) -> torch.Tensor:
        """Attention of the stored codes: what FP8 attention has to reproduce."""
        q = codes.float().double() * scale.double()[..., None]
        scales = (float(self.k_scale), float(self.v_scale))
        return attend_pool(pool, q.float(), q_lens, *scales).flatten(1)


def positions_of(lens: Sequence[int], q_lens: Sequence[int]) -> torch.Tensor:
    return torch.cat(
        [torch.arange(length - count, length) for length, count in zip(lens, q_lens, strict=True)]
    )


def check_stored(
    layer: Fp8Layer,
    pool: Pool,
    qkv: torch.Tensor,
    q_lens: Sequence[int],
    before: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """New tokens are in the cache as the nearest codes, no other token's row has changed, and rows behind a request's
    last token in its page are zero."""
    _, k, v = layer.expected(qkv, positions_of(pool.lens, q_lens))
    at = 0
    for request, count in enumerate(q_lens):
        fresh = pool.slots(request, pool.lens[request] - count).to(pool.device)
        old = pool.slots(request)[: pool.lens[request] - count].to(pool.device)
        last = int(pool.slots(request)[-1])
        tail = torch.arange(last + 1, (last // pool.page + 1) * pool.page, device=pool.device)
        sides = ((pool.k_buffer, k, layer.k_scale, before[0]), (pool.v_buffer, v, layer.v_scale, before[1]))
        for buffer, values, scale, was in sides:
            codes = buffer.view(torch.uint8)
            want = to_fp8(values[at : at + count] / scale.double())
            wrong = codes[fresh] != want.view(torch.uint8)
            assert float(wrong.double().mean()) < 2e-3, "codes other than the nearest"
            assert rms(codes[fresh].view(FP8).float(), want.float()) < 5e-3
            assert torch.equal(codes[old], was[old]), "an older token was overwritten"
            assert not codes[tail].any(), "the tail of the last page is not zero"
        at += count


def check_queries(
    layer: Fp8Layer, qkv: torch.Tensor, positions: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
) -> None:
    """codes * scale is q to e4m3's half step, with the scale of the largest value of its head."""
    q, _, _ = layer.expected(qkv, positions)
    largest = q.abs().amax(-1)
    torch.testing.assert_close(scale.double(), largest / 448.0, rtol=1e-5, atol=0)
    error = (codes.double() * scale.double()[..., None] - q).abs()
    assert bool((error <= q.abs() * 2**-4 * 1.001 + largest[..., None] * 1e-5).all())


@pytest.mark.parametrize("norm", [True, False], ids=["qk_norm", "no_norm"])
@pytest.mark.parametrize("heads", [(8, 1), (64, 8)], ids=["8_1", "64_8"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["task_map", "no_graphs"])
def test_fp8_decode_chain(heads: tuple[int, int], norm: bool, dynamic: bool, device: torch.device) -> None:
    """Prologue, then decode: q_index is a slice of a static arange, the scale is [tokens, heads], the flag its own."""
    need("rope_norm_store_kv_fp8")
    lens = (200, 1, 64, 65)
    pool = Pool(lens, heads[1], FP8, device)
    pool.fill(fresh=[1] * len(lens), std=30.0)
    layer = Fp8Layer(heads, device, norm)
    qkv = draw((len(lens), (heads[0] + 2 * heads[1]) * HEAD_DIM), 5, device)
    kept = qkv.clone()
    before = tuple(b.view(torch.uint8).clone() for b in (pool.k_buffer, pool.v_buffer))
    indptr = torch.arange(64, dtype=torch.int32, device=device)  # one more than the request pool is large
    table, seqlens = pool.page_table(), pool.cache_seqlens()
    out_q = nan_(torch.empty((len(lens), heads[0], HEAD_DIM), dtype=FP8, device=device))
    q_scale, flag = layer.prologue(pool, qkv, out_q, indptr[: len(lens) + 1], table, seqlens, False, 1)
    assert q_scale.dtype == torch.float32 and q_scale.shape == (len(lens), heads[0])
    assert flag.dtype == torch.int32 and flag.shape == (len(lens), heads[1]) and not flag.any()
    assert torch.equal(qkv, kept)
    check_stored(layer, pool, qkv, [1] * len(lens), before)
    check_queries(layer, qkv, positions_of(lens, [1] * len(lens)), out_q, q_scale)

    q = out_q.view(-1, heads[0] * HEAD_DIM)  # through RadixAttention and back
    tasks = assign(seqlens, make_tasks(8, 512, heads[1]), heads[1]) if dynamic else None
    o = call(
        "attention_decode_fp8", q.view(-1, heads[0], HEAD_DIM), *pool.caches(), table, seqlens, q_scale,
        layer.k_scale, layer.v_scale, mtp=0, new_kv_included=True, splitk=True, task_map=tasks, split_flag=flag,
    ).view(-1, heads[0] * HEAD_DIM)  # fmt: skip
    assert o.dtype == torch.bfloat16
    assert rms(o, layer.attend(pool, out_q, q_scale, [1] * len(lens))) < FP8_RMS


def test_fp8_decode_chain_of_a_padded_graph(device: torch.device) -> None:
    """Four rows of which two are padding of length 1: both write and clear page 0, which no request owns."""
    need("rope_norm_store_kv_fp8")
    heads, bs = (8, 1), 4
    pool = Pool((130, 20), 1, FP8, device)
    pool.fill(fresh=[1, 1], std=30.0)
    layer, buffers, tasks = Fp8Layer(heads, device), GraphBuffers(8, pool), make_tasks(8, 512, 1)
    seqlens, table = buffers.load(pool, bs)
    qkv = draw((bs, 10 * HEAD_DIM), 6, device)
    before = tuple(b.view(torch.uint8).clone() for b in (pool.k_buffer, pool.v_buffer))
    indptr = torch.arange(64, dtype=torch.int32, device=device)
    out_q = nan_(torch.empty((bs, 8, HEAD_DIM), dtype=FP8, device=device))
    q_scale, flag = layer.prologue(pool, qkv, out_q, indptr[: bs + 1], table, seqlens, False, 1)
    check_stored(layer, pool, qkv[:2], [1, 1], before)
    o = call(
        "attention_decode_fp8", out_q, *pool.caches(), table, seqlens, q_scale, layer.k_scale, layer.v_scale, mtp=0,
        new_kv_included=True, splitk=True, task_map=assign(seqlens, tasks, 1), split_flag=flag,
    )  # fmt: skip
    assert rms(o[:2].flatten(1), layer.attend(pool, out_q[:2], q_scale[:2], [1, 1])) < FP8_RMS
    assert bool(torch.isfinite(o.float()).all()), "padded rows go on through the model"


@pytest.mark.parametrize("wrapper", ["eager", "between_graph_pieces"])
@pytest.mark.parametrize("case", EXTENDS.values(), ids=EXTENDS)
def test_fp8_extend_chain(
    case: tuple[tuple[int, ...], tuple[int, ...]], wrapper: str, device: torch.device
) -> None:
    """Prologue with the scale [requests, heads, tokens padded to 128], then prefill attention.

    Between captured pieces (0.5.17's split op, 0.5.23's `_eager_rope_store_kv`) qkv and out_q are the first rows of
    buffers padded to the captured size.
    """
    need("rope_norm_store_kv_fp8")
    lens, q_lens = case
    heads, count = (8, 1), sum(q_lens)
    pool = Pool(lens, 1, FP8, device)
    pool.fill(fresh=q_lens, std=30.0)
    layer = Fp8Layer(heads, device)
    rows = count if wrapper == "eager" else count + 30
    qkv = nan_(torch.empty(rows, 10 * HEAD_DIM, dtype=torch.bfloat16, device=device))
    qkv[:count] = draw((count, 10 * HEAD_DIM), 7, device)
    out_q = nan_(torch.empty((rows, 8, HEAD_DIM), dtype=FP8, device=device))
    before = tuple(b.view(torch.uint8).clone() for b in (pool.k_buffer, pool.v_buffer))
    cu_seqlens_q = torch.nn.functional.pad(torch.tensor(q_lens).cumsum(0, dtype=torch.int32), (1, 0)).to(
        device
    )
    table, seqlens = pool.page_table(), pool.cache_seqlens()
    longest = max(q_lens)
    q_scale, _ = layer.prologue(pool, qkv[:count], out_q[:count], cu_seqlens_q, table, seqlens, True, longest)
    assert q_scale.dtype == torch.float32 and q_scale.shape == (len(lens), 8, -(-longest // 128) * 128)
    assert bool((out_q[count:].view(torch.uint8) == 0x7F).all()), "rows of the padding were written"
    check_stored(layer, pool, qkv[:count], q_lens, before)
    by_token = torch.cat([q_scale[b, :, :n].T for b, n in enumerate(q_lens)])
    check_queries(layer, qkv[:count], positions_of(lens, q_lens), out_q[:count], by_token)

    need("attention_with_kvcache_prefill_fp8")
    o = call(
        "attention_with_kvcache_prefill_fp8", out_q[:count].view(-1, 8, HEAD_DIM), *pool.caches(), q_scale,
        layer.k_scale, layer.v_scale, cu_seqlens_q, table, seqlens, longest,
    ).view(-1, 8 * HEAD_DIM)  # fmt: skip
    assert o.dtype == torch.bfloat16
    assert rms(o, layer.attend(pool, out_q[:count], by_token, q_lens)) < FP8_RMS


def test_step_of_decode_after_extend(device: torch.device) -> None:
    """One request through two chunks and a decode step, each storing into the same pool: equal to one whole prompt."""
    need("rope_norm_store_kv_fp8")
    heads, total = (8, 1), 131
    layer = Fp8Layer(heads, device)
    qkv = draw((total, 10 * HEAD_DIM), 9, device)
    pool = Pool((total,), 1, FP8, device)
    whole = [64, 130, 131]
    start = 0
    for end in whole:
        count = end - start
        lens = torch.tensor([end], dtype=torch.int32, device=device)
        index = torch.tensor([0, count], dtype=torch.int32, device=device)
        out_q = nan_(torch.empty((count, 8, HEAD_DIM), dtype=FP8, device=device))
        decode = count == 1
        q_scale, flag = layer.prologue(
            pool, qkv[start:end], out_q, index, pool.page_table(), lens, not decode, count
        )
        start = end
    _, k, v = layer.expected(qkv, torch.arange(total))
    slots = pool.slots(0).to(device)
    for buffer, values, scale in ((pool.k_buffer, k, layer.k_scale), (pool.v_buffer, v, layer.v_scale)):
        stored = buffer.view(torch.uint8)[slots].view(FP8).float()
        assert rms(stored, to_fp8(values / scale.double()).float()) < 5e-3
    o = call(
        "attention_decode_fp8", out_q, *pool.caches(), pool.page_table(), lens, q_scale, layer.k_scale, layer.v_scale,
        mtp=0, new_kv_included=True, splitk=True, task_map=None, split_flag=flag,
    )  # fmt: skip
    assert rms(o.flatten(1), layer.attend(pool, out_q, q_scale, [1])) < FP8_RMS
