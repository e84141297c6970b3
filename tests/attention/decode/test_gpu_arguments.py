"""Arguments and data at their edges on a GPU: strides, alignment, options, lengths, scratch, host time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_support import PATHS, attend, check, compare, make, same_bits

import hpc
from hpc.attention.decode import cases
from hpc.attention.decode.cases import DecodeInputs
from hpc.attention.decode.reference import decode_reference
from hpc.common.errors import InvalidArgument
from hpc.testing import guarded

pytestmark = pytest.mark.gpu

EACH_PATH = pytest.mark.parametrize("path", PATHS)
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp8"])
LENS = (700, 64, 1, 0, 2100)


def with_cache(x: DecodeInputs, **changes: Any) -> DecodeInputs:
    return replace(x, cache=replace(x.cache, **changes))


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy with the same strides whose address is `elements` past an aligned one."""
    size = tensor.numel() * tensor.element_size() + 256
    copy = torch.empty(size, dtype=torch.uint8, device=tensor.device).view(tensor.dtype)[elements:]
    copy = copy.as_strided(tensor.shape, tensor.stride())
    copy.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return copy


# --- strides and alignment -----------------------------------------------------------------------------


@DTYPES
@EACH_PATH
def test_caches_at_any_address_one_after_the_other(dtype: str, path: str) -> None:
    """TMA needs 16 bytes; the shapes and strides of the two calls are the same."""
    x = make(LENS, dtype=dtype)
    moved = with_cache(x, kcache=shifted(x.cache.kcache, 4), vcache=shifted(x.cache.vcache, 4))
    for call in (x, moved, x, moved):
        check(call, path)


@DTYPES
@EACH_PATH
def test_queries_and_tables_are_read_by_their_strides(dtype: str, path: str) -> None:
    """Queries as a slice of a fused projection or with heads outside rows, scales and tables as slices."""
    x = make(LENS, (16, 2), dtype=dtype)
    rows, heads, dim = x.q.shape
    expected = attend(x, path)
    fused = torch.zeros((rows, heads + 6, dim), dtype=x.q.dtype, device="cuda")[:, 2:-4]
    outside = torch.zeros((heads, rows, dim), dtype=x.q.dtype, device="cuda").transpose(0, 1)
    table = torch.full((len(LENS), x.cache.block_ids.shape[1] + 7), -9, dtype=torch.int32, device="cuda")[
        :, 3:-4
    ]
    table.copy_(x.cache.block_ids)
    for q in (fused, outside):
        q.view(torch.uint8).copy_(x.q.view(torch.uint8))
        call = with_cache(replace(x, q=q), block_ids=table)
        if x.qscale is not None:
            wide = torch.full((rows, heads + 5), float("nan"), device="cuda")[:, :heads]
            call = replace(call, qscale=wide.copy_(x.qscale))
        assert same_bits(check(call, path), expected)


def test_row_13_scales_per_token_are_read_by_their_own_strides() -> None:
    """Not by those of the keys that they usually share a buffer with."""
    x = make(LENS, (8, 2), dtype="fp8", quant_type=0)
    scales = x.cache.kscale_float
    assert scales is not None
    wide = torch.full(
        (scales.shape[0], scales.shape[1] + 1, scales.shape[2] + 3, 40), float("nan"), device="cuda"
    )
    own = wide[:, :-1, 1:-2, 4:36]
    own.copy_(scales)
    moved = with_cache(replace(x, kscale=own), kscale=None)
    for path in PATHS:
        assert same_bits(attend(moved, path), check(x, path))


# --- options --------------------------------------------------------------------------------------------


@DTYPES
def test_values_of_options_are_not_part_of_what_is_cached(dtype: str) -> None:
    x = make(LENS, dtype=dtype)
    cases_of_scale = [attend(x, softmax_scale=scale) for scale in (0.01, 0.5, 0.01)]
    assert same_bits(cases_of_scale[0], cases_of_scale[2]) and not same_bits(
        cases_of_scale[0], cases_of_scale[1]
    )
    for cap in (5.0, 0.5, 5):
        check(replace(x, params=replace(x.params, logit_cap=cap)))
    for window in (64, 3, 200):
        params = replace(x.params, window=window)
        with_window = replace(x, params=params)
        check(replace(with_window, task_map=cases.make_task_map(with_window)))
        check(with_window, "static")


