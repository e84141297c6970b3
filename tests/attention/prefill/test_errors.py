"""Bad input: an exception before any launch that names function, argument, expected and got.

Checks read metadata only, so CPU tensors show all of them, and nothing here needs a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hpc
from hpc.attention.prefill.plan import Plan
from hpc.common.errors import InvalidArgument, InvalidDtype, UnsupportedDevice

FP8, BF16, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.int32
B, T, HQ, HKV, D, P, PAGES = 3, 10, 8, 2, 64, 16, 7
NAMES = {
    "bf16": "attention_with_kvcache_prefill_bf16", "fp8": "attention_with_kvcache_prefill_fp8",
    "ragged": "attention_prefill_bf16",
}  # fmt: skip
ALL, PAGED = tuple(NAMES), ("bf16", "fp8")


def zeros(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def arguments(kind: str, **changes: Any) -> dict[str, Any]:
    """A legal call, changed."""
    stored = FP8 if kind == "fp8" else BF16
    given: dict[str, Any] = {
        "q": zeros(T, HQ, D, dtype=stored), "cu_seqlens_q": torch.tensor([0, 4, 4, 9], dtype=I32), "max_seqlens_q": 5,
    }  # fmt: skip
    if kind == "ragged":
        given |= {
            "k": zeros(T, HKV, D),
            "v": zeros(T, HKV, D),
            "seqlens_q": torch.tensor([4, 0, 5], dtype=I32),
        }
        return given | changes
    given |= {
        "kcache": zeros(PAGES, P, HKV, D, dtype=stored),
        "vcache": zeros(PAGES, P, HKV, D, dtype=stored),
    }
    given |= {"block_ids": zeros(B, 2, dtype=I32), "seqlens_kvcache": torch.tensor([20, 1, 5], dtype=I32)}
    if kind == "fp8":
        given |= {"qscale": torch.ones(B, HQ, 128), "kscale": torch.ones(1), "vscale": torch.ones(1)}
    return given | changes


def call(kind: str, **changes: Any) -> Any:
    return getattr(hpc, NAMES[kind])(**arguments(kind, **changes))


def refused(
    kind: str, argument: str, error: type[Exception], expected: str, got: str, **changes: Any
) -> None:
    with pytest.raises(error) as caught:
        call(kind, **changes)
    text = str(caught.value)
    assert text.startswith(f"hpc.{NAMES[kind]}: argument '{argument}': expected "), text
    wanted, _, rest = text.partition("; got ")
    assert expected in wanted and got in rest, text


@pytest.mark.parametrize("kind", ALL)
def test_a_legal_call_runs_the_reference(kind: str) -> None:
    out, lse = call(kind, return_lse=True)
    assert (
        out.shape == (T, HQ, D) and out.dtype == BF16 and lse.shape == (T, HQ) and lse.dtype == torch.float32
    )
    assert (out[9] == 0).all() and (lse[9] == -torch.inf).all(), "the row behind the last request"
    given = zeros(T, HQ, D)
    assert call(kind, output=given) is given


@pytest.mark.parametrize("kind", ALL)
def test_no_request_and_no_token(kind: str) -> None:
    empty = {
        "cu_seqlens_q": zeros(1, dtype=I32),
        "seqlens_q" if kind == "ragged" else "seqlens_kvcache": zeros(0, dtype=I32),
    }
    if kind != "ragged":
        empty["block_ids"] = zeros(0, 2, dtype=I32)
    if kind == "fp8":
        empty["qscale"] = torch.ones(0, HQ, 128)
    assert (call(kind, **empty) == 0).all()
    none = {"q": arguments(kind)["q"][:0], "cu_seqlens_q": zeros(B + 1, dtype=I32)}
    if kind == "ragged":
        none |= {"k": zeros(0, HKV, D), "v": zeros(0, HKV, D)}
    assert call(kind, **none).shape == (0, HQ, D)


BAD: list[tuple[tuple[str, ...], str, type[Exception], str, str, dict[str, Any]]] = [
    (ALL, "q", InvalidDtype, "dtype", "float16", {"q": zeros(T, HQ, D, dtype=torch.float16)}),
    (ALL, "q", InvalidDtype, "a torch.Tensor", "list", {"q": [1.0]}),
    (ALL, "q", InvalidArgument, "3 dimensions", "2", {"q": "flat"}),
    (ALL, "q", InvalidArgument, "stride 1", "(", {"q": "strided"}),
    (ALL, "q", InvalidArgument, "group", "9 query heads", {"q": "nine heads"}),
    (ALL, "cu_seqlens_q", InvalidDtype, "int32", "int64", {"cu_seqlens_q": zeros(B + 1, dtype=torch.int64)}),
    (ALL, "cu_seqlens_q", InvalidArgument, "[4]", "[3]", {"cu_seqlens_q": zeros(B, dtype=I32)}),
    (ALL, "max_seqlens_q", InvalidArgument, "integer >= 0", "-1", {"max_seqlens_q": -1}),
    (ALL, "max_seqlens_q", InvalidArgument, "integer", "2.5", {"max_seqlens_q": 2.5}),
    (ALL, "max_seqlens_q", InvalidArgument, "one element", "[2]", {"max_seqlens_q": zeros(2, dtype=I32)}),
    (ALL, "output", InvalidDtype, "bfloat16", "float32", {"output": torch.zeros(T, HQ, D)}),
    (ALL, "output", InvalidArgument, "[10, 8, 64]", "[9, 8, 64]", {"output": zeros(T - 1, HQ, D)}),
    (ALL, "output", InvalidArgument, "overlap", "(0", {"output": zeros(1, HQ, D).expand(T, HQ, D)}),
    (ALL, "softmax_scale", InvalidArgument, "finite", "inf", {"softmax_scale": float("inf")}),
    (ALL, "softmax_scale", InvalidArgument, "finite", "Tensor", {"softmax_scale": torch.ones(1)}),
    (ALL, "logit_cap", InvalidArgument, "positive", "0", {"logit_cap": 0.0}),
    (ALL, "window", InvalidArgument, "integer in [1,", "0", {"window": 0}),
    (ALL, "sinks", InvalidArgument, "[8]", "[7]", {"sinks": torch.zeros(7)}),
    (ALL, "sinks", InvalidDtype, "float32", "bfloat16", {"sinks": zeros(HQ)}),
    (ALL, "causal", InvalidArgument, "True or False", "tensor", {"causal": torch.ones(1)}),
    (ALL, "plan", InvalidArgument, "Plan", "str", {"plan": "fast"}),
    (PAGED, "block_ids", InvalidDtype, "int32", "int64", {"block_ids": zeros(B, 2, dtype=torch.int64)}),
    (PAGED, "block_ids", InvalidArgument, "[3, max_pages]", "[2, 2]", {"block_ids": zeros(2, 2, dtype=I32)}),
    (PAGED, "block_ids", UnsupportedDevice, "device cpu", "meta", {"block_ids": zeros(B, 2, dtype=I32, device="meta")}),
    (PAGED, "kcache", InvalidArgument, "power of two", "24", {"caches": (24, HKV, D)}),
    (PAGED, "kcache", InvalidArgument, "power of two", "512", {"caches": (512, HKV, D)}),
    (PAGED, "kcache", InvalidArgument, "64]", "72]", {"caches": (P, HKV, 72)}),
    (PAGED, "seqlens_kvcache", InvalidDtype, "int32", "float32", {"seqlens_kvcache": torch.zeros(B)}),
    (("fp8",), "qscale", InvalidArgument, "[3, 8, padded tokens]", "[10, 8]", {"qscale": torch.ones(T, HQ)}),
    (("fp8",), "qscale", InvalidArgument, "at least 5", "4", {"qscale": torch.ones(B, HQ, 4)}),
    (("fp8",), "qscale", InvalidDtype, "float32", "bfloat16", {"qscale": zeros(B, HQ, 8)}),
    (("fp8",), "kscale", InvalidArgument, "one element", "[2]", {"kscale": torch.ones(2)}),
    (("fp8",), "kscale", InvalidDtype, "a torch.Tensor", "float", {"kscale": 0.5}),
    (("fp8",), "vscale", InvalidDtype, "a torch.Tensor", "NoneType", {"vscale": None}),
    (("fp8",), "vscale", InvalidArgument, "[2]", "[1]", {"quant_type": 0, "kscale": torch.ones(PAGES, 1, HKV, P)}),
    (("fp8",), "kscale", InvalidArgument, "rows", "[7, 1, 2, 8]",
     {"quant_type": 0, "kscale": torch.ones(PAGES, 1, HKV, 8), "vscale": torch.ones(HKV)}),
    (("fp8",), "quant_type", InvalidArgument, "one of 0, 1", "2", {"quant_type": 2}),
    (("fp8",), "quant_type", InvalidArgument, "one of 0, 1", "3", {"quant_type": hpc.QuantType(3)}),
    (("ragged",), "k", InvalidArgument, "10 rows", "9 rows", {"k": zeros(9, HKV, D), "v": zeros(9, HKV, D)}),
    (("ragged",), "k", InvalidArgument, "[10, 2, 64]", "[10, 1, 64]", {"k": zeros(T, 1, D)}),
    (("ragged",), "seqlens_q", InvalidDtype, "int32", "int64", {"seqlens_q": zeros(B, dtype=torch.int64)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, n) for n, row in enumerate(BAD) for kind in row[0]], ids=lambda x: str(x)
)
def test_bad_input_is_refused(kind: str, number: int) -> None:
    _, argument, error, expected, got, changes = BAD[number]
    stored = FP8 if kind == "fp8" else BF16
    changes = dict(changes)
    if "caches" in changes:
        page, heads, dim = changes.pop("caches")
        changes |= {name: zeros(PAGES, page, heads, dim, dtype=stored) for name in ("kcache", "vcache")}
        if dim != D:
            changes["vcache"] = zeros(PAGES, page, heads, D, dtype=stored)
    views = {
        "flat": lambda: zeros(T, HQ * D, dtype=stored), "nine heads": lambda: zeros(T, 9, D, dtype=stored),
        "strided": lambda: zeros(T, HQ, 2 * D, dtype=stored)[..., ::2],
    }  # fmt: skip
    if isinstance(changes.get("q"), str):
        changes["q"] = views[changes["q"]]()
    refused(kind, argument, error, expected, got, **changes)


def test_dtypes_are_not_exchanged() -> None:
    """BF16 tensors to the FP8 function and the other way round; the remedy names the other function."""
    for kind, other, stored in (("bf16", "fp8", FP8), ("fp8", "bf16", BF16)):
        with pytest.raises(InvalidDtype, match=f"see hpc.{NAMES[other]}"):
            call(kind, q=zeros(T, HQ, D, dtype=stored))


def test_a_tensor_as_longest_is_not_read() -> None:
    """A device scalar, as some engines pass: its value is not asked for, so a meta tensor does as well."""
    wanted = call("bf16")
    assert torch.equal(call("bf16", max_seqlens_q=torch.empty((), dtype=I32, device="meta")), wanted)
    assert torch.equal(call("bf16", max_seqlens_q=1), wanted), "too small a bound drops nothing"


def test_plans_that_cannot_run_say_why() -> None:
    from hpc.attention.prefill import plan

    key = plan.Key(True, 132, 8, 2, 128, 128, 64, -1)
    good = plan.sm90(key)
    assert plan.is_legal(good, key) is None
    for changes, word in (
        ({"sm90": False}, "GPU"), ({"page_size": 8}, "page size"), ({"page_size": 0}, "page size"),
        ({"head_dim": 96}, "head dims"), ({"v_dim": 64}, "head dims"), ({"tma": False}, "16 bytes"),
        ({"quant_type": 0}, "per tensor"), ({"positive_scale": False}, "positive"),
        ({"head_dim": 64, "v_dim": 64, "quant_type": 1}, "head_dim 128"),
    ):  # fmt: skip
        why = plan.is_legal(good, plan.Key(**{**key.__dict__, **changes}))
        assert why is not None and word in why
    assert "pack" in str(plan.is_legal(Plan("portable", 8, 128, 64, 8, 2), key))
    assert "short pack" in str(plan.is_legal(replace(good, short_pack=8), key))
    assert "sides" in str(plan.is_legal(Plan("portable", 4, 96, 64, 8, 2), key))
