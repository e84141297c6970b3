"""Faults that users of such libraries met, each with the input that shows it. Numbers as in the test names."""

from __future__ import annotations

import math

import pytest
import torch

import hpc
from hpc.attention.decode import cases
from hpc.attention.decode.case_lists import DecodeCase
from hpc.attention.decode.reference import decode_reference
from hpc.testing import assert_close, guarded, measure

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
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (24, 8), (40, 8), (28, 4)])
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
def test_fr_02_groups_16_and_32(dtype: str, heads: tuple[int, int]) -> None:
    check(DecodeCase((2048, 4096) * 8, *heads, dtype=dtype))


@pytest.mark.parametrize("page", [1, 8, 16, 32, 64, 128])
def test_fr_05_page_sizes(page: int) -> None:
    check(DecodeCase((1024, 4096) * 8, 64, 8, page_size=page))


@PATHS
@pytest.mark.parametrize("tokens", [2, 4, 5, 6, 7, 8])
def test_fr_07_and_35_any_number_of_new_tokens(tokens: int, dynamic: bool) -> None:
    params = DecodeCase((300, 65, 200, 1000), 8, 1, num_new_tokens=tokens, dynamic=dynamic)
    check(params)


def test_fr_11_group_12_with_four_tokens() -> None:
    check(DecodeCase((8192,) * 16, 12, 1, dtype="fp8", num_new_tokens=4))


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


@pytest.mark.parametrize("length", [1024, 16384, 131072])
def test_fr_20_fp8_does_not_drift_with_length(length: int) -> None:
    check(DecodeCase((length,), 8, 1, dtype="fp8"))


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
    lens = [1, 2, 63, 64, 65, 127, 128, 129]
    call = bf16_cache(lens)
    out = decode(torch.zeros(8, 8, 128, device="cuda").bfloat16(), call, dynamic)
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


def test_fr_36_one_table_row_a_request() -> None:
    lens = tuple(3 + (i * 41) % 248 for i in range(256))
    check(DecodeCase(lens, 8, 1, num_new_tokens=3))


@PATHS
def test_fr_60_dead_table_entries_do_not_matter(dynamic: bool) -> None:
    call = bf16_cache([70], pages=16)
    call["kcache"][9] = call["vcache"][9] = float("nan")
    q = torch.randn(1, 8, 128, device="cuda").bfloat16()
    results = []
    for filling in (-1, 2**31 - 1, 16, 9):
        call["block_ids"][0, 2:] = filling
        results.append(decode(q, call, dynamic))
    assert all(torch.equal(results[0], result) for result in results[1:]) and bool(
        results[0].isfinite().all()
    )


@PATHS
def test_fr_61_split_with_several_rows_keeps_requests_apart(dynamic: bool) -> None:
    call = bf16_cache([8192, 100], pages=256)
    for b, value in ((0, 2.0), (1, -3.0)):
        call["vcache"][call["block_ids"][b].long()] = value
    out = decode(torch.randn(8, 8, 128, device="cuda").bfloat16(), call, dynamic, mtp=3)
    torch.testing.assert_close(out[:4].float(), torch.full_like(out[:4], 2.0).float(), rtol=1e-2, atol=0)
    torch.testing.assert_close(out[4:].float(), torch.full_like(out[4:], -3.0).float(), rtol=1e-2, atol=0)


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


@PATHS
def test_fr_77_the_sink_counts_once(dynamic: bool) -> None:
    call = bf16_cache([4096], value=1.0)
    sinks = torch.full((8,), math.log(4096), device="cuda")
    out = decode(torch.zeros(1, 8, 128, device="cuda").bfloat16(), call, dynamic, sinks=sinks)
    torch.testing.assert_close(out.float(), torch.full_like(out, 0.5).float(), rtol=5e-3, atol=0)


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
    call = bf16_cache([1], pages=1600)
    q = torch.randn(1, 8, 128, device="cuda").bfloat16()
    task_map = hpc.get_attention_decode_task_workspace(1, 102400, 1)

    def step() -> torch.Tensor:
        hpc.assign_attention_decode_task(call["num_seq_kvcache"], task_map, 1, 1, True)
        return hpc.attention_decode_bf16(q, **call, new_kv_included=True, task_map=task_map)  # type: ignore[arg-type, return-value]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    call["num_seq_kvcache"].fill_(100000)
    graph.replay()
    assert torch.equal(out, step())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    one_sm_us = 100000 * 512 / 60e3  # at 60 bytes a nanosecond, far more than one multiprocessor reads
    assert start.elapsed_time(end) / 20 * 1e3 < one_sm_us / 4, "the replay ran with few splits"