@EACH_PATH
@pytest.mark.parametrize("cap", [0, -1.0, float("nan")])
def test_a_bad_value_is_refused_after_a_good_one(path: str, cap: float) -> None:
    """The signature of the call is known by then."""
    x = make((70, 5))
    attend(x, path, logit_cap=5.0)
    with pytest.raises(InvalidArgument, match="logit_cap"):
        attend(x, path, logit_cap=cap)


# --- lengths ----------------------------------------------------------------------------------------------


@DTYPES
@EACH_PATH
@pytest.mark.parametrize("included", [True, False])
def test_lengths_outside_the_page_table(dtype: str, path: str, included: bool) -> None:
    """Negative ones count as 0, larger ones than the table holds as what it holds."""
    x = make((128, 64, 192), dtype=dtype, new_kv_included=included)
    for row, used in enumerate((2, 1, 3)):
        x.cache.block_ids[row, used:] = -1  # names no page: reads as zeros
    x.seq_lens.copy_(torch.tensor([2**31 - 1, -7, 2**30], dtype=torch.int32))
    if x.task_map is not None:
        cases.assign(x, x.task_map)
    check(x, path)


@DTYPES
def test_row_14_lengths_that_change_after_the_schedule_stay_in_bounds(dtype: str) -> None:
    """What comes out is not defined then, but it ends, writes nothing else, and the next step is right."""
    x = make((4096, 700, 64, 2000), dtype=dtype)
    for lens in ((1, 2, 3, 4), (2**31 - 1,) * 4, (4096, 4096, 4096, 4096), (-1, 0, 0, 64)):
        output = guarded(tuple(x.q.shape), torch.bfloat16, "cuda")
        x.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        attend(x, output=output.tensor)
        torch.cuda.synchronize()
        output.check_guards("output")
        x.seq_lens.copy_(x.cache.seq_lens.new_tensor([4096, 700, 64, 2000]))
        assert x.task_map is not None
        cases.assign(x, x.task_map)
        check(x)


@DTYPES
def test_row_10_the_last_chunk_may_be_shorter_than_the_new_tokens(dtype: str) -> None:
    """Static chunks are at least 512 tokens: one token or two in the last of them, four rows that see unlike keys."""
    x = make((513, 514, 515, 516, 1025, 4097, 4, 3, 0), dtype=dtype, num_new_tokens=4)
    for path in PATHS:
        check(x, path)


@DTYPES
@EACH_PATH
def test_row_9_scores_far_below_zero_keep_their_softmax(dtype: str, path: str) -> None:
    """Every score near -1000: a running maximum that starts at 0 would leave nothing."""
    x = make((3000, 70), dtype=dtype)
    x.q.view(torch.uint8).copy_(
        torch.full_like(x.q, 1.0, dtype=torch.float32).to(x.q.dtype).view(torch.uint8)
    )
    live = x.cache.kcache.float()
    keys = torch.where(live.isnan(), live, -10.0 - live.abs() * 0.1).to(x.cache.kcache.dtype)
    x.cache.kcache.view(torch.uint8).copy_(keys.view(torch.uint8))
    if x.qscale is not None and x.kscale is not None:
        x.qscale.fill_(1.0)
        x.kscale.fill_(1.0)
    out, lse = attend(x, path, return_lse=True, softmax_scale=1.0)
    expected, expected_lse = decode_reference(
        x.q, x.cache.kcache, x.cache.vcache, x.cache.block_ids, x.seq_lens, num_new_tokens=1, new_kv_included=True,
        qscale=x.qscale, kscale=x.kscale, vscale=x.vscale, quant_type=1 if dtype == "fp8" else None, softmax_scale=1.0,
    )  # fmt: skip
    assert bool((expected_lse < -1000).all())
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=0)
    # A score of 1000 in fp32 is 6e-5 apart from the next; the outputs carry that, and their own rounding.
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


