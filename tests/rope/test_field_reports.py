"""Faults that users of such kernels met, each with the smallest input that shows it: on a GPU by the compiled kernel,
else by the interpreted one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rope_support import WHERE, assert_same, expected, interpreted, kernel, make, poison, raw, same_bits

import hpc
from hpc.rope import cases, plan, reference
from hpc.rope.cases import RopeInputs

SMALL: dict[str, Any] = {"head_dim": 32, "page_size": 16}


def one_token(inputs: RopeInputs, row: int, length: int, request: int) -> RopeInputs:
    """The call of token `row` alone, the `length`-th of its request, over the same caches."""
    cache = replace(inputs.cache, block_ids=inputs.cache.block_ids[request : request + 1].contiguous())
    device = inputs.qkv.device
    return replace(
        inputs, params=replace(inputs.params, new=(1,), lens=(length,), spare_rows=0), cache=cache,
        qkv=inputs.qkv[row : row + 1], seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        q_index=torch.tensor([0, 1], dtype=torch.int32, device=device),
    )  # fmt: skip


@WHERE
@pytest.mark.parametrize("quant_policy", [1, 2])
def test_fr_26_zero_heads_and_zero_rows(where: str, quant_policy: int) -> None:
    """No division by zero: codes are 0, scales finite, neighbours as ever."""
    inputs = make(
        (9, 7), (2, 7), (4, 2), where, dtype="fp8", quant_policy=quant_policy, norm_policy=0, **SMALL
    )
    inputs.qkv[1] = 0
    inputs.qkv[3, :32] = 0
    have = kernel(poison(inputs))
    assert_same(have, expected(inputs))
    codes, scale = have["out_q"], have["q_scale"]
    assert codes is not None
    zeros = [(raw(part) & 0x7F).any() for part in (codes[1], codes[3, 0], codes[3, 1])]  # either zero
    assert zeros == [False, False, True]
    if quant_policy == 1:
        assert scale is not None and torch.isfinite(scale).all()
        assert scale[3, 0] == torch.tensor(1e-6) / 448 and (scale[1] == scale[3, 0]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 1023, 1024, 4096])
@pytest.mark.parametrize("norm_policy", [1, 2])
@pytest.mark.parametrize("rotary_dim", [128, 64])
def test_fr_38_a_token_in_a_crowd_has_the_bits_it_has_alone(
    tokens: int, norm_policy: int, rotary_dim: int
) -> None:
    inputs = make((tokens,), (tokens,), (8, 2), "cuda", norm_policy=norm_policy, rotary_dim=rotary_dim, is_prefill=True,
                  keep_k=True)  # fmt: skip
    whole = cases.prologue(inputs)
    for row in {0, 1, tokens // 2, tokens - 2, tokens - 1}:
        single = replace(one_token(inputs, row, row + 1, 0), out_k=torch.empty_like(inputs.out_k[:1]))
        assert same_bits(cases.prologue(single)[0], whole[row]), row
        assert same_bits(single.out_k[0], inputs.out_k[row]), row


@pytest.mark.interpret
@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.slow), 8, 64])
def test_fr_38_bits_do_not_depend_on_the_tile(heads: int) -> None:
    inputs = make(
        (23,), (23,), (3, 1), "cpu", dtype="fp8", norm_policy=1, is_prefill=True, rotary_dim=16, **SMALL
    )
    assert_same(interpreted(poison(inputs), plan.Plan(heads, 4)), expected(inputs))


@WHERE
def test_fr_52_kept_keys_are_the_rotated_ones(where: str) -> None:
    """`out_k` and `out_v` hold what the cache holds otherwise; the projection is not changed."""
    inputs = make((22,), (22,), (8, 4), where, is_prefill=True, **SMALL)
    before = inputs.qkv.clone()
    kernel(cached := poison(inputs))
    shape = (22, 4, 32)
    kept = replace(
        poison(inputs),
        out_k=torch.empty(shape).bfloat16().to(where),
        out_v=torch.empty(shape).bfloat16().to(where),
    )
    kernel(kept)
    pages, rows = inputs.cache.block_ids[0].long()[torch.arange(22) // 16], torch.arange(22) % 16
    assert same_bits(cached.cache.kcache[pages, rows.to(where)], kept.out_k)
    assert same_bits(cached.cache.vcache[pages, rows.to(where)], kept.out_v)
    assert same_bits(inputs.qkv, before)
    assert not same_bits(kept.out_k, before[:, 8 * 32 : 12 * 32].view(shape))
    first = inputs.cache.block_ids[0, 0].long()
    assert same_bits(kept.cache.kcache[first], inputs.cache.kcache[first]), "the cache's rows are left alone"


@WHERE
@pytest.mark.parametrize("neox", [True, False])
def test_fr_55_pairing_of_dims(where: str, neox: bool) -> None:
    """One-hot inputs at position 7 show which dim is turned into which."""
    inputs = make((9,), (3,), (1, 1), where, norm_policy=0, neox=neox, is_prefill=True, **SMALL)
    inputs.qkv.zero_()
    inputs.qkv[1, 0], inputs.qkv[2, 1] = 1, 1
    out = kernel(inputs)["out_q"]
    assert out is not None
    out = out.cpu().double()
    cos, sin = inputs.cos_sin.cpu()[7].chunk(2)
    assert out[1, 0, 0] == cos[0].bfloat16() and out[1, 0, 16 if neox else 1] == sin[0].bfloat16()
    cos, sin = inputs.cos_sin.cpu()[8].chunk(2)
    pair = 1 if neox else 0
    assert out[2, 0, 1] == cos[pair].bfloat16()
    assert out[2, 0, 17 if neox else 0] == (sin if neox else -sin)[pair].bfloat16()
    assert (out != 0).sum() == 4 and not out[0].any()


@WHERE
def test_fr_57_no_byte_beside_the_addressed_ones(where: str) -> None:
    """Tokens of requests at odd places equal as many calls of one token; all else stays 0xAA."""
    lens, new = ((37, 20, 9, 30, 5), (11, 10, 9, 5, 2)) if where == "cuda" else ((37, 20, 3), (4, 5, 3))
    inputs = make(lens, new, (2, 2), where, dtype="fp8", **SMALL)
    for cache in (inputs.cache.kcache, inputs.cache.vcache):
        cache.view(torch.uint8).fill_(0xAA)
    kernel(together := poison(inputs))
    alone = poison(inputs)
    row = 0
    for b, (length, count) in enumerate(zip(lens, new, strict=True)):
        for i in range(count):
            kernel(one_token(alone, row, length - count + i + 1, b))
            row += 1
    for name in ("kcache", "vcache"):
        have = getattr(together.cache, name).view(torch.uint8)
        assert torch.equal(have, getattr(alone.cache, name).view(torch.uint8)), name
        owned = torch.zeros(have.shape[:2], dtype=torch.bool)
        for b, (length, count) in enumerate(zip(lens, new, strict=True)):
            ids = inputs.cache.block_ids[b].cpu().long()
            for position in range(length - count, length):
                owned[ids[position // 16], position % 16] = True
            last = ids[(length - 1) // 16]
            assert not have[last, (length - 1) % 16 + 1 :].any(), "the tail of the last page is zero"
            owned[last, (length - 1) % 16 + 1 :] = True
        assert (have.cpu()[~owned] == 0xAA).all()


@WHERE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("is_prefill", [False, True])
def test_fr_73_bad_values_stay_in_their_head(where: str, bad: float, is_prefill: bool) -> None:
    """A NaN or an infinity in one query head: its scale tells; every other value keeps its bits."""
    inputs = make((9, 3), (3, 3), (4, 2), where, dtype="fp8", norm_policy=0, is_prefill=is_prefill, **SMALL)
    clean = kernel(poison(inputs))
    inputs.qkv[1, 32 + 5] = bad
    have = kernel(poison(inputs))
    assert_same(have, expected(inputs))
    scale = have["q_scale"]
    assert scale is not None and clean["q_scale"] is not None
    at = (0, 1, 1) if is_prefill else (1, 1)
    assert not torch.isfinite(scale[at])
    scale[at], clean["q_scale"][at] = 0, 0
    have["out_q"].view(torch.uint8)[1, 1], clean["out_q"].view(torch.uint8)[1, 1] = 0, 0  # type: ignore[union-attr]
    assert_same(have, clean)


@WHERE
def test_fr_73_a_whole_row_of_nan_reaches_its_own_row_only(where: str) -> None:
    inputs = make((9, 3), (3, 3), (4, 2), where, dtype="fp8", **SMALL)
    clean = kernel(poison(inputs))
    inputs.qkv[2] = float("nan")
    have = kernel(poison(inputs))
    assert_same(have, expected(inputs))
    assert (raw(have["out_q"][2]) == 0x7F).all() and have["q_scale"][2].isnan().all()  # type: ignore[index]
    for name in ("out_q", "q_scale"):
        for row in (0, 1, 3, 4, 5):
            assert same_bits(have[name][row], clean[name][row])  # type: ignore[index]


FORMS = {
    "tensor [1]": lambda device: torch.full((1,), 0.5, device=device),
    "tensor []": lambda device: torch.tensor(0.5, device=device),
    "CPU tensor": lambda device: torch.full((1,), 0.5),
    "float": lambda device: 0.5,
}


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fr_81_forms_of_a_scale(where: str) -> None:
    inputs = make((9, 3), (3, 3), (4, 2), where, dtype="fp8", **SMALL)
    p = inputs.params

    def run(k_scale: Any, v_scale: Any) -> list[torch.Tensor]:
        x = poison(inputs)
        hpc.rope_norm_store_kv_fp8(
            x.cache.kcache, x.cache.vcache, x.qkv, x.cos_sin, x.seq_lens, x.q_index, x.cache.block_ids, False, k_scale,
            v_scale, 1, q_norm_weight=x.q_weight, k_norm_weight=x.k_weight, qk_norm_policy=p.norm_policy,
        )  # fmt: skip
        return [x.cache.kcache, x.cache.vcache]

    want = run(torch.full((1,), 0.5, device=where), torch.full((1,), 1.0, device=where))
    for name, form in FORMS.items():
        for none in (None, 1, torch.ones(1, device=where)):
            have = run(form(where), none)
            assert all(same_bits(a, b) for a, b in zip(have, want, strict=True)), (name, none)
    for wrong in ("0.5", True, [0.5], torch.full((1,), 0.5, dtype=torch.float64)):
        with pytest.raises(TypeError, match="k_scale"):
            run(wrong, None)


# --- sharp edges of the contract -------------------------------------------------------------------------------


@WHERE
def test_row_16_max_seqlens_too_small_is_seen_and_writes_nothing_else(where: str) -> None:
    """Queries beyond it become NaN instead of being scaled by someone else's number."""
    inputs = make((150, 3), (150, 3), (2, 1), where, dtype="fp8", is_prefill=True, **SMALL)
    small = replace(inputs, params=replace(inputs.params, new=(100, 3)))  # max_seqlens = 100: 128 columns
    small = replace(small, params=replace(small.params, spare_rows=50))
    have = kernel(poison(small))
    assert_same(have, expected(small))
    codes, scale = have["out_q"], have["q_scale"]
    assert codes is not None and scale is not None and scale.shape == (2, 2, 128)
    assert (raw(codes[128:150]) == 0x7F).all()
    assert not codes[:128].float().isnan().any() and not codes[150:].float().isnan().any()


