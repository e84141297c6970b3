"""The full grid on a GPU, through the public functions, against float64; graphs, streams, and what lengths may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from prefill_support import DEVICE, check, compare, make

from hpc.attention.prefill import case_lists, cases, plan
from hpc.attention.prefill.case_lists import BATCHES, PrefillCase, prompts
from hpc.testing import guarded, measure

pytestmark = pytest.mark.gpu

GRID = {case.name: case.params for case in case_lists.gpu_cases()}
SM90 = case_lists.sm90_shapes()
BOTH = pytest.mark.parametrize("dtype", ["bf16", "fp8"])
# Other fields than those of `plan.sm90`: whole groups in a tile and no short calls; three blocks in flight; a tile that
# ends before the next one starts; a table for calls that would be short.
VARIANTS: dict[str, dict[str, Any]] = {
    "sm90 packed": {"pack": 64, "short_pack": 0}, "sm90 three stages": {"stages": 3},
    "sm90 table": {"short_pack": 0}, "sm90 no overlap": {"overlap": False, "short_pack": 0},
    "sm90 no overlap packed": {"overlap": False, "short_pack": 0, "pack": 64},
}  # fmt: skip


def built(dtype: str, head_dim: int, backend: str) -> bool:
    """BF16 lacks room for three stages, FP8 overlaps always, a head dim of 256 never."""
    if dtype == "fp8":
        return "overlap" not in backend
    return backend != "sm90 three stages" and not ("overlap" in backend and head_dim > 128)


SHAPES = [
    (name, backend) for name, params in SM90.items() for backend in ("portable", "sm90", *VARIANTS)
    if built(params.dtype, params.head_dim, backend)
]  # fmt: skip
PLANS = pytest.mark.parametrize(
    ("dtype", "backend"),
    [(d, b) for d in ("bf16", "fp8") for b in ("portable", "sm90", "sm90 no overlap") if built(d, 128, b)],
)


def chosen(params: PrefillCase, backend: str) -> plan.Plan:
    if backend != "portable" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs SM90")
    key = cases.key_of(params, backend != "portable")
    if backend == "portable":
        return replace(plan.portable(key), splits=1)
    fields = {"splits": 1, **VARIANTS.get(backend, {})}
    if "pack" in fields:
        fields["pack"] = plan.pack_of(key.group, fields["pack"])
    return replace(plan.sm90(key), **fields)


@pytest.mark.parametrize("name", GRID)
def test_equals_float64(name: str) -> None:
    """Output and lse, into a NaN-poisoned output between guards, over a cache whose dead rows are NaN."""
    inputs = cases.make_tensors(GRID[name], DEVICE, seed=1)
    output = guarded((*inputs.q.shape[:2], GRID[name].value_dim), torch.bfloat16, DEVICE)
    output.tensor.fill_(float("nan"))
    result, lse = cases.attend(inputs, output=output.tensor, return_lse=True)
    assert result is output.tensor
    output.check_guards(name)
    compare(inputs, result, lse)


@pytest.mark.parametrize(("name", "backend"), SHAPES)
def test_shapes_of_the_sm90_kernels(name: str, backend: str) -> None:
    for batch, lens in BATCHES.items():
        params = replace(SM90[name], lens=lens, extra_rows=5 if batch == "mixed" else 0)
        inputs = cases.make_tensors(params, DEVICE, seed=1)
        first = check(inputs, chosen(params, backend)).clone()
        for _ in range(10):
            again = cases.attend(inputs, plan=chosen(params, backend))
            assert torch.equal(again, first), f"{batch}: bits change from run to run"


FULL_LOAD = {
    "16x2K": prompts(*[2048] * 16), "64x128": prompts(*[128] * 64), "uneven": prompts(*range(100, 1500, 37)),
    "over a context": ((300, 9000), (1, 4000), (2048, 2048)) * 5,
}  # fmt: skip


@pytest.mark.parametrize("name", FULL_LOAD)
def test_overlap_changes_no_number_at_full_load(name: str) -> None:
    """Dozens of tiles a CTA, against the kernel that ends a tile before it starts the next one; the bits repeat."""
    inputs = make(FULL_LOAD[name], (64, 8), extra_rows=3)
    expected = cases.attend(inputs, plan=chosen(inputs.params, "sm90 no overlap"))
    first = cases.attend(inputs, plan=chosen(inputs.params, "sm90")).clone()
    error = measure(first, expected)
    assert error.rms_rel < 1e-3 and error.max_rel < 1e-2, error
    for _ in range(10):
        assert torch.equal(cases.attend(inputs, plan=chosen(inputs.params, "sm90")), first)


@pytest.mark.parametrize("backend", ["portable", "sm90"])
@BOTH
def test_values_of_one_stay_one_at_any_length(dtype: str, backend: str) -> None:
    """Sums in an accumulator of few bits would drift with the number of keys."""
    errors = {}
    for keys in (1024, 16384, 131072):
        inputs = make(((128, keys),), (8, 1), dtype=dtype)
        inputs.v.copy_(torch.ones(inputs.v.shape, device=DEVICE).to(inputs.v.dtype))
        value = cases.V_SCALE if dtype == "fp8" else 1.0
        errors[keys] = measure(
            cases.attend(inputs, plan=chosen(inputs.params, backend)) / value,
            torch.ones(inputs.q.shape, dtype=torch.float64, device=DEVICE),
        ).rms_rel
    assert errors[131072] < 0.01 and errors[131072] < 2 * max(errors[1024], 2e-3), errors


@PLANS
def test_rows_beside_nan_are_untouched(dtype: str, backend: str) -> None:
    """A request whose keys are NaN is NaN; its neighbours in the batch keep their bits."""
    inputs = make(prompts(40, 70, 30), (8, 1), dtype=dtype)
    chosen_plan = chosen(inputs.params, backend)
    clean = cases.attend(inputs, plan=chosen_plan)
    pages = inputs.block_ids[1, :1].long()
    bits = inputs.k.view(torch.uint8 if dtype == "fp8" else torch.int16)
    bits[pages] = 0x7F if dtype == "fp8" else 0x7FC0
    dirty = cases.attend(inputs, plan=chosen_plan)
    assert torch.equal(dirty[:40], clean[:40]) and torch.equal(dirty[110:], clean[110:])
    assert dirty[40:110].isnan().any()


SPLIT: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp8": {"dtype": "fp8"}, "bf16 window sinks": {"window": 3000, "sinks": True, "page_size": 16},
    "fp8 window cap": {"dtype": "fp8", "window": 5000, "logit_cap": 5.0}, "full": {"causal": False},
    "fp8 per token": {"dtype": "fp8", "quant_type": 0}, "5/1 d256": {"heads": (5, 1), "head_dim": 256},
    "bf16 64/8 HND d64": {"heads": (64, 8), "head_dim": 64, "layout": "HND"},
    "fp8 window sinks cap page 16": {
        "dtype": "fp8", "window": 700, "sinks": True, "logit_cap": 5.0, "page_size": 16, "heads": (12, 2)},
    "fp8 full sinks joint page 128": {
        "dtype": "fp8", "causal": False, "sinks": True, "layout": "joint", "page_size": 128, "heads": (4, 4)},
    "d256 window cap page 32": {"heads": (16, 2), "head_dim": 256, "window": 900, "logit_cap": 5.0, "page_size": 32},
}  # fmt: skip


def split_params(name: str) -> PrefillCase:
    """Long and short contexts in one batch, requests without tokens or keys, whole tiles and tiles of a token."""
    fields = {"heads": (8, 1), **SPLIT[name]}
    lens = ((17, 20000), (1, 70), (0, 9), (3, 0), (5, 5), (1, 8193), (130, 700))
    return PrefillCase(lens, *fields.pop("heads"), extra_rows=3, **fields)


def split_plan(params: PrefillCase, backend: str, splits: int) -> plan.Plan:
    """Of the kernel of a GPU or of any."""
    if backend == "sm90" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs SM90")
    key = cases.key_of(params, torch.cuda.get_device_capability()[0] == 9)
    return replace(plan.choose(key) if backend == "sm90" else plan.portable(key), splits=splits)


SPLITS = [
    (name, backend, splits) for name in SPLIT
    for backend, splits in (("portable", 8), *(("sm90", n) for n in (2, 8, 13, 64)))
    if backend in ("portable", plan.choose(cases.key_of(split_params(name), True)).backend)
]  # fmt: skip


@pytest.mark.parametrize(("name", "backend", "splits"), SPLITS)
def test_split_keys_join_to_the_whole(name: str, backend: str, splits: int) -> None:
    """Dead rows of the cache are NaN; the bits repeat."""
    inputs = cases.make_tensors(split_params(name), DEVICE, seed=1)
    chosen_plan = split_plan(inputs.params, backend, splits)
    first = check(inputs, chosen_plan).clone()
    for _ in range(5):
        assert torch.equal(cases.attend(inputs, plan=chosen_plan), first)


@pytest.mark.parametrize(
    "batch",
    ["17 over 8K", "17 over 32K", "128 over 32K", "4 x 17 over 32K", "64, 1 over 32K", "20 of 1"],
)
@pytest.mark.parametrize("heads", [(8, 1), (64, 8), (5, 1)])
@BOTH
def test_calls_split_by_their_shapes(dtype: str, heads: tuple[int, int], batch: str) -> None:
    lens = {
        "17 over 8K": ((17, 8192),), "17 over 32K": ((17, 32768),), "128 over 32K": ((128, 32768),),
        "4 x 17 over 32K": ((17, 32768),) * 4, "64, 1 over 32K": ((64, 64), (1, 32768)),
        "20 of 1": tuple((1, 30 + 400 * i) for i in range(20)),
    }[batch]  # fmt: skip
    inputs = make(lens, heads, dtype=dtype)
    key = cases.key_of(inputs.params, torch.cuda.get_device_capability()[0] == 9)
    parts = plan.parts(inputs.params.rows, len(lens), lens[-1][1], plan.choose(key), key)
    assert parts > 1 or not key.sm90 or batch == "20 of 1"
    first = check(inputs).clone()
    for _ in range(5):
        assert torch.equal(cases.attend(inputs), first)


@pytest.mark.parametrize("backend", ["portable", "sm90"])
@BOTH
def test_split_calls_replay_with_other_lengths(dtype: str, backend: str) -> None:
    """Captured over a long context, replayed over short ones and without some: parts follow the lengths."""
    inputs = make(((12, 9000), (9, 6000)), (8, 1), dtype=dtype)
    by_shape = split_plan(inputs.params, backend, 0)
    assert plan.parts(21, 2, 9000, by_shape, cases.key_of(inputs.params, backend == "sm90")) > 1
    graph, out = capture(lambda: cases.attend(inputs, plan=by_shape))
    for lens in (((12, 9000), (9, 6000)), ((12, 12), (9, 300)), ((20, 8999), (1, 1)), ((0, 50), (21, 4100))):
        if dtype == "fp8":
            inputs.qscale.fill_(2.0)
        inputs.cu_seqlens.copy_(torch.tensor([0, lens[0][0], 21]))
        inputs.seq_lens.copy_(torch.tensor([keys for _, keys in lens]))
        out.fill_(float("nan"))
        graph.replay()
        compare(replace(inputs, params=replace(inputs.params, lens=lens)), out, None, by_shape)


@BOTH
def test_split_calls_of_two_streams(dtype: str) -> None:
    """Each call owns its table and its scratch."""
    calls = [
        make(lens, (8, 1), seed=seed, dtype=dtype)
        for seed, lens in enumerate((((17, 9000),), ((90, 20000),)))
    ]
    plans = [split_plan(x.params, "sm90", splits) for x, splits in zip(calls, (32, 9), strict=True)]
    expected = [cases.attend(x, plan=chosen_plan) for x, chosen_plan in zip(calls, plans, strict=True)]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for x, chosen_plan, stream in zip(calls, plans, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append([cases.attend(x, plan=chosen_plan) for _ in range(3)])
        torch.cuda.synchronize()
        for got, wanted in zip(results, expected, strict=True):
            assert all(torch.equal(result, wanted) for result in got)


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result


@PLANS
def test_replay_reads_lengths_again(dtype: str, backend: str) -> None:
    """Captured with one batch, replayed with others of no more rows: rows behind the last request are zeros."""
    inputs = make(prompts(300, 200, 12), (8, 1), dtype=dtype)
    chosen_plan = chosen(inputs.params, backend)
    graph, out = capture(lambda: cases.attend(inputs, plan=chosen_plan))
    for lens in (
        ((300, 300), (200, 200), (12, 12)),
        ((1, 256), (200, 200), (0, 3)),
        ((4, 4), (4, 100), (256, 256)),
    ):
        ends = [0, *(sum(n for n, _ in lens[: i + 1]) for i in range(3))]
        if dtype == "fp8":
            inputs.qscale.fill_(2.0)
        inputs.cu_seqlens.copy_(torch.tensor(ends))
        inputs.seq_lens.copy_(
            torch.tensor([min(keys, inputs.params.lens[b][1]) for b, (_, keys) in enumerate(lens)])
        )
        out.fill_(float("nan"))
        graph.replay()
        now = replace(inputs, params=replace(inputs.params, lens=lens))
        compare(now, out, None, chosen_plan)


@pytest.mark.parametrize("backend", ["portable", "sm90", "sm90 no overlap"])
def test_two_streams_at_once(backend: str) -> None:
    """Each call owns its tile table."""
    calls = [make(BATCHES[name], (8, 1), seed=seed) for seed, name in enumerate(("mixed", "chunks"))]
    expected = [cases.attend(x, plan=chosen(x.params, backend)) for x in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for x, stream, results in zip(calls, streams, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(cases.attend(x, plan=chosen(x.params, backend)))
    torch.cuda.synchronize()
    for results, wanted in zip(got, expected, strict=True):
        assert all(torch.equal(result, wanted) for result in results)


def test_views_are_read_and_written_in_place() -> None:
    """Queries as a slice of a fused qkv, output as a slice of a larger buffer."""
    inputs = make(((40, 90), (7, 7)), (8, 2))
    fused = torch.full((47, 12, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    fused[:, :8] = inputs.q
    buffer = torch.full((47, 10, 160), 7.0, dtype=torch.bfloat16, device=DEVICE)
    sliced = replace(inputs, q=fused[:, :8])
    out = cases.attend(sliced, output=buffer[:, 1:9, :128])
    compare(inputs, out, None)
    buffer[:, 1:9, :128] = 7.0
    assert (buffer == 7.0).all()
