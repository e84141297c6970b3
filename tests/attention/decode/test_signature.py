"""What a known call skips: checks of metadata that it has seen, never those of values, addresses or types."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from hpc.attention.decode import entry
from hpc.attention.decode.arguments import Arguments, plain_numbers
from hpc.common.errors import InvalidArgument

FP8, BF16, I32, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.float32


@dataclass(frozen=True)
class OnGpu:
    """The metadata of a tensor on a GPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int = 4096
    strides: tuple[int, ...] = (1,)
    device: int = 0
    is_cuda: bool = True

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device

    def numel(self) -> int:
        return math.prod(self.shape)


TENSORS: dict[str, Any] = {
    "q": OnGpu((4, 8, 128), FP8), "kcache": OnGpu((9, 64, 1, 128), FP8), "vcache": OnGpu((9, 64, 1, 128), FP8),
    "block_ids": OnGpu((4, 3), I32), "seq_lens": OnGpu((4,), I32), "task_map": OnGpu((9999,), torch.int8),
    "output": OnGpu((4, 8, 128), BF16), "sinks": OnGpu((8,), FP32), "split_flag": OnGpu((4, 1), I32),
}  # fmt: skip
SCALES: Any = (OnGpu((4, 8), FP32), OnGpu((1,), FP32), OnGpu((1,), FP32))
CALL = Arguments("attention_decode_fp8", scales=SCALES, quant=1, **TENSORS)


class Known:
    """Stands for the launches of a signature, and keeps the values that they were run with."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, Any]] = []

    def run(self, *tensors_and_values: Any) -> None:
        self.values.append((tensors_and_values[8], tensors_and_values[9]))


def equal_metadata(tensors: list[OnGpu]) -> Any:
    """As `metadata_check`, for these stand-ins."""
    return lambda *given: all(
        replace(a, address=0) == replace(b, address=0) for a, b in zip(tensors, given, strict=True)
    )


@pytest.fixture(params=["compared in Python", "compared by one check"])
def made(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Known]:
    """The signatures that were new."""
    new: list[Known] = []

    def new_call(args: Arguments) -> Known:
        plain_numbers(args)
        new.append(Known())
        return new[-1]

    monkeypatch.setattr(entry, "_CALLS", {})
    monkeypatch.setattr(entry, "_QUICK", {})
    monkeypatch.setattr(entry, "_new_call", new_call)
    check = equal_metadata if "one check" in request.param else lambda tensors: None
    monkeypatch.setattr(entry, "metadata_check", check)
    return new


def run(call: Arguments) -> None:
    entry.decode(*call.values())


def test_the_same_call_is_checked_once(made: list[Known]) -> None:
    for _ in range(3):
        run(CALL)
    other = {name: replace(tensor, address=8192) for name, tensor in TENSORS.items()}
    run(replace(CALL, **other))
    assert len(made) == 1


@pytest.mark.parametrize("name", [*TENSORS, "qscale", "kscale", "vscale"])
@pytest.mark.parametrize(
    "change", [{"shape": (4, 7)}, {"dtype": torch.float16}, {"strides": (2,)}, {"device": 1}], ids=str
)
def test_all_metadata_of_all_tensors_is_part_of_a_signature(
    made: list[Known], name: str, change: dict[str, Any]
) -> None:
    run(CALL)
    if name in TENSORS:
        run(replace(CALL, **{name: replace(TENSORS[name], **change)}))
    else:
        at = ("qscale", "kscale", "vscale").index(name)
        run(replace(CALL, scales=(*SCALES[:at], replace(SCALES[at], **change), *SCALES[at + 1 :])))
    assert len(made) == 2


@pytest.mark.parametrize("name", ["q", "kcache", "vcache", "task_map", "output"])
def test_alignment_is_part_of_a_signature(made: list[Known], name: str) -> None:
    run(CALL)
    run(replace(CALL, **{name: replace(TENSORS[name], address=4100)}))
    assert len(made) == 2


@pytest.mark.parametrize("one", ["q", "kcache", "task_map"])
@pytest.mark.parametrize("other", ["vcache", "output"])
def test_misaligned_by_the_same_bytes_is_not_the_same(made: list[Known], one: str, other: str) -> None:
    for name in (one, other):
        run(replace(CALL, **{name: replace(TENSORS[name], address=4104)}))
    assert len(made) == 2


def test_more_calls_than_share_a_key(made: list[Known]) -> None:
    """Layers whose caches differ in their strides alone; all of them stay known."""
    layers = [
        replace(CALL, kcache=replace(TENSORS["kcache"], strides=(n,))) for n in range(2 * entry._MAX_SHARED)
    ]
    for _ in range(3):
        for layer in layers:
            run(layer)
    assert len(made) == len(layers) and all(len(known.values) == 3 for known in made)
    assert all(len(shared) <= entry._MAX_SHARED for shared in entry._QUICK.values())


@pytest.mark.parametrize("name", ["task_map", "output", "sinks", "split_flag"])
def test_what_is_left_out_is_part_of_a_signature(made: list[Known], name: str) -> None:
    run(CALL)
    run(replace(CALL, **{name: None}))
    assert len(made) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("mtp", 3), ("new_kv_included", True), ("splitk", False), ("window", 7), ("logit_cap", 5.0), ("return_lse", True),
     ("batch_invariant", True), ("plan", "a plan"), ("quant", 0)],
)  # fmt: skip
def test_options_that_pick_kernels_are_part_of_a_signature(made: list[Known], name: str, value: Any) -> None:
    run(CALL)
    run(replace(CALL, **{name: value}))
    assert len(made) == 2


def test_values_of_scale_and_cap_are_not(made: list[Known]) -> None:
    for scale in (0.5, 0.25, np.float32(0.25), 2, None):
        run(replace(CALL, softmax_scale=scale, logit_cap=5.0))  # type: ignore[arg-type]
    run(replace(CALL, logit_cap=np.float64(7), softmax_scale=-1.0))
    assert len(made) == 1
    assert made[0].values == [(0.5, 5.0), (0.25, 5.0), (0.25, 5.0), (2.0, 5.0), (None, 5.0), (-1.0, 7.0)]
    assert {type(value) for pair in made[0].values for value in pair} == {float, type(None)}


BAD_NUMBERS = [
    ("logit_cap", [0, 0.0, -3.0, float("inf"), float("nan"), True, "5", torch.tensor(5.0), 1j]),
    ("softmax_scale", [float("inf"), -float("inf"), float("nan"), True, "1", torch.tensor(0.1), [0.1]]),
    ("window", [0, -1, 2**30 + 1, True, 1.0, "1", torch.tensor(1)]),
    ("mtp", [-1, 16, True, 1.0, "1", None, torch.tensor(1)]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_NUMBERS for value in values], ids=repr
)
def test_bad_values_are_refused_whatever_was_seen(made: list[Known], name: str, value: Any) -> None:
    """Also those that equal a good one: True == 1.0 == 1."""
    good = {"logit_cap": 1.0, "softmax_scale": 1.0, "window": 1, "mtp": 1}
    run(replace(CALL, **good))
    with pytest.raises(InvalidArgument, match=f"attention_decode_fp8: argument '{name}': expected"):
        run(replace(CALL, **{**good, name: value}))
    assert len(made) == 1


def test_signatures_are_bounded(made: list[Known], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_MAX_CALLS", 3)
    for window in range(1, 9):
        run(replace(CALL, window=window))
        assert len(entry._CALLS) <= 3 and len(entry._QUICK) <= 3
    assert len(made) == 8