@WHERE
def test_row_17_positions_beyond_the_table_take_its_last_row(where: str) -> None:
    inputs = make((40,), (40,), (2, 1), where, max_pos=10, is_prefill=True, **SMALL)
    have = kernel(poison(inputs))
    assert_same(have, expected(inputs))
    longer = replace(
        inputs, cos_sin=torch.cat((inputs.cos_sin, inputs.cos_sin[9:10].expand(40, -1))).contiguous()
    )
    assert_same(kernel(poison(longer)), have)


@WHERE
def test_row_17_lengths_beyond_the_page_table_and_pages_beyond_the_cache(where: str) -> None:
    """No write outside: such tokens are rotated, not stored."""
    inputs = make((200, 30, 20), (2, 2, 2), (2, 1), where, **SMALL)
    inputs.cache.block_ids[1, 1] = 10**9
    inputs.cache.block_ids[2, 1] = -5
    inputs.seq_lens[0] = 16 * inputs.cache.block_ids.shape[1] + 5
    x = poison(inputs)
    before = raw(x.cache.kcache).clone()
    have = kernel(x)
    assert_same(have, expected(inputs))
    assert torch.equal(raw(x.cache.kcache), before), "nothing had a place"
    assert have["out_q"] is not None and have["out_q"].float().abs().amin((0, 1, 2)) >= 0