@DTYPES
@EACH_PATH
@pytest.mark.parametrize("page", [64, 8])
def test_row_7_dead_rows_inside_a_live_page_do_not_matter(dtype: str, path: str, page: int) -> None:
    """They hold NaN; then, in BF16, infinity of either sign: the bits stay the same."""
    x = make((70, 1, 63, 129, 1000), dtype=dtype, page_size=page)
    first = check(x, path)
    if dtype == "fp8":
        return  # e4m3 has no infinity
    for value in (float("inf"), -float("inf")):
        for cache in (x.cache.kcache, x.cache.vcache):
            cache[cache.isnan()] = value
        assert same_bits(attend(x, path), first)
        for cache in (x.cache.kcache, x.cache.vcache):
            cache[cache.isinf()] = float("nan")


def test_row_1_nothing_to_do() -> None:
    """No request, or no page in the table: no launch error, and the next call works."""
    x = make(LENS)
    none = replace(x, q=x.q[:0], seq_lens=x.seq_lens[:0])
    none = with_cache(none, block_ids=x.cache.block_ids[:0])
    assert x.task_map is not None
    for path in PATHS:
        out, lse = attend(none, path, return_lse=True)
        assert out.shape == (0, 8, 128) and lse.shape == (0, 8) and out.is_cuda
    hpc.assign_attention_decode_task(none.seq_lens, x.task_map, 1, 1, True)
    cases.assign(x, x.task_map)
    pageless = with_cache(x, block_ids=x.cache.block_ids[:, :0])
    for path in PATHS:
        out, lse = attend(pageless, path, return_lse=True)
        assert not bool(out.any()) and bool((lse == -torch.inf).all())
        check(x, path)


# --- fr_51: padding -----------------------------------------------------------------------------------------


@EACH_PATH
@pytest.mark.parametrize("padding", [0, -1])
def test_fr_51_padding_rows_read_and_write_nothing(path: str, padding: int) -> None:
    """Three of eight rows are padding: queries NaN, length 0, pages 0 or -1; page 0 holds 0xAA bytes."""
    x = make((70, 0, 200, 64, 0, 3, 129, 0))
    num_pages = x.cache.kcache.shape[0]
    grown = []
    for cache in (x.cache.kcache, x.cache.vcache):
        larger = torch.empty((num_pages + 1, *cache.shape[1:]), dtype=cache.dtype, device="cuda")
        larger[1:] = cache
        larger[0].view(torch.uint8).fill_(0xAA)
        grown.append(larger)
    table = x.cache.block_ids.clamp(-1, num_pages - 1) + 1
    empty = x.seq_lens == 0
    table[empty] = padding
    x.q[empty] = float("nan")
    y = with_cache(x, kcache=grown[0], vcache=grown[1], block_ids=table)
    before = [cache.view(torch.uint8).clone() for cache in grown]
    out = attend(y, path)
    assert not bool(out[empty].any()), "padding rows are zero"
    compare(replace(x, q=x.q.nan_to_num(0)), out, None, "real rows")
    assert all(torch.equal(cache.view(torch.uint8), old) for cache, old in zip(grown, before, strict=True))


# --- repeatable bits -------------------------------------------------------------------------------------------


def first_requests(x: DecodeInputs, n: int) -> DecodeInputs:
    s, lens = x.params.num_new_tokens, x.params.lens[:n]
    qscale = None if x.qscale is None else x.qscale[: n * s]
    part = replace(
        x, params=replace(x.params, lens=lens), q=x.q[: n * s], seq_lens=x.seq_lens[:n], qscale=qscale
    )
    return with_cache(part, block_ids=x.cache.block_ids[:n])


@DTYPES
@pytest.mark.parametrize("page", [64, 8])
@pytest.mark.parametrize("tokens", [1, 2])
def test_batch_invariant_bits_do_not_depend_on_the_batch(dtype: str, page: int, tokens: int) -> None:
    """Alone and in batches of 7, 64 and 300: the merge is busy from about 16 on and would take other tiles."""
    lens = ((1300, 5, 700, 2100, 64, 0, 513) * 43)[:300]
    x = make(lens, (64, 8), dtype=dtype, page_size=page, num_new_tokens=tokens, new_kv_included=False)
    whole, whole_lse = attend(x, "static", batch_invariant=True, return_lse=True)
    compare(x, whole, whole_lse, "batch of 300")
    for n in (1, 7, 64):
        out, lse = attend(first_requests(x, n), "static", batch_invariant=True, return_lse=True)
        assert same_bits(out, whole[: n * tokens]) and same_bits(lse, whole_lse[: n * tokens]), (
            f"batch of {n}"
        )


