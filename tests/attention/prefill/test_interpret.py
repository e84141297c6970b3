"""The Triton kernels, interpreted on the CPU, against the float64 reference on tiny cases.

Dead cache rows hold NaN, dead page-table entries garbage, rows behind the last request and outputs start as NaN:
whatever is read without right or left unwritten shows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prefill_support import compare, entries, interpret, make, table

from hpc.attention.prefill import case_lists, cases, plan
from hpc.attention.prefill.case_lists import BATCHES, prompts

pytestmark = pytest.mark.interpret

CASES = {case.name: case.params for case in case_lists.interpret_cases()}


# Layouts and pages are the business of strides, which `test_launch` has; slow ones repeat others with a larger shape.
SLOW = {"bf16 12/2 heads, HND, page 8", "bf16 short keys", "ragged"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_equals_the_reference(name: str) -> None:
    call = cases.make_tensors(CASES[name], "cpu", seed=1)
    compare(call, *interpret(call))


# what each option meets its hardest lengths with; the other pairs when slow tests run
TABLES = {("mixed", ""), ("many", ""), ("chunks", "window"), ("short keys", "causal"), ("one", "extra_rows")}


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        pytest.param(batch, {name: value} if name else {}, id=f"{batch} {name}",
                     marks=() if (batch, name) in TABLES else pytest.mark.slow)
        for name, value in (("", 0), ("window", 40), ("causal", False), ("extra_rows", 9))
        for batch in BATCHES
    ],
)  # fmt: skip
def test_the_table_is_that_of_the_host(batch: str, options: dict[str, int]) -> None:
    call = make(BATCHES[batch], (2, 1), device="cpu", head_dim=8, page_size=16, **options)
    p = call.params
    expected = plan.tile_table(
        [n for n, _ in p.lens], [keys for _, keys in p.lens], p.rows, 8, 32, p.causal, p.window
    )
    # few requests a step and tiles a program, so that every loop turns; not where that takes long
    sizes = (4, 4) if len(p.lens) < 20 else (32, 32)
    assert entries(table(call, 8, 32, 5, *sizes)) == expected


def test_the_table_covers_every_row_of_ragged_prompts_once() -> None:
    call = make(prompts(20, 0, 1, 70), (2, 1), device="cpu", head_dim=8, page_size=0, extra_rows=11)
    rows = [row for first, n, *_ in entries(table(call, 8, 32)) for row in range(first, first + n)]
    assert sorted(rows) == list(range(call.params.rows))


def test_lengths_that_no_call_may_have_stay_in_bounds() -> None:
    """Falling or huge cumulative lengths, negative or huge key counts: wrong numbers, but never outside the tensors."""
    call = make(((20, 40), (30, 60)), (2, 1), device="cpu", head_dim=8, page_size=16)
    for cu in ([0, 2**31 - 1, 5], [7, 3, 50], [-9, 20, 2**30]):
        for lens in ([2**31 - 1, -5], [40, 60]):
            broken = replace(call, cu_seqlens=torch.tensor(cu).int(), seq_lens=torch.tensor(lens).int())
            for first, n, b, *_ in entries(table(broken, 8, 32))[: plan.bound(50, 2, 8)]:
                written = first >= 0
                assert not written or (first + n <= 50 and 0 <= b <= 2)


def test_lengths_beyond_the_page_table_are_clipped() -> None:
    call = make(((20, 48), (30, 64)), (2, 1), device="cpu", head_dim=32, page_size=16)
    ids = call.block_ids[:, :3].contiguous()  # 48 keys
    short = replace(call, block_ids=ids)
    compare(short, *interpret(short))


def test_page_ids_that_name_no_page_read_as_zeros() -> None:
    for page in (16, 64):
        call = make(((20, 48), (3, 7)), (2, 1), device="cpu", head_dim=32, page_size=page)
        for garbage in (-1, 2**31 - 1):
            call.block_ids[1] = garbage
            compare(call, *interpret(call))


def test_only_the_rows_asked_for_are_written() -> None:
    """Output as a slice of a larger buffer: rows of a part-filled tile must not show."""
    call = make(((7, 20), (3, 3)), (5, 1), device="cpu", head_dim=32, page_size=16)
    buffer = torch.full((12, 9, 40), 7.0).bfloat16()
    compare(call, *interpret(call, output=buffer[1:11, 2:7, :32]))
    buffer[1:11, 2:7, :32] = 7.0
    assert (buffer == 7.0).all()


def test_scores_far_below_zero_keep_their_softmax() -> None:
    """Every score near -3000: the running maximum must follow, and a sink of 0 must then take everything."""
    call = make(((20, 70),), (4, 1), device="cpu", head_dim=32)
    call.q.fill_(60.0)
    pages = call.block_ids[0, :2].long()
    keys = (-10 - call.k[pages].float().abs() * 0.01).bfloat16()
    call.k[pages[0]], call.k[pages[1], :6] = keys[0], keys[1, :6]
    compare(call, *interpret(call))
    call = replace(call, params=replace(call.params, sinks=True), sinks=torch.zeros(4))
    out, lse = interpret(call)
    assert (out == 0).all() and (lse == 0).all()


def test_rows_do_not_depend_on_the_tile_around_them() -> None:
    """A request alone gives the bits that it gives in a batch."""
    call = make(((20, 77), (9, 30)), (4, 1), device="cpu", head_dim=32, page_size=16)
    whole, _ = interpret(call)
    alone = replace(
        call, params=replace(call.params, lens=((9, 30),)), q=call.q[20:], cu_seqlens=torch.tensor([0, 9]).int(),
        block_ids=call.block_ids[1:], seq_lens=call.seq_lens[1:],
    )  # fmt: skip
    assert torch.equal(interpret(alone)[0], whole[20:])