@WHERE
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("is_prefill", [False, True])
def test_row_18_padding_has_defined_outputs(where: str, dtype: str, is_prefill: bool) -> None:
    """Rows before the first request, behind the last one and of a request of length 0: zeros; every flag is zero."""
    inputs = make((20, 0, 5), (3, 2, 1), (4, 2), where, dtype=dtype, spare_rows=3, is_prefill=is_prefill, keep_k=True,
                  keep_v=True, **SMALL)  # fmt: skip
    have = kernel(poison(inputs))
    assert_same(have, expected(inputs))
    for name in ("out_q", "out_k", "out_v"):
        tensor = have[name]
        assert tensor is not None
        assert not raw(tensor[3:5]).any() and not raw(tensor[6:]).any() and raw(tensor[5]).any(), name
    if dtype == "fp8":
        flag, scale = have["split_k_flag"], have["q_scale"]
        assert flag is not None and flag.shape == (3, 2) and not flag.any()
        assert scale is not None and torch.isfinite(scale).all()
        assert int((scale != 0).sum()) == 4 * 4, "four rows of four heads"


@WHERE
@pytest.mark.parametrize("layout", ["NHD", "HND", "joint"])
def test_row_18_strides_of_the_caches(where: str, layout: str) -> None:
    inputs = make((40, 17), (5, 17), (4, 2), where, layout=layout, is_prefill=True, **SMALL)
    assert_same(kernel(poison(inputs)), expected(inputs))


