"""Bad input is refused before any launch: class, function, argument, expected, got. CPU tensors do for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpc
from hpc.common import arch
from hpc.common.errors import InvalidArgument, InvalidDtype, UnsupportedDevice

FP8 = torch.float8_e4m3fn


def good(
    dtype: torch.dtype = torch.bfloat16, batch: int = 2, q_heads: int = 8, kv_heads: int = 1
) -> dict[str, Any]:
    """Arguments of a call that passes."""
    args: dict[str, Any] = {
        "q": torch.zeros(batch, q_heads, 128).to(dtype),
        "kcache": torch.zeros(3, 64, kv_heads, 128).to(dtype),
        "vcache": torch.zeros(3, 64, kv_heads, 128).to(dtype),
        "block_ids": torch.zeros(batch, 2, dtype=torch.int32),
        "num_seq_kvcache": torch.full((batch,), 5, dtype=torch.int32),
        "new_kv_included": True,
    }
    if dtype == FP8:
        args |= {"qscale": torch.ones(batch, q_heads), "kscale": torch.ones(1), "vscale": torch.ones(1)}
    return args


def change(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda args: {**args, **changes}


BF16_CASES: dict[str, tuple[str, type[Exception], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "fp8 cache in the bf16 op (FR-85)": (
        "kcache",
        InvalidDtype,
        lambda a: {**a, "kcache": a["kcache"].to(FP8)},
    ),
    "fp16 q": ("q", InvalidDtype, lambda a: {**a, "q": a["q"].half()}),
    "e5m2 cache": ("vcache", InvalidDtype, lambda a: {**a, "vcache": a["vcache"].to(torch.float8_e5m2)}),
    "int64 lengths": (
        "num_seq_kvcache",
        InvalidDtype,
        lambda a: {**a, "num_seq_kvcache": a["num_seq_kvcache"].long()},
    ),
    "int64 table": ("block_ids", InvalidDtype, lambda a: {**a, "block_ids": a["block_ids"].long()}),
    "no tensor": ("q", InvalidDtype, change(q=3)),
    "rows against mtp": ("q", InvalidArgument, change(mtp=1)),
    "a table row a token (FR-36)": (
        "block_ids",
        InvalidArgument,
        change(block_ids=torch.zeros(6, 2, dtype=torch.int32)),
    ),
    "caches differ": ("kcache", InvalidArgument, change(kcache=torch.zeros(3, 32, 1, 128).bfloat16())),
    "group not whole": ("q", InvalidArgument, lambda a: {**good(q_heads=8, kv_heads=3)}),
    "group 65": ("q", InvalidArgument, lambda a: {**good(q_heads=65)}),
    "q of two dims": ("q", InvalidArgument, change(q=torch.zeros(2, 128).bfloat16())),
    "inner stride": ("q", InvalidArgument, change(q=torch.zeros(2, 8, 256).bfloat16()[..., ::2])),
    "mtp below 0": ("mtp", InvalidArgument, change(mtp=-1)),
    "mtp above 15": ("mtp", InvalidArgument, change(mtp=16)),
    "window 0": ("window", InvalidArgument, change(window=0)),
    "cap 0": ("logit_cap", InvalidArgument, change(logit_cap=0.0)),
    "sinks of bf16": ("sinks", InvalidDtype, change(sinks=torch.zeros(8).bfloat16())),
    "sinks of another count": ("sinks", InvalidArgument, change(sinks=torch.zeros(4))),
    "output of fp32 (FR-34)": ("output", InvalidDtype, change(output=torch.zeros(2, 8, 128))),
    "output of another shape": ("output", InvalidArgument, change(output=torch.zeros(2, 12, 128).bfloat16())),
    "split_flag shape": (
        "split_flag",
        InvalidArgument,
        change(split_flag=torch.zeros(3, 1, dtype=torch.int32)),
    ),
    "task_map too small (FR-14)": (
        "task_map",
        InvalidArgument,
        change(task_map=torch.zeros(64, dtype=torch.int8)),
    ),
    "task_map of floats": ("task_map", InvalidDtype, change(task_map=torch.zeros(64))),
}


def full_map() -> torch.Tensor:
    return hpc.get_attention_decode_task_workspace(2, 128, 1, device="cpu")


BF16_CASES["task_map without splitk"] = (
    "splitk", InvalidArgument, lambda a: {**a, "task_map": full_map(), "splitk": False},
)  # fmt: skip
BF16_CASES["batch_invariant with a map"] = (
    "batch_invariant", InvalidArgument, lambda a: {**a, "task_map": full_map(), "batch_invariant": True},
)  # fmt: skip


def check_text(error: pytest.ExceptionInfo[Exception], function: str, argument: str) -> None:
    text = str(error.value)
    assert f"hpc.{function}" in text and f"'{argument}'" in text and "expected" in text and "got" in text, (
        text
    )
    assert isinstance(error.value, RuntimeError), "engines that wrap C++ operators catch RuntimeError"


@pytest.mark.parametrize("name", BF16_CASES)
def test_bf16(name: str) -> None:
    argument, kind, edit = BF16_CASES[name]
    with pytest.raises(kind) as error:
        hpc.attention_decode_bf16(**edit(good()))
    check_text(error, "attention_decode_bf16", argument)


FP8_CASES: dict[str, tuple[str, type[Exception], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "bf16 q (FR-85)": ("q", InvalidDtype, lambda a: {**a, "q": a["q"].bfloat16()}),
    "bf16 cache": ("kcache", InvalidDtype, lambda a: {**a, "kcache": a["kcache"].bfloat16()}),
    "kscale a float": ("kscale", InvalidDtype, change(kscale=1.0)),
    "vscale None": ("vscale", InvalidDtype, change(vscale=None)),
    "qscale of prefill's layout": ("qscale", InvalidArgument, change(qscale=torch.ones(2, 8, 128))),
    "kscale of two": ("kscale", InvalidArgument, change(kscale=torch.ones(2))),
    "quant_type 2": ("quant_type", InvalidArgument, change(quant_type=2)),
    "quant_type 3": ("quant_type", InvalidArgument, change(quant_type=hpc.QuantType(3))),
    "per-token kscale too short": (
        "kscale", InvalidArgument, change(quant_type=0, kscale=torch.ones(3, 1, 1, 32), vscale=torch.ones(1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8(name: str) -> None:
    argument, kind, edit = FP8_CASES[name]
    with pytest.raises(kind) as error:
        hpc.attention_decode_fp8(**edit(good(FP8)))
    check_text(error, "attention_decode_fp8", argument)


@pytest.mark.parametrize("dim", [12, 264, 0])
def test_head_dims_are_listed(dim: int) -> None:
    """FR-23: supported and right, or refused with what is supported."""
    args = good() | {name: torch.zeros(3, 64, 1, dim).bfloat16() for name in ("kcache", "vcache")}
    with pytest.raises(InvalidArgument, match="8 to 256"):
        hpc.attention_decode_bf16(**args | {"q": torch.zeros(2, 8, dim).bfloat16()})


@pytest.mark.parametrize("page", [48, 512])
def test_page_sizes_are_listed(page: int) -> None:
    """FR-05."""
    args = good() | {name: torch.zeros(3, page, 1, 128).bfloat16() for name in ("kcache", "vcache")}
    with pytest.raises(InvalidArgument, match="power of two up to 256"):
        hpc.attention_decode_bf16(**args)


def test_needed_and_given_bytes_are_named() -> None:
    """FR-14: a map made for fewer heads."""
    args = good(q_heads=64, kv_heads=64)
    small = full_map()[:1000]
    with pytest.raises(InvalidArgument, match=r"at least \d+ bytes for 64 KV heads; got 1000 bytes"):
        hpc.attention_decode_bf16(**args, task_map=small)


@pytest.mark.parametrize(
    "argument,changes",
    [
        ("mtp", {"mtp": 0}),
        ("mtp", {"mtp": 17}),
        ("num_head_kv", {"num_head_kv": 0}),
        ("num_seq_kvcache", {"num_seq_kvcache": torch.ones(2)}),
        ("num_seq_kvcache", {"num_seq_kvcache": torch.ones(2, 2, dtype=torch.int32)}),
        ("window", {"window": 0}),
        ("task_map", {"task_map": torch.zeros(8, dtype=torch.int8)}),
    ],
)
def test_assign(argument: str, changes: dict[str, Any]) -> None:
    lens = torch.ones(2, dtype=torch.int32)
    args = {
        "num_seq_kvcache": lens,
        "task_map": full_map(),
        "num_head_kv": 1,
        "mtp": 1,
        "new_kv_included": True,
    }
    with pytest.raises((InvalidArgument, InvalidDtype)) as error:
        hpc.assign_attention_decode_task(**args | changes)
    check_text(error, "assign_attention_decode_task", argument)


@pytest.mark.parametrize("args", [(0, 128, 1), (1, 0, 1), (1, 128, 0)])
def test_workspace_sizes(args: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument, match="get_attention_decode_task_workspace"):
        hpc.get_attention_decode_task_workspace(*args, device="cpu")


def test_an_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-88."""
    monkeypatch.setattr(arch, "capability", lambda device: (7, 5))
    monkeypatch.setattr(arch, "device_name", lambda device: "Old GPU")
    with pytest.raises(UnsupportedDevice, match=r"8\.0 or newer; found Old GPU with 7\.5"):
        arch.require_gpu("attention_decode_bf16", 0)


def test_empty_batch_zero_length_and_output() -> None:
    """Section 17, rows 1 and 10."""
    empty = good(batch=0)
    assert hpc.attention_decode_bf16(**empty).shape == (0, 8, 128)
    args = good()
    args["num_seq_kvcache"].zero_()
    args["vcache"].fill_(float("nan"))
    output = torch.full((2, 8, 128), float("nan")).bfloat16()
    assert hpc.attention_decode_bf16(**args, output=output) is output
    assert bool((output == 0).all())
