"""Faults that users of such libraries met, each with the input that shows it. Numbers as in the test names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from decode_support import capture, fastest_replay_us, fastest_us

import hpc
from hpc.attention.decode import cases
from hpc.attention.decode.case_lists import DecodeCase
from hpc.attention.decode.choose import Plan
from hpc.attention.decode.reference import decode_reference
from hpc.common import arch
from hpc.testing import assert_close, fill_nan, guarded, measure

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ["fp8", "bf16"])
PATHS = pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])


def run(params: DecodeCase, seed: int = 0, **more: object) -> tuple[torch.Tensor, cases.DecodeInputs]:
    inputs = cases.make_tensors(params, "cuda", seed)
    return cases.attend(inputs, cases.make_task_map(inputs) if params.dynamic else None, **more), inputs


def check(params: DecodeCase, seed: int = 0) -> None:
    out, inputs = run(params, seed)
    assert_close(out, cases.reference(inputs)[0], cases.tolerance(params), str(params)[:120])


def bf16_cache(lens: list[int], value: float | None = None, pages: int = 64) -> dict[str, torch.Tensor]:
    """A page table in order over caches of random keys; values random or one constant."""
    kcache = torch.randn(pages, 64, 1, 128, device="cuda").bfloat16()
    vcache = torch.randn_like(kcache) if value is None else torch.full_like(kcache, value)
    width = pages // len(lens)
    table = torch.arange(width * len(lens), dtype=torch.int32, device="cuda").view(len(lens), width)
    seq = torch.tensor(lens, dtype=torch.int32, device="cuda")
    return {"kcache": kcache, "vcache": vcache, "block_ids": table, "num_seq_kvcache": seq}


def decode(q: torch.Tensor, call: dict[str, torch.Tensor], dynamic: bool, **more: object) -> torch.Tensor:
    task_map = None
    if dynamic:
        task_map = hpc.get_attention_decode_task_workspace(8, 1 << 17, 1)
        hpc.assign_attention_decode_task(
            call["num_seq_kvcache"], task_map, 1, int(more.get("mtp", 0)) + 1, True, window=more.get("window")
        )  # type: ignore[arg-type, call-overload]
    return hpc.attention_decode_bf16(q, **call, new_kv_included=True, task_map=task_map, **more)  # type: ignore[arg-type, return-value]


@PATHS
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (24, 8), (40, 8), (24, 4), (28, 4)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_fr_01_any_group_and_nothing_beside_the_output(
    heads: tuple[int, int], tokens: int, dynamic: bool
) -> None:
    params = DecodeCase((max(1, tokens), 64, 777), *heads, num_new_tokens=tokens, dynamic=dynamic)
    inputs = cases.make_tensors(params, "cuda", 0)
    output = guarded((3 * tokens, heads[0], 128), torch.bfloat16, "cuda")
    cases.attend(inputs, cases.make_task_map(inputs) if dynamic else None, output=output.tensor)
    output.check_guards("output")
    assert_close(output.tensor, cases.reference(inputs)[0], cases.tolerance(params), str(heads))


@DTYPES
@pytest.mark.parametrize("heads", [(64, 4), (32, 1)])
@pytest.mark.parametrize("batch", [1, 16, 128])
def test_fr_02_groups_16_and_32(dtype: str, heads: tuple[int, int], batch: int) -> None:
    check(DecodeCase(((2048, 4096) * batch)[:batch], *heads, dtype=dtype))


@PATHS
@pytest.mark.parametrize(
    ("page", "batch"), [(1, 1), (8, 16), (16, 64), (32, 1), (32, 8), (32, 32), (32, 128), (64, 16), (128, 16)]
)
def test_fr_05_page_sizes(page: int, batch: int, dynamic: bool) -> None:
    check(DecodeCase(((1024, 4096) * batch)[:batch], 64, 8, page_size=page, dynamic=dynamic))
    assert int(torch.ones(3, device="cuda").sum()) == 3, "the device works on"


# (new tokens, group, dtype, dynamic): all row counts of both groups by the schedule, the reported one everywhere
FR_07 = [(s, g, "bf16", True) for s in range(1, 9) for g in (4, 8)]
FR_07 += [(5, 8, "bf16", False), (5, 8, "fp8", True), (5, 8, "fp8", False), (5, 4, "bf16", False)]


@pytest.mark.parametrize(("tokens", "group", "dtype", "dynamic"), FR_07)
def test_fr_07_and_row_12_any_number_of_new_tokens(
    tokens: int, group: int, dtype: str, dynamic: bool
) -> None:
    check(DecodeCase((300, 65), group, 1, dtype=dtype, num_new_tokens=tokens, dynamic=dynamic))


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_fr_11_group_12_with_four_tokens_is_no_slower_than_group_16(batch: int) -> None:
    """No spills: the compile tier says so. Same keys, fewer rows: 10 % for the clock."""
    calls = {}
    for q_heads in (12, 16):
        params = DecodeCase((8192,) * batch, q_heads, 1, dtype="fp8", num_new_tokens=4)
        out, inputs = run(params)
        assert_close(out, cases.reference(inputs)[0], cases.tolerance(params), f"group {q_heads}")
        task_map = cases.make_task_map(inputs)
        calls[str(q_heads)] = lambda inputs=inputs, task_map=task_map: cases.attend(inputs, task_map)
    times = fastest_us(calls)
    assert times["12"] <= 1.1 * times["16"], times


def test_fr_17_cache_of_more_than_2_to_the_32_elements() -> None:
    pages = [5, 16383, 16384, 32767, 32768, 65535, 65599]
    pool = torch.empty(65600, 64, 8, 128, dtype=torch.bfloat16, device="cuda")
    small = torch.randn(7, 64, 8, 128, device="cuda").bfloat16()
    for i, page in enumerate(pages):
        pool[page] = small[i]
    q = torch.randn(1, 64, 128, device="cuda").bfloat16()
    seq = torch.tensor([7 * 64], dtype=torch.int32, device="cuda")
    results = []
    for cache, ids in ((pool, pages), (small, list(range(7)))):
        table = torch.tensor([ids], dtype=torch.int32, device="cuda")
        results.append(hpc.attention_decode_bf16(q, cache, cache, table, seq, new_kv_included=True))
    assert torch.equal(results[0], results[1])


FR_20 = ("constant values", "alternating values", "one key of many")


def errors_at(length: int, kind: str, dynamic: bool) -> tuple[float, float]:
    """(mean output, relative error) of one request of fp8 keys and values."""
    x = cases.make_tensors(DecodeCase((length,), 8, 1, dtype="fp8"), "cuda", 0)
    assert x.qscale is not None and x.kscale is not None and x.vscale is not None
    kcache = torch.zeros(x.cache.kcache.shape, device="cuda")
    vcache = torch.ones_like(kcache)
    if kind == "alternating values":
        vcache[:, 1::2] = -0.5
        vcache[:, ::2] = 1.5
    if kind == "one key of many":
        page = int(x.cache.block_ids[0, 0])
        kcache[page, 5], vcache[page, 5] = 1.0, 100.0
    scale = 12.0 / 128 if kind == "one key of many" else 1.0  # a score of 12 at position 5
    for old, new in ((x.q, torch.ones_like(x.q.float())), (x.cache.kcache, kcache), (x.cache.vcache, vcache)):
        old.view(torch.uint8).copy_(new.to(torch.float8_e4m3fn).view(torch.uint8))
    for ones in (x.qscale, x.kscale, x.vscale):
        ones.fill_(1.0)
    out = cases.attend(x, cases.make_task_map(x) if dynamic else None, softmax_scale=scale)
    expected, _ = decode_reference(
        x.q, x.cache.kcache, x.cache.vcache, x.cache.block_ids, x.seq_lens, num_new_tokens=1, new_kv_included=True,
        qscale=x.qscale, kscale=x.kscale, vscale=x.vscale, quant_type=1, softmax_scale=scale,
    )  # fmt: skip
    return float(out.double().mean()), measure(out, expected).rms_rel


@PATHS
@pytest.mark.parametrize("kind", FR_20)
def test_fr_20_fp8_does_not_drift_with_length(kind: str, dynamic: bool) -> None:
    """All outputs are one number: rounding it to bf16 leaves 2^-8 at most, at any length; a tenth for the sums."""
    for length in (1024, 16384, 131072):
        mean, error = errors_at(length, kind, dynamic)
        assert error <= 1.1 * 2**-8, f"{length}: {error}"
        if kind == "constant values":
            assert abs(mean - 1.0) < 0.01


@PATHS
@DTYPES
def test_fr_20_random_values_at_128k_are_as_exact_as_at_1k(dtype: str, dynamic: bool) -> None:
    errors = []
    for length in (1024, 131072):
        params = DecodeCase((length,), 8, 1, dtype=dtype, dynamic=dynamic)
        out, inputs = run(params)
        errors.append(measure(out, cases.reference(inputs)[0]).rms_rel)
    assert errors[1] <= 2 * errors[0], errors


@DTYPES
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 192, 256])
def test_fr_23_head_dims(dim: int, dtype: str) -> None:
    check(DecodeCase((130, 65, 1), 16, 16, dim, dtype=dtype))


@PATHS
def test_fr_24_one_layer_of_a_joint_pool(dynamic: bool) -> None:
    pool = torch.full((2100, 4, 64, 8, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    pages = [1, 2046, 2047, 2048, 2099]
    for page in pages:
        pool[page, 1:3] = torch.randn(2, 64, 8, 128, device="cuda").bfloat16()
    kcache, vcache = pool[:, 1], pool[:, 2]
    table = torch.tensor([pages], dtype=torch.int32, device="cuda")
    seq = torch.tensor([300], dtype=torch.int32, device="cuda")
    q = torch.randn(1, 64, 128, device="cuda").bfloat16()
    task_map = None
    if dynamic:
        task_map = hpc.get_attention_decode_task_workspace(1, 320, 8)
        hpc.assign_attention_decode_task(seq, task_map, 8, 1, True)
    out = hpc.attention_decode_bf16(q, kcache, vcache, table, seq, new_kv_included=True, task_map=task_map)
    expected, _ = decode_reference(q, kcache, vcache, table, seq, num_new_tokens=1, new_kv_included=True)
    assert_close(out, expected, cases.TOLERANCES["bf16"], "slice")


def test_fr_25_every_scale_is_used() -> None:
    params = DecodeCase((70, 64, 1), 8, 1, dtype="fp8")
    inputs = cases.make_tensors(params, "cuda", 0)
    base = cases.attend(inputs, None)
    assert inputs.vscale is not None and inputs.kscale is not None
    inputs.vscale.mul_(2)
    assert torch.equal(cases.attend(inputs, None), base * 2)
    inputs.kscale.mul_(3)
    assert not torch.equal(cases.attend(inputs, None), base * 2)


@PATHS
@pytest.mark.parametrize("tokens", [1, 4])
def test_fr_31_padded_request_without_pages(tokens: int, dynamic: bool) -> None:
    call = bf16_cache([9, 9, 9, 0])
    call["block_ids"][3] = -1
    q = torch.randn(4 * tokens, 8, 128, device="cuda").bfloat16()
    task_map = None
    if dynamic:
        task_map = hpc.get_attention_decode_task_workspace(4, 64, 1)
        hpc.assign_attention_decode_task(call["num_seq_kvcache"], task_map, 1, tokens, False)
    out = hpc.attention_decode_bf16(q, **call, mtp=tokens - 1, task_map=task_map)
    seq, table = call["num_seq_kvcache"], call["block_ids"]
    expected, _ = decode_reference(
        q, call["kcache"], call["vcache"], table, seq, num_new_tokens=tokens, new_kv_included=False
    )
    assert_close(out, expected, cases.TOLERANCES["bf16"], "rows of real requests")
    assert bool(out.isfinite().all())


@PATHS
def test_fr_32_padding_lanes_stay_out_of_the_sum(dynamic: bool) -> None:
    lens = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513]
    call = bf16_cache(lens, pages=13 * 9)
    out = decode(torch.zeros(13, 8, 128, device="cuda").bfloat16(), call, dynamic)
    for b, length in enumerate(lens):
        values = call["vcache"][call["block_ids"][b].long()].reshape(-1, 128)[:length].double().mean(0)
        assert measure(out[b], values.expand(8, 128)).rms_rel < 2.5e-3, f"length {length}"


@PATHS
def test_fr_34_strided_output_and_nothing_beside_it(dynamic: bool) -> None:
    params = DecodeCase((8192,) * 3, 8, 1, num_new_tokens=2, dynamic=dynamic)
    inputs = cases.make_tensors(params, "cuda", 0)
    buffer = torch.full((6, 12, 128), 7.0, dtype=torch.bfloat16, device="cuda")
    out = cases.attend(inputs, cases.make_task_map(inputs) if dynamic else None, output=buffer[:, :8])
    assert_close(out, cases.reference(inputs)[0], cases.tolerance(params), "slice")
    assert bool((buffer[:, 8:] == 7.0).all())


@PATHS
@pytest.mark.parametrize(("tokens", "first"), [(5, 64), (6, 65), (7, 200)])
def test_fr_35_a_batch_gives_what_its_requests_give_alone(tokens: int, first: int, dynamic: bool) -> None:
    """5, 6 or 7 rows a request: no row block divides them. Rows behind the output stay as they are."""
    lens = (first, 64, 65, 200, 1000)
    params = DecodeCase(lens, 8, 1, num_new_tokens=tokens, dynamic=dynamic)
    inputs = cases.make_tensors(params, "cuda", 0)
    output = guarded((len(lens) * tokens, 8, 128), torch.bfloat16, "cuda")
    cases.attend(inputs, cases.make_task_map(inputs) if dynamic else None, output=output.tensor)
    output.check_guards("output")
    for b in range(len(lens)):
        rows = slice(b * tokens, (b + 1) * tokens)
        table, seq = inputs.cache.block_ids[b : b + 1], inputs.seq_lens[b : b + 1]
        alone = hpc.attention_decode_bf16(
            inputs.q[rows],
            inputs.cache.kcache,
            inputs.cache.vcache,
            table,
            seq,
            mtp=tokens - 1,
            new_kv_included=True,
        )
        assert measure(output.tensor[rows], alone.double()).rms_rel < 3e-3, f"request {b}"


@PATHS
def test_fr_36_one_table_row_a_request(dynamic: bool) -> None:
    """What follows the table's last row names no page: it would read as zeros."""
    lens = tuple(3 + (i * 41) % 248 for i in range(256))
    params = DecodeCase(lens, 8, 1, num_new_tokens=3, dynamic=dynamic)
    inputs = cases.make_tensors(params, "cuda", 0)
    table = inputs.cache.block_ids
    longer = torch.full((3 * 256, table.shape[1]), 2**31 - 1, dtype=torch.int32, device="cuda")
    longer[:256] = table
    inputs = replace(inputs, cache=replace(inputs.cache, block_ids=longer[:256]))
    out = cases.attend(inputs, cases.make_task_map(inputs) if dynamic else None)
    assert_close(out, cases.reference(inputs)[0], cases.tolerance(params), "768 rows")