@EACH_PATH
@pytest.mark.parametrize(("dtype", "page"), [("fp8", 64), ("bf16", 64), ("bf16", 8)])
def test_fifty_calls_give_the_same_bits(path: str, dtype: str, page: int) -> None:
    x = make((9000, 64, 1, 0, 700, 4096, 4097), (64, 8), dtype=dtype, page_size=page)
    first = check(x, path)
    assert all(same_bits(attend(x, path), first) for _ in range(50))


# --- scratch and host time -----------------------------------------------------------------------------------------


def requested_by(call: Any) -> int:
    """Bytes asked of torch's allocator at the peak of a call, beyond what was held before."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@EACH_PATH
@pytest.mark.parametrize(
    ("dtype", "page", "heads"), [("fp8", 64, (64, 4)), ("bf16", 64, (128, 8)), ("bf16", 8, (8, 1))]
)
def test_fr_14_the_size_helper_is_exact(path: str, dtype: str, page: int, heads: tuple[int, int]) -> None:
    for batch in (1, 64):
        x = make((3000,) * batch, heads, dtype=dtype, page_size=page)
        output = torch.empty((batch, heads[0], 128), dtype=torch.bfloat16, device="cuda")
        used = requested_by(lambda x=x, output=output: attend(x, path, output=output))
        said = hpc.get_attention_decode_scratch_size(
            batch, *heads, page_size=page, quant_type=1 if dtype == "fp8" else None, dynamic=path == "dynamic"
        )
        assert used == said, f"batch {batch}: a call took {used} bytes, the helper said {said}"


@pytest.mark.parametrize("page", [64, 8])
def test_a_static_call_that_splits_nothing_takes_no_scratch(page: int) -> None:
    x = make((70, 3, 0, 64) * 300, page_size=page)
    check(x, "static")
    output = torch.empty((1200, 8, 128), dtype=torch.bfloat16, device="cuda")
    assert requested_by(lambda: attend(x, "static", output=output)) == 0
    assert (
        hpc.get_attention_decode_scratch_size(1200, 8, 1, page_size=page, quant_type=None, dynamic=False) == 0
    )


@pytest.mark.parametrize(("dtype", "path"), [("fp8", "dynamic"), ("bf16", "dynamic"), ("fp8", "static")])
def test_a_call_costs_the_host_less_than_20_us(dtype: str, path: str) -> None:
    """The least of 30 rounds, on a host that launches `add_` in 5.5 us; a slower one (other work, a sleepy clock) may
    take as much longer as it does for `add_`."""
    x = make((64,) * 4, dtype=dtype)
    output = torch.empty((4, 8, 128), dtype=torch.bfloat16, device="cuda")
    scales = (x.qscale, x.kscale, x.vscale) if dtype == "fp8" else ()
    function: Any = getattr(hpc, f"attention_decode_{dtype}")
    tensors = (x.q, x.cache.kcache, x.cache.vcache, x.cache.block_ids, x.seq_lens, *scales)
    options = {
        "new_kv_included": True,
        "task_map": x.task_map if path == "dynamic" else None,
        "output": output,
    }
    counter = torch.zeros(1, device="cuda")

    def host_us(call: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):  # fewer than the launches that the driver queues
            call()
        return (time.perf_counter() - start) / 50 * 1e6

    rounds = [
        (host_us(lambda: function(*tensors, **options)), host_us(lambda: counter.add_(1))) for _ in range(30)
    ]
    best, yardstick = (min(times) for times in zip(*rounds, strict=True))
    print(f"{best:.1f} us a call, add_ {yardstick:.1f} us")
    assert best < 20 * max(1.0, yardstick / 5.5), f"{best:.1f} us, add_ {yardstick:.1f} us"
