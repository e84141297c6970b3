"""The Triton kernels, interpreted on the CPU, against the float64 reference on tiny cases.

Dead cache rows hold NaN, dead page-table entries hold garbage, partial buffers and outputs start as NaN: whatever is
read without right or left unwritten shows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hpc.attention.decode import case_lists, cases, plan
from hpc.attention.decode.case_lists import DecodeCase
from hpc.attention.decode.cases import DecodeInputs
from hpc.testing import measure

pytestmark = pytest.mark.interpret


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def make(lens: tuple[int, ...], heads: tuple[int, int] = (4, 1), dim: int = 32, **rest: Any) -> DecodeInputs:
    return cases.make_tensors(DecodeCase(lens, *heads, dim, **rest), "cpu", seed=1)


def signature(p: DecodeCase) -> int:
    return plan.signature(p.kv_heads, p.num_new_tokens, len(p.lens), p.window, p.new_kv_included)


def task_map(p: DecodeCase, num_bins: int, sig: int | None = None) -> torch.Tensor:
    """Bins of one variant and, behind them, its merge entries."""
    bins = plan.build_bins(p.total_lens, p.num_new_tokens, num_bins, 1, p.window)
    sig = signature(p) if sig is None else sig
    words = [w for e in bins for w in (sig, e.b, e.t0, e.b_end, e.t_end, e.length, e.g0, e.n_chunks)]
    return torch.tensor(words + plan.merge_entries(bins, len(p.lens), sig), dtype=torch.int32)


def run(
    inputs: DecodeInputs, bins: int = 0, splits: int = 1, min_chunk: int = 1, map_: torch.Tensor | None = None,
    rows_per_program: int = 2, chunks: int = 4, output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Both kernels: dynamic with `bins`, else static with `splits`. (output, lse)"""
    from hpc.attention.decode.kernels import _decode_attention_kernel
    from hpc.attention.decode.merge import _merge_kernel

    p, cache, lens = inputs.params, inputs.cache, inputs.seq_lens
    q, k, v = inputs.q, cache.kcache, cache.vcache
    if p.dtype == "fp8":
        q, k, v = (t.view(torch.uint8) for t in (q, k, v))
    (num_pages, page, hkv, dv), b, r = v.shape, len(p.lens), p.num_new_tokens * p.group
    block_r = min(64, max(16, power_of_two(r)))
    programs, slots = (bins, 2 * bins) if bins else (b * splits, b * splits)
    part_offset = 2 * slots * hkv * r
    scratch = torch.full((part_offset + slots * hkv * r * dv,), math.nan)
    out = torch.full((*q.shape[:2], dv), math.nan).bfloat16() if output is None else output
    lse = torch.full(q.shape[:2], math.nan)
    unused = torch.zeros(1)
    map_ = task_map(p, bins) if bins and map_ is None else map_
    map_ = torch.zeros(8, dtype=torch.int32) if map_ is None else map_
    qscale, kscale, vscale, sinks = (
        unused if t is None else t for t in (inputs.qscale, inputs.kscale, inputs.vscale, inputs.sinks)
    )
    kscale = kscale.view(torch.float32)
    ks_strides = kscale.stride()[:3] if kscale.dim() == 4 else (0, 0, 0)
    ids, max_pages, window = cache.block_ids, cache.block_ids.shape[1], p.window or 0
    _decode_attention_kernel[(programs, hkv, -(-r // block_r))](
        q, k, v, out, lse, scratch[part_offset:], scratch, ids, lens, map_, qscale, kscale, vscale, sinks,
        b, num_pages, max_pages, signature(p), p.head_dim**-0.5, p.logit_cap or 1.0, window,
        ids.stride(0), q.stride(0), q.stride(1), qscale.stride(0), *k.stride()[:3], *v.stride()[:3], *ks_strides,
        out.stride(0), out.stride(1),
        HQ=p.q_heads, HKV=hkv, S=p.num_new_tokens, D=p.head_dim, DV=dv, PAGE=page,
        BLOCK_R=block_r, BLOCK_D=max(16, power_of_two(p.head_dim)), BLOCK_DV=max(16, power_of_two(dv)),
        QUANT_TYPE=p.quant_type if p.dtype == "fp8" else -1, SCALES_PER_ROW=kscale.shape[-1],
        NEW_KV_INCLUDED=p.new_kv_included, HAS_WINDOW=p.window is not None, HAS_CAP=p.logit_cap is not None,
        HAS_SINKS=p.sinks, RETURN_LSE=True, STATIC=not bins, NUM_SPLITS=splits, MIN_CHUNK=min_chunk, WIDE=False,
        STAGES=1, PDL=False, INTERPRET=True,
    )  # fmt: skip
    merges = plan.num_merges(b, bins) if bins else b
    row_blocks, dim_block = -(-r // rows_per_program), max(16, power_of_two(dv) // 2)
    if bins > 1 or splits > 1:
        _merge_kernel[(merges, hkv * row_blocks, -(-dv // dim_block))](
            scratch, out, lse, lens, map_, vscale, sinks, bins * plan.ENTRY_WORDS, part_offset,
            0 if p.new_kv_included else p.num_new_tokens, max_pages * page, signature(p), window, splits, min_chunk,
            row_blocks, out.stride(0), out.stride(1),
            HQ=p.q_heads, HKV=hkv, S=p.num_new_tokens, DV=dv, CHUNKS=chunks, ROWS=rows_per_program, DB=dim_block,
            VSCALE=0 if p.dtype == "bf16" else 2 - p.quant_type, WINDOW=p.window is not None, SINKS=p.sinks,
            LSE=True, STATIC=not bins, PDL=False, INTERPRET=True,
        )  # fmt: skip
    return out, lse


def check(inputs: DecodeInputs, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    expected, lse = cases.reference(inputs)
    accuracy, limits = measure(got[0], expected), cases.TOLERANCES[inputs.params.dtype]
    assert accuracy.within(limits), f"{accuracy}, limits {limits}"
    assert (got[0][lse == -math.inf] == 0).all(), "rows without a key are zeros"
    torch.testing.assert_close(got[1].to(torch.float64), lse, rtol=1e-5, atol=1e-5)


CASES = {case.name: case.params for case in case_lists.interpret_cases()}
CASES |= {
    "five rows a request": DecodeCase((300, 65), 8, 1, 32, num_new_tokens=5),
    "two row blocks of 64": DecodeCase((140, 66), 24, 1, 32, num_new_tokens=4),
    "fp8 page 8, sinks, cap": DecodeCase(
        (100, 5), 4, 1, 32, page_size=8, dtype="fp8", sinks=True, logit_cap=1.0
    ),
    "fp8 per token, two kv heads, 2 new tokens": DecodeCase(
        (100, 1), 4, 2, dtype="fp8", quant_type=0, num_new_tokens=2, new_kv_included=False
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("path", ["dynamic", "static"])
def test_equals_the_reference(name: str, path: str) -> None:
    call = cases.make_tensors(CASES[name], "cpu", seed=1)
    check(call, run(call, bins=3) if path == "dynamic" else run(call, splits=4))


def test_many_chunks_of_one_request_in_several_steps_of_the_merge() -> None:
    call = make((11 * 64 - 5, 70), heads=(2, 1))
    for rows_per_program, chunks in ((1, 4), (4, 16)):
        check(call, run(call, bins=6, rows_per_program=rows_per_program, chunks=chunks))


def test_a_chunk_that_outweighs_all_later_ones_by_more_than_fp32_can_hold() -> None:
    call = make((11 * 64 - 5,), heads=(2, 1))
    call.q.fill_(8.0)
    first = call.cache.kcache[int(call.cache.block_ids[0, 0])]
    first.copy_(10 + first.float().abs())
    check(call, run(call, bins=6, chunks=2))


def test_more_bins_than_work() -> None:
    call = make((0, 20))
    check(call, run(call, bins=7))


def test_static_and_dynamic_without_a_split_are_the_same_bits() -> None:
    call = make((130, 64, 1))
    one, two = run(call, bins=1), run(call)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_a_map_made_for_another_call_gives_nan_and_stays_in_bounds() -> None:
    call = make((130, 64, 1))
    out, lse = run(call, bins=2, map_=task_map(call.params, 2, sig=12345))
    assert out.isnan().all() and lse.isnan().all()


def test_lengths_that_shrank_after_the_map_was_made_leave_nothing_unwritten() -> None:
    """What a bin finishes itself is settled by the map alone, so bins and merge agree whatever the lengths are."""
    for included in (True, False):
        call = make((100, 600), new_kv_included=included)
        map_ = task_map(call.params, 2)  # cuts the second request
        call.seq_lens.copy_(torch.tensor([90, 9]))
        assert all(result.isfinite().all() for result in run(call, bins=2, map_=map_))


def test_lengths_that_grew_after_the_map_was_made_stay_in_bounds() -> None:
    """A request that no cut meets is even right; the others hold whatever the stale cuts left."""
    call = make((300, 20, 130))
    fresh, map_ = run(call, bins=4), task_map(call.params, 4)
    call.seq_lens.copy_(torch.tensor([2**31 - 1, 20, -5]))
    assert torch.equal(run(call, bins=4, map_=map_)[0][1], fresh[0][1])


@pytest.mark.parametrize("included", [True, False])
def test_lengths_beyond_the_page_table_are_clamped(included: bool) -> None:
    call = make((128, 64), new_kv_included=included)
    call.seq_lens.copy_(torch.tensor([2**31 - 1, 2**30]))
    check(call, run(call, splits=2))


def test_page_ids_that_name_no_page_read_as_zeros() -> None:
    """A padded request whose length counts its new tokens only, and whose page table holds -1."""
    for page in (16, 64):
        call = make((9, 2), page_size=page, num_new_tokens=2, new_kv_included=False)
        for garbage in (-1, 2**31 - 1):
            call.cache.block_ids[1] = garbage
            check(call, run(call, bins=2))


def test_only_the_rows_asked_for_are_written() -> None:
    """Output as a slice of a larger buffer: padded rows of the 16-row block must not show."""
    call = make((70, 200), heads=(5, 1))
    buffer = torch.full((4, 9, 40), 7.0).bfloat16()
    check(call, run(call, bins=3, output=buffer[1:3, 2:7, :32]))
    buffer[1:3, 2:7, :32] = 7.0
    assert (buffer == 7.0).all()


def test_scores_far_below_zero_keep_their_softmax() -> None:
    """Every score near -3000: the running maximum must follow, and a sink of 0 must then take everything."""
    call = make((70,))
    call.q.fill_(60.0)
    live = call.cache.kcache[call.cache.block_ids[0, :2].long()].flatten(0, 1)[:70]
    keys = (-10 - live.float().abs() * 0.01).bfloat16()
    pages = call.cache.block_ids[0, :2].long()
    call.cache.kcache[pages[0], :64], call.cache.kcache[pages[1], :6] = keys[:64], keys[64:]
    check(call, run(call, splits=2))
    call = replace(call, params=replace(call.params, sinks=True), sinks=torch.zeros(4))
    for out, lse in (run(call), run(call, splits=2)):
        assert (out == 0).all() and (lse == 0).all()


def test_rounding_of_probabilities_and_results_is_to_nearest() -> None:
    """Truncation, the interpreter's own cast, would bias every result towards zero."""
    call = make((600,), heads=(16, 1))
    expected, _ = cases.reference(call)
    for seen in (run(call, bins=2), run(call, splits=3)):
        bias = ((seen[0].to(torch.float64) - expected) * expected.sign()).mean() / expected.abs().mean()
        assert abs(bias.item()) < 5e-4