@DTYPES
@PATHS
@pytest.mark.parametrize("page", [64, 16, 8])
def test_fr_60_table_entries_past_the_length_are_never_read(dtype: str, page: int, dynamic: bool) -> None:
    """They hold what names no page, far or near, or a page of NaN: the bits stay the same."""
    params = DecodeCase((70, 64, 1, 130), 8, 1, dtype=dtype, page_size=page, dynamic=dynamic)
    x = cases.make_tensors(params, "cuda", 0)
    pages = x.cache.kcache.shape[0]
    table = torch.full((4, 3 * 128 // page), -1, dtype=torch.int32, device="cuda")
    live = [-(-length // page) for length in params.lens]
    used = {int(p) for row, n in zip(x.cache.block_ids, live, strict=True) for p in row[:n]}
    for row, n in enumerate(live):
        table[row, :n] = x.cache.block_ids[row, :n]
    spare = next(p for p in range(pages) if p not in used)
    for cache in (x.cache.kcache, x.cache.vcache):
        fill_nan(cache[spare])
    x = replace(x, cache=replace(x.cache, block_ids=table))
    task_map = cases.make_task_map(x) if dynamic else None
    results = []
    for filling in (-1, 2**31 - 1, pages, -(2**31), spare):
        for row, n in enumerate(live):
            table[row, n:] = filling
        results.append(cases.attend(x, task_map))
    assert bool(results[0].isfinite().all())
    assert all(torch.equal(results[0], result) for result in results[1:])


@PATHS
def test_fr_61_split_with_several_rows_keeps_requests_apart(dynamic: bool) -> None:
    call = bf16_cache([8192, 100], pages=256)
    for b, value in ((0, 2.0), (1, -3.0)):
        call["vcache"][call["block_ids"][b].long()] = value
    out = decode(torch.randn(8, 8, 128, device="cuda").bfloat16(), call, dynamic, mtp=3)
    torch.testing.assert_close(out[:4].float(), torch.full_like(out[:4], 2.0).float(), rtol=1e-2, atol=0)
    torch.testing.assert_close(out[4:].float(), torch.full_like(out[4:], -3.0).float(), rtol=1e-2, atol=0)


@PATHS
def test_fr_61_four_rows_cost_little_more_than_one(dynamic: bool) -> None:
    """The same keys are read: a request that is not split over the GPU would take 20 times as long. 32 rows keep four
    times as many partials, so twice the time is usual."""
    calls = {}
    for tokens in (1, 4):
        x = cases.make_tensors(DecodeCase((65536,), 8, 1, num_new_tokens=tokens), "cuda", 0)
        task_map = cases.make_task_map(x) if dynamic else None
        calls[str(tokens)] = lambda x=x, task_map=task_map: cases.attend(x, task_map)
    times = fastest_us(calls)
    assert times["4"] <= 3 * times["1"], times


@PATHS
@pytest.mark.parametrize("window", [1, 64, 1023])
def test_fr_76_exactly_window_keys(window: int, dynamic: bool) -> None:
    call = bf16_cache([3000])
    q = torch.ones(1, 8, 128, device="cuda").bfloat16()
    pages = call["block_ids"][0].long()
    keys, values = (call[name][pages].reshape(-1, 128) for name in ("kcache", "vcache"))
    keys[:], values[:] = 0.0, 1.0
    keys[: 3000 - window], values[: 3000 - window] = 10.0, 1000.0  # outside: huge scores and values
    for name, rows in (("kcache", keys), ("vcache", values)):
        call[name][pages] = rows.view(-1, 64, 1, 128)
    assert bool((decode(q, call, dynamic, window=window) == 1.0).all())


def half_to_the_sink(dynamic: bool, **more: object) -> None:
    call = bf16_cache([4096], value=1.0)
    sinks = torch.full((8,), math.log(4096), device="cuda")
    out = decode(torch.zeros(1, 8, 128, device="cuda").bfloat16(), call, dynamic, sinks=sinks, **more)
    torch.testing.assert_close(out.float(), torch.full_like(out, 0.5).float(), rtol=5e-3, atol=0)


@PATHS
def test_fr_77_the_sink_counts_once(dynamic: bool) -> None:
    half_to_the_sink(dynamic)


@pytest.mark.parametrize("backend", ["portable", "sm90"])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_fr_77_the_sink_counts_once_over_any_splits(splits: int, backend: str) -> None:
    if backend == "sm90" and not arch.is_hopper("cuda"):
        pytest.skip("this plan needs compute capability 9.0")
    plan = Plan("portable", 2, 16, 4, 1, 2) if backend == "portable" else Plan("sm90", 1, 8, 8, 1, 2, 168)
    half_to_the_sink(False, plan=replace(plan, num_splits=splits))


@PATHS
def test_fr_79_soft_cap_saturates(dynamic: bool) -> None:
    call = bf16_cache([500])
    q = torch.full((1, 8, 128), 100.0, device="cuda").bfloat16()
    out = decode(q, call, dynamic, logit_cap=50.0)
    expected, _ = decode_reference(
        q, call["kcache"], call["vcache"], call["block_ids"], call["num_seq_kvcache"], num_new_tokens=1,
        new_kv_included=True, logit_cap=50.0,
    )  # fmt: skip
    assert_close(out, expected, cases.TOLERANCES["bf16"], "raw scores of thousands")


def test_fr_83_a_graph_captured_at_length_1_splits_long_requests() -> None:
    """Replayed at 100000 keys it is as fast as a graph that was captured there, and gives the bits of an eager call."""
    call = bf16_cache([1], pages=1600)
    q = torch.randn(1, 8, 128, device="cuda").bfloat16()
    task_map = hpc.get_attention_decode_task_workspace(1, 102400, 1)

    def step() -> torch.Tensor:
        hpc.assign_attention_decode_task(call["num_seq_kvcache"], task_map, 1, 1, True)
        return hpc.attention_decode_bf16(q, **call, new_kv_included=True, task_map=task_map)  # type: ignore[arg-type, return-value]

    graphs = {"at 1": capture(step)}
    call["num_seq_kvcache"].fill_(100000)
    graphs["at 100000"] = capture(step)
    expected = step()
    for name, (graph, out) in graphs.items():
        graph.replay()
        assert torch.equal(out, expected), name
    times = fastest_replay_us({name: graph for name, (graph, _) in graphs.items()})
    assert times["at 1"] <= 1.1 * times["at 100000"], times