@WHERE
def test_row_19_eps(where: str) -> None:
    """Inputs as small as the root of eps: 1e-5 and 1e-6 give other results, each that of the formula."""
    results = []
    for eps in (1e-6, 1e-5):
        inputs = make((9,), (9,), (2, 1), where, eps=eps, is_prefill=True, **SMALL)
        inputs.qkv.mul_(1e-3)
        have = kernel(poison(inputs))
        assert_same(have, expected(inputs))
        results.append(have["out_q"])
    assert not same_bits(results[0], results[1])


@WHERE
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_row_1_nothing_to_do(where: str, dtype: str) -> None:
    """No tokens still clears tails and flags; no requests still zeroes rows."""
    inputs = make((20, 5), (0, 0), (4, 2), where, dtype=dtype, is_prefill=True, **SMALL)
    have = kernel(poison(inputs))
    assert_same(have, expected(inputs))
    assert have["out_q"] is not None and have["out_q"].shape == (0, 4, 32)
    empty = make((), (), (4, 2), where, dtype=dtype, spare_rows=3, **SMALL)
    have = kernel(poison(empty))
    assert_same(have, expected(empty))
    assert have["out_q"] is not None and not raw(have["out_q"]).any()


@WHERE
def test_requests_that_bring_no_token_are_cleared_too(where: str) -> None:
    inputs = make((20, 33, 5), (1, 0, 1), (4, 2), where, **SMALL)
    have = kernel(poison(inputs))
    assert_same(have, expected(inputs))
    page = int(inputs.cache.block_ids[1, 2])
    assert have["key_cache"] is not None and not raw(have["key_cache"][page, 1:]).any()


def test_reference_against_float64_by_hand() -> None:
    """The oracle itself: one token, one head, computed with the standard library alone."""
    import math

    x = torch.tensor([[3.0, -1.0, 0.5, 2.0]])
    weight = torch.tensor([1.0, 2.0, 0.5, 1.5])
    table = torch.tensor([[0.6, 1.0, 0.8, 0.0]])
    rms = math.sqrt((9 + 1 + 0.25 + 4) / 4 + 1e-6)
    n = [3 / rms, -2 / rms, 0.25 / rms, 3 / rms]
    neox = [n[0] * 0.6 - n[2] * 0.8, n[1], n[2] * 0.6 + n[0] * 0.8, n[3]]
    pairs = [n[0] * 0.6 - n[1] * 0.8, n[1] * 0.6 + n[0] * 0.8, n[2], n[3]]
    qkv = x.repeat(1, 3)
    for style, want in ((True, neox), (False, pairs)):
        q, k, v = reference.project(
            qkv, table, torch.zeros(1, dtype=torch.long), 1, 4, 4, q_norm_weight=weight, k_norm_weight=weight,
            qk_norm_policy=2, is_neox_style=style,
        )  # fmt: skip
        torch.testing.assert_close(q[0, 0], torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)
        assert torch.equal(q, k) and torch.equal(v[0, 0], x[0].double())
    after, _, _ = reference.project(
        qkv, table, torch.zeros(1, dtype=torch.long), 1, 4, 4, q_norm_weight=weight, k_norm_weight=weight,
        qk_norm_policy=1,
    )  # fmt: skip
    turned = [3 * 0.6 - 0.5 * 0.8, -1.0, 0.5 * 0.6 + 3 * 0.8, 2.0]
    rms = math.sqrt(sum(t * t for t in turned) / 4 + 1e-6)
    want = [t / rms * w for t, w in zip(turned, weight.tolist(), strict=True)]
    torch.testing.assert_close(after[0, 0], torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)
