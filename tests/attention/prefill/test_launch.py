"""From a signature to kernels on a CPU: the real launch code, with kernels that are interpreted or emulated.

Shows what neither of those shows alone: that every argument arrives in its place, from checked tensors to the output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gluon_emulator import Desc, Ptr, emulate
from prefill_support import compare, make

from hpc.attention.prefill import cases, launch, plan, validate
from hpc.attention.prefill.case_lists import prompts

pytestmark = pytest.mark.interpret

SMS = {
    "portable": 3,
    "split": 3,
    "sm90": 3,
    "sm90 short": 132,
    "sm90 split": 3,
}  # with many, every tile runs at once
BACKENDS = pytest.mark.parametrize("backend", SMS)


class CpuKernel:
    """In the place of `Kernel`: runs what would have been launched."""

    compiled = False

    def __init__(self, fn: Any, name: str, **options: Any) -> None:
        self.fn = fn

    def __call__(self, grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        if "sm90" in self.fn.__name__:
            emulate(self.fn, grid[0], *map(self.emulated, args))
            return
        # on the CPU: no PDL, which is the last compile-time fact, or the one before INTERPRET
        names = self.fn.arg_names
        given = dict(zip(names, map(self.interpreted, args), strict=True)) | {"PDL": False}
        if "INTERPRET" in names:
            given["INTERPRET"] = True
        self.fn[grid](**given)

    @staticmethod
    def emulated(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Ptr(x)
        if hasattr(x, "block_shape"):
            assert list(x.base.shape) == list(x.shape) and list(x.base.stride()) == list(x.strides)
            return Desc(x.base, list(x.block_shape))
        return x

    @staticmethod
    def interpreted(x: Any) -> Any:
        fp8 = isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn
        return x.view(torch.uint8) if fp8 else x


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "Kernel", CpuKernel)
    monkeypatch.setattr(launch, "raw_stream", lambda index: 0)
    monkeypatch.setattr(launch, "current_device", lambda: 0)


def run(
    inputs: cases.PrefillInputs, backend: str, output: torch.Tensor | None = None, block_m: int = 16
) -> Any:
    """The call as `entry` makes it, on a machine that says it is an SM90 of a few multiprocessors."""
    p = inputs.params
    arguments = validate.Arguments(
        "test", inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.block_ids, inputs.seq_lens, p.rows,
        (inputs.qscale, inputs.kscale, inputs.vscale), p.quant_type if p.dtype == "fp8" else -1, output,
        window=p.window, logit_cap=p.logit_cap, sinks=inputs.sinks, causal=p.causal, return_lse=True,
    )  # fmt: skip
    key, layout = validate.call(arguments)
    key = replace(key, sm90=True, sms=SMS[backend])
    chosen = replace(plan.sm90(key), splits=3 if backend == "sm90 split" else 0)
    if backend in ("portable", "split"):
        chosen = replace(
            plan.portable(key), pack=plan.pack_of(key.group, block_m), block_m=block_m, block_n=32,
            splits=3 if backend == "split" else 1,
        )  # fmt: skip
    assert plan.is_legal(chosen, key) is None
    assert plan.is_short(inputs.q.shape[0], len(p.lens), chosen, key) == (backend == "sm90 short")
    call = launch.Call(key, chosen, 0, layout, p.window)
    result = call.run(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.block_ids, inputs.seq_lens, arguments.scales,
        inputs.sinks, None, p.logit_cap, output,
    )  # fmt: skip
    return (*result, chosen)


def test_the_plan_decides_on_overlap_but_for_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []
    monkeypatch.setattr(CpuKernel, "__call__", lambda self, grid, stream, args: configs.append(args[-1]))
    inputs = make(((20, 77),), (8, 8), device="cpu")
    key = replace(cases.key_of(inputs.params, True), return_lse=True)
    layout = validate.Layout(
        (1024, 128), (65536, 1024, 128), (65536, 1024, 128), (1024, 128), (0, 0, 0), 1, 2
    )
    tensors = (inputs.q, inputs.k, inputs.v, inputs.q, None, inputs.cu_seqlens, inputs.block_ids, *[None] * 4)
    for overlap in (False, True):
        call = launch.Call(key, replace(plan.sm90(key), overlap=overlap), 0, layout, None)
        for short in (False, True):
            call.launch(0, tensors, inputs.cu_seqlens, inputs.seq_lens, 1, 1.0, 1.0, short)
    assert [x.OVERLAP for x in configs if hasattr(x, "OVERLAP")] == [False, False, True, False]


LENS = ((20, 77), (1, 33), (7, 7), (0, 5))
SHAPES: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp8": {"dtype": "fp8"}, "window, HND": {"window": 30, "layout": "HND"},
    "cap, sinks, rows behind": {"logit_cap": 2.0, "sinks": True, "extra_rows": 5}, "full": {"causal": False},
    "fp8 joint, cap, sinks": {"dtype": "fp8", "layout": "joint", "logit_cap": 5.0, "sinks": True},
}  # fmt: skip


# one backend a shape always: the arguments are the same for all shapes but for those that a shape has of its own
SLOW = {
    ("window, HND", "sm90"), ("full", "portable"), ("full", "sm90"), ("cap, sinks, rows behind", "sm90 short"),
    ("cap, sinks, rows behind", "portable"), ("fp8 joint, cap, sinks", "sm90"), ("bf16", "split"), ("full", "split"),
    ("fp8", "sm90 short"), ("bf16", "sm90"), ("window, HND", "split"), ("fp8 joint, cap, sinks", "portable"),
    ("fp8", "split"), ("full", "sm90 split"), ("fp8", "sm90 split"), ("window, HND", "sm90 split"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        pytest.param(shape, backend, marks=pytest.mark.slow if (shape, backend) in SLOW else ())
        for shape in SHAPES
        for backend in SMS
    ],
)
def test_arguments_arrive(shape: str, backend: str) -> None:
    inputs = make(LENS, (8, 2), device="cpu", page_size=16, **SHAPES[shape])
    out, lse, chosen = run(inputs, backend)
    compare(inputs, out, lse, chosen)


def test_arguments_of_ragged_keys_arrive() -> None:
    inputs = make(prompts(20, 0, 9), (4, 2), device="cpu", head_dim=32, page_size=0, extra_rows=3)
    out, lse, chosen = run(inputs, "portable")
    compare(inputs, out, lse, chosen)


def test_arguments_of_scales_per_token_arrive() -> None:
    inputs = make(((10, 70), (3, 40)), (4, 2), device="cpu", dtype="fp8", quant_type=0)
    out, lse, chosen = run(inputs, "portable")
    compare(inputs, out, lse, chosen)


@BACKENDS
def test_strides_arrive(backend: str) -> None:
    """Queries as a slice of a fused qkv, the output as a slice of a larger buffer, a page table with a wider row."""
    inputs = make(LENS, (8, 2), device="cpu", page_size=16)
    fused = torch.full((28, 12, 128), float("nan")).bfloat16()
    fused[:, :8] = inputs.q
    assert inputs.block_ids is not None
    wide = torch.full((4, 11), -7, dtype=torch.int32)
    wide[:, : inputs.block_ids.shape[1]] = inputs.block_ids
    buffer = torch.full((30, 10, 160), 7.0).bfloat16()
    view = buffer[1:29, 1:9, :128]
    sliced = replace(inputs, q=fused[:, :8], block_ids=wide[:, : inputs.block_ids.shape[1]])
    out, lse, chosen = run(sliced, backend, output=view)
    assert out is view
    compare(inputs, out, lse, chosen)
    view.fill_(7.0)
    assert (buffer == 7.0).all()


@BACKENDS
def test_later_calls_hand_over_as_many_arguments(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a kernel is compiled, addresses take the place of tensors, argument by argument."""
    seen: list[list[tuple[Any, ...]]] = []

    class Recorder:
        def __init__(self, fn: Any, name: str, **options: Any) -> None:
            self.compiled = False
            self.calls: list[tuple[Any, ...]] = []
            seen.append(self.calls)

        def __call__(self, grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
            self.calls.append(args)
            self.compiled = True

        def descriptor(
            self, number: int, address: int, base: torch.Tensor, shape: Any, strides: Any
        ) -> tuple[Any, ...]:
            assert address == base.data_ptr()
            return (base,)

    monkeypatch.setattr(launch, "Kernel", Recorder)
    p = make(LENS, (8, 2), device="cpu", page_size=16, dtype="fp8", sinks=True)
    arguments = validate.Arguments(
        "test", p.q, p.k, p.v, p.cu_seqlens, p.block_ids, p.seq_lens, 20, (p.qscale, p.kscale, p.vscale), 1,
        sinks=p.sinks,
    )  # fmt: skip
    key, layout = validate.call(arguments)
    key = replace(key, sm90=True, sms=SMS[backend])
    choices = {
        "portable": plan.portable(key), "split": replace(plan.portable(key), splits=8),
        "sm90 split": replace(plan.sm90(key), splits=8),
    }  # fmt: skip
    call = launch.Call(key, choices.get(backend, plan.sm90(key)), 0, layout, None)
    for _ in range(2):
        call.run(
            p.q, p.k, p.v, p.cu_seqlens, p.block_ids, p.seq_lens, arguments.scales, p.sinks, None, None, None
        )
    counts = {"sm90 short": [0, 2], "split": [2, 0, 2, 2], "sm90 split": [0, 0, 2, 0, 2]}
    assert [len(calls) for calls in seen] == counts.get(backend, [2, 2])
    for first, second in (calls for calls in seen if calls):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            if isinstance(a, torch.Tensor):
                assert isinstance(b, int)
            elif hasattr(a, "block_shape"):
                assert isinstance(b, torch.Tensor) and b.shape == a.base.shape  # the output is a new one
            else:
                assert type(a) is type(b) and a == b


# --- signatures -------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    is_cuda = True  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


@pytest.fixture
def through_entry(monkeypatch: pytest.MonkeyPatch) -> dict[Any, launch.Call]:
    """The public functions with interpreted kernels; returns the calls they keep."""
    from hpc.attention.prefill import entry
    from hpc.common import arch

    def choose(key: plan.Key) -> plan.Plan:
        return replace(plan.portable(key), pack=plan.pack_of(key.group, 16), block_m=16, block_n=32)

    monkeypatch.setattr(launch, "current_device", lambda: None)  # the index of a CPU
    monkeypatch.setattr(arch, "require_gpu", lambda function, device: None)
    monkeypatch.setattr(plan, "choose", choose)
    monkeypatch.setattr(entry, "_CALLS", {})
    return entry._CALLS


def on_gpu(inputs: cases.PrefillInputs) -> cases.PrefillInputs:
    return replace(inputs, q=inputs.q.as_subclass(OnGpu))


def test_calls_that_differ_in_rows_and_requests_share_a_signature(
    through_entry: dict[Any, launch.Call],
) -> None:
    """As prompts come and go: other token counts, request counts and page-table widths need no new launch."""
    served = make(
        ((20, 40), (3, 9)), (4, 2), device="cpu", head_dim=32, page_size=16
    )  # owns the largest cache
    for lens in (served.params.lens, ((5, 45),), ((1, 1), (1, 30), (9, 9))):
        inputs = make(lens, (4, 2), device="cpu", head_dim=32, page_size=16)
        k, v = (torch.full_like(cache, float("nan")) for cache in (served.k, served.v))
        k[: len(inputs.k)], v[: len(inputs.v)] = inputs.k[: len(k)], inputs.v[: len(v)]
        inputs = replace(inputs, k=k, v=v)
        out, lse = cases.attend(on_gpu(inputs), return_lse=True)
        compare(inputs, out.as_subclass(torch.Tensor), lse.as_subclass(torch.Tensor))
    assert len(through_entry) == 1


def test_options_and_formats_do_not_share_a_signature(through_entry: dict[Any, launch.Call]) -> None:
    variants: list[dict[str, Any]] = [
        {}, {"window": 9}, {"window": 10}, {"logit_cap": 2.0}, {"causal": False}, {"sinks": True}, {"dtype": "fp8"},
        {"layout": "HND"}, {"page_size": 8},
    ]  # fmt: skip
    for options in variants:
        inputs = make(((9, 20),), (4, 2), device="cpu", head_dim=32, **{"page_size": 16, **options})
        out, lse = cases.attend(on_gpu(inputs), return_lse=True)
        compare(inputs, out.as_subclass(torch.Tensor), lse.as_subclass(torch.Tensor))
    assert len(through_entry) == len(variants)


def test_a_known_signature_does_not_let_wrong_counts_pass(through_entry: dict[Any, launch.Call]) -> None:
    from hpc.common.errors import InvalidArgument

    inputs = on_gpu(make(((9, 20), (3, 3)), (4, 2), device="cpu", head_dim=32, page_size=16, dtype="fp8"))
    cases.attend(inputs)
    assert inputs.block_ids is not None and inputs.qscale is not None
    for changes in (
        {"cu_seqlens": inputs.cu_seqlens[:2]}, {"block_ids": inputs.block_ids[:1]}, {"seq_lens": inputs.seq_lens[:1]},
        {"qscale": inputs.qscale[:1]}, {"qscale": inputs.qscale[:, :, :4]}, {"qscale": inputs.qscale[:, :2]},
        {"qscale": inputs.qscale[:, :, ::2]}, {"block_ids": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            cases.attend(replace(inputs, **changes))
    with pytest.raises(InvalidArgument):
        cases.attend(inputs, output=torch.zeros(11, 4, 32).bfloat16())
