"""Calls whose keys are cut into parts: the kernels interpreted against float64, the choice, the launches."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from prefill_support import combine, compare, interpret, make

from hpc.attention.prefill import case_lists, cases, launch, plan, validate
from hpc.attention.prefill.case_lists import PrefillCase

# Requests of many, one and no part with keys: no token, no key, fewer keys than tokens, a context that one block holds.
LENS = ((5, 200), (1, 20), (0, 5), (3, 0), (5, 3))
CASES: dict[str, PrefillCase] = {
    "bf16": PrefillCase(LENS, 4, 1, 32, page_size=16, extra_rows=3),
    "bf16 window, sinks": PrefillCase(LENS[:4], 2, 1, 32, window=70, sinks=True, extra_rows=2),
    "bf16 cap, sinks, 3/1 heads, 40/24": PrefillCase(LENS[:1], 3, 1, 40, 24, logit_cap=1.5, sinks=True),
    "bf16 not causal": PrefillCase(LENS[:1], 2, 1, 32, causal=False),
    "fp8": PrefillCase(LENS[:3], 4, 2, 32, page_size=16, dtype="fp8"),
    "fp8 window, cap": PrefillCase(LENS[:1], 2, 1, 32, dtype="fp8", window=100, logit_cap=5.0),
    "fp8 per token, sinks": PrefillCase(((4, 150),), 2, 1, dtype="fp8", quant_type=0, sinks=True),
}


@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    """With more parts than some tiles have blocks, and a number that divides no number of blocks."""
    inputs = cases.make_tensors(CASES[name], "cpu", seed=1)
    compare(inputs, *interpret(inputs, splits=4 if name == "bf16" else 3))


@pytest.mark.interpret
def test_one_part_alone_has_keys() -> None:
    """The joined row is that part's to the bit but for the rounding of a division by one."""
    inputs = make(((3, 20),), (2, 1), device="cpu", head_dim=32)
    whole, lse = interpret(inputs)
    split, split_lse = interpret(inputs, splits=2)
    torch.testing.assert_close(split.float(), whole.float(), rtol=2**-8, atol=0)
    torch.testing.assert_close(split_lse, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.interpret
def test_joining_weighs_parts_by_their_lse() -> None:
    """Any number of parts, far from each other or without a key; what such a part holds is not read."""
    generator = torch.Generator().manual_seed(0)
    for splits, sinks in ((2, None), (7, torch.tensor([0.5, -3.0, 40.0]))):
        o = torch.randn((5 * splits, 3, 24), generator=generator)
        lse = torch.randn((5 * splits, 3), generator=generator) * 30
        dead = torch.rand(lse.shape, generator=generator) < 0.4
        dead[:splits] = True  # the first token sees no key at all
        lse[dead], o[dead] = -math.inf, math.nan
        out, total = torch.full((5, 3, 24), math.nan).bfloat16(), torch.full((5, 3), math.nan)
        combine(o, lse, out, total, sinks)
        per_part, values = lse.view(5, splits, 3).double(), o.view(5, splits, 3, 24).double().nan_to_num()
        every = per_part if sinks is None else torch.cat([per_part, sinks.double().expand(5, 1, 3)], 1)
        alive = (per_part > -math.inf).any(1)
        expected = torch.logsumexp(every, 1)
        weights = (per_part - expected[:, None]).exp().nan_to_num()
        wanted = (weights[..., None] * values).sum(1)
        assert (total[~alive] == -math.inf).all() and (out[~alive] == 0).all()
        torch.testing.assert_close(total[alive].double(), expected[alive], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(out.double(), wanted * alive[..., None], rtol=2**-8, atol=1e-5)


def key(**fields: object) -> plan.Key:
    usual = {"q_heads": 8, "kv_heads": 1, "head_dim": 128, "v_dim": 128, "page_size": 64, "quant_type": -1}
    return plan.Key(True, 132, **{**usual, **fields})  # type: ignore[arg-type]


def parts(tokens: int, batch: int, reach: int, key: plan.Key) -> int:
    return plan.parts(tokens, batch, reach, plan.choose(key), key)


def test_few_tokens_over_a_long_context_are_split() -> None:
    """As many parts as fill the machine, of four blocks and more where there are enough keys."""
    assert parts(17, 1, 131072, key()) == 64
    assert parts(128, 1, 32768, key()) == 16
    assert parts(256, 1, 32768, key()) == 8
    assert parts(1024, 1, 32768, key()) == 2
    assert parts(2048, 1, 32768, key()) == 1, "128 tiles fill the machine"
    assert parts(17, 1, 4095, key()) == 1, "too few keys"
    assert parts(17, 1, 8192, key()) == 32, "two blocks a part"
    assert parts(17, 1, 32768, key(q_heads=64, kv_heads=8)) == 8
    assert parts(68, 4, 32768, key()) == 16
    assert parts(40, 20, 32768, key()) == 6, "22 tiles at most"
    assert parts(2048, 1, 32768, key(q_heads=5)) == 3, "80 items: two rounds of a third instead of one"


def test_the_portable_kernel_has_few_numbers_of_parts() -> None:
    for tokens, n in ((17, 32), (128, 8), (300, 1)):
        assert parts(tokens, 1, 32768, key(tma=False)) == n


def test_tiles_of_a_call_have_room() -> None:
    draw = random.Random(0)
    for _ in range(500):
        lens = [draw.choice((0, 1, 5, 64, 200, 1000)) for _ in range(draw.randint(1, 12))]
        tokens, tile = sum(lens) + draw.choice((0, 13)), draw.choice((1, 2, 16, 128))
        tiles = sum(-(-n // tile) for n in lens)
        assert tiles <= plan.tiles_of(sum(lens), len(lens), tile)
        assert tiles + -(-(tokens - sum(lens)) // tile) <= plan.bound(tokens, len(lens), tile)


@pytest.mark.parametrize("fields", [{}, {"quant_type": 1}, {"tma": False}], ids=["bf16", "fp8", "portable"])
def test_parts_run_in_two_rounds_at_most_and_scratch_is_bounded(fields: dict[str, Any]) -> None:
    for heads, tokens, batch in (
        (8, 100, 2),
        (16, 200, 1),
        (5, 60, 3),
        (5, 2000, 1),
        (1, 1, 1),
        (64, 17, 16),
    ):
        k = key(q_heads=heads, **fields)
        chosen = plan.choose(k)
        n = parts(tokens, batch, 65536, k)
        assert plan.is_legal(replace(chosen, splits=n), k) is None
        items = plan.tiles_of(tokens, batch, chosen.split_tokens) * (heads // chosen.split_pack)
        assert n == 1 or items * n <= 2 * k.sms
        if n > 1:
            scratch = (
                tokens * heads * (n * (k.v_dim + 1) + 1) * 4
            )  # outputs and lse of all parts, the joined lse
            assert scratch <= 2 * k.sms * chosen.block_m * (k.v_dim + 2) * 4 < 18e6


def test_a_plan_may_fix_the_number_of_parts() -> None:
    for k in (key(), key(quant_type=1), key(head_dim=256, v_dim=256), key(tma=False)):
        chosen = plan.choose(k)
        assert chosen.splits == 0
        for n in (1, 2, 64):
            fixed = replace(chosen, splits=n)
            assert plan.is_legal(fixed, k) is None and plan.parts(1000, 30, 64, fixed, k) == n
        for n in (-1, 65):
            why = plan.is_legal(replace(chosen, splits=n), k)
            assert why is not None and "splits" in why


def test_a_call_is_split_by_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens and a wide page table, whatever the lengths on the device; another width, more tokens or a window, and
    it is the usual kernel again. Scratch belongs to the call."""
    launched: list[tuple[str, tuple[int, int, int]]] = []

    class Recorder:
        compiled = False

        def __init__(self, fn: Any, name: str, **options: Any) -> None:
            self.name = fn.__name__

        def __call__(self, grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
            launched.append((self.name, grid))

    for name, value in (("Kernel", Recorder), ("raw_stream", lambda i: 0), ("current_device", lambda: 0)):
        monkeypatch.setattr(launch, name, value)
    inputs = make(((17, 40),), (8, 1), device="cpu")
    arguments = validate.Arguments(
        "test", inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.block_ids, inputs.seq_lens, 17,
        (None, None, None), -1, return_lse=True,
    )  # fmt: skip
    k, layout = validate.call(arguments)
    k = replace(k, sm90=True, sms=132)
    call = launch.Call(k, plan.choose(k), 0, layout, None)

    def names(tokens: int, width: int, call: launch.Call = call) -> list[str]:
        launched.clear()
        q, ids = torch.zeros((tokens, 8, 128)).bfloat16(), torch.zeros((1, width), dtype=torch.int32)
        out, lse = call.run(q, inputs.k, inputs.v, inputs.cu_seqlens, ids, inputs.seq_lens, (None, None, None), None,
                            None, None, None)  # fmt: skip
        assert out.shape == q.shape and lse.shape == q.shape[:2]
        return [name for name, _ in launched]

    assert names(17, 128) == ["_prefill_sm90_bf16_kernel", "_prefill_combine_kernel"]
    assert [grid[0] for _, grid in launched] == [2 * 32, 17 * 8]
    assert names(512, 128) == ["_prefill_sm90_bf16_kernel", "_prefill_combine_kernel"]
    assert [grid[0] for _, grid in launched] == [33 * 4, 512]
    with monkeypatch.context() as patch:
        patch.setattr(plan, "PLACED_REQUESTS", 0)
        assert names(17, 128) == [
            "_prefill_schedule_kernel",
            "_prefill_sm90_bf16_kernel",
            "_prefill_combine_kernel",
        ]
    assert names(17, 63) == names(17, 1) == ["_prefill_sm90_bf16_kernel"]
    assert names(2100, 64) == ["_prefill_schedule_kernel", "_prefill_sm90_bf16_kernel"]
    windowed = launch.Call(replace(k, window=True), plan.choose(k), 0, layout, 2000)
    assert names(17, 128, windowed) == ["_prefill_sm90_bf16_kernel"]
    portable = launch.Call(k, plan.portable(k), 0, layout, None)
    split = ["_prefill_schedule_kernel", "_prefill_attention_kernel", "_prefill_combine_kernel"]
    assert names(17, 64, portable) == split
    assert [grid[0] for _, grid in launched] == [1, 2 * 32, 17 * 8]


def test_the_measured_cases_are_split() -> None:
    for case in case_lists.split_cases():
        p = case.params
        k = cases.key_of(p, True)
        capacity = max(keys for _, keys in p.lens)
        assert parts(p.rows, len(p.lens), capacity, k) > 1, case.name
