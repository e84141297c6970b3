"""Bad input: an exception before any launch that names function, argument, expected and got.

Checks read metadata only, so CPU tensors show all of them, and nothing here needs a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpc
from hpc.common import arch
from hpc.common.errors import InvalidArgument, InvalidDtype, UnsupportedDevice
from hpc.rope import entry, plan

FP8, BF16, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.int32
B, HQ, HKV, D, P, PAGES, ROWS = 3, 8, 2, 64, 16, 7, 3


def arguments(kind: str, **changes: Any) -> dict[str, Any]:
    """A legal call, changed."""
    stored = FP8 if kind == "fp8" else BF16
    given: dict[str, Any] = {
        "key_cache": torch.zeros((PAGES, P, HKV, D), dtype=stored),
        "value_cache": torch.zeros((PAGES, P, HKV, D), dtype=stored),
        "qkv": torch.zeros((ROWS, (HQ + 2 * HKV) * D), dtype=BF16),
        "cos_sin": torch.zeros((100, D)),
        "num_seqlen_per_req": torch.tensor([20, 1, 0], dtype=I32),
        "q_index": torch.tensor([0, 1, 2, 3], dtype=I32),
        "kvcache_indices": torch.zeros((B, 2), dtype=I32),
        "is_prefill": False,
        "q_norm_weight": torch.ones(D),
        "k_norm_weight": torch.ones(D),
        "qk_norm_policy": 2,
    }
    if kind == "fp8":
        given |= {"k_scale": torch.ones(1), "v_scale": torch.ones(1), "quant_policy": 1, "max_seqlens": 1}
    return given | changes


NAMES = {"bf16": "rope_norm_store_kv", "fp8": "rope_norm_store_kv_fp8"}
both = pytest.mark.parametrize("kind", ["bf16", "fp8"])


def call(kind: str, **changes: Any) -> Any:
    return getattr(hpc, NAMES[kind])(**arguments(kind, **changes))


def refused(
    kind: str, argument: str, error: type[Exception], expected: str, got: str, **changes: Any
) -> None:
    with pytest.raises(error) as caught:
        call(kind, **changes)
    says(caught.value, NAMES[kind], argument, expected, got)


def says(error: BaseException, function: str, argument: str, expected: str, got: str) -> None:
    text = str(error)
    assert text.startswith(f"hpc.{function}: argument '{argument}': expected "), text
    wanted, _, rest = text.partition("; got ")
    assert expected in wanted and got in rest, text
    assert isinstance(error, RuntimeError), "callers of compiled libraries expect RuntimeError"


@both
def test_the_unchanged_call_is_legal(kind: str) -> None:
    result = call(kind)
    out = result if kind == "bf16" else result[0]
    assert out.shape == (ROWS, HQ, D)


WRONG_DTYPES = [
    ("bf16", "key_cache", FP8), ("bf16", "value_cache", torch.float16), ("fp8", "key_cache", BF16),
    ("fp8", "value_cache", torch.uint8), ("fp8", "key_cache", torch.float8_e5m2), ("bf16", "qkv", torch.float32),
    ("fp8", "qkv", FP8), ("bf16", "cos_sin", torch.float16), ("bf16", "num_seqlen_per_req", torch.int64),
    ("bf16", "q_index", torch.int64), ("fp8", "kvcache_indices", torch.int64), ("bf16", "q_norm_weight", BF16),
    ("fp8", "k_norm_weight", torch.float64), ("fp8", "k_scale", BF16), ("fp8", "v_scale", torch.float64),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "dtype"), WRONG_DTYPES)
def test_dtypes(kind: str, name: str, dtype: torch.dtype) -> None:
    wrong = arguments(kind)[name].to(torch.float32).to(dtype)
    refused(kind, name, InvalidDtype, "dtype", str(dtype).removeprefix("torch."), **{name: wrong})


@both
@pytest.mark.parametrize("name", ["key_cache", "value_cache", "qkv", "cos_sin", "q_index", "kvcache_indices"])
@pytest.mark.parametrize("value", [None, 3, [1, 2]])
def test_what_is_no_tensor(kind: str, name: str, value: Any) -> None:
    refused(kind, name, InvalidDtype, "Tensor", type(value).__name__, **{name: value})


SHAPES = [
    ("key_cache", torch.zeros((PAGES, P, HKV * D), dtype=BF16), "4 dimensions", "3"),
    ("value_cache", torch.zeros((PAGES, P, HKV + 1, D), dtype=BF16), f"[{PAGES}, {P}, {HKV}, v_head_dim]", "3"),
    ("value_cache", torch.zeros((PAGES + 1, P, HKV, D), dtype=BF16), f"[{PAGES}, {P}, {HKV}", str(PAGES + 1)),
    ("key_cache", torch.zeros((PAGES, P, HKV, 512), dtype=BF16), "16 to 256", "512"),
    ("key_cache", torch.zeros((PAGES, P, HKV, 100), dtype=BF16), "a multiple of 8", "100"),
    ("key_cache", torch.zeros((PAGES, P, HKV, 2 * D), dtype=BF16)[..., ::2], "stride 1", "2"),
    ("qkv", torch.zeros((ROWS, 12 * D + 8), dtype=BF16), "a width of q heads * 64", str(12 * D + 8)),
    ("qkv", torch.zeros((ROWS, 4 * D), dtype=BF16), "a width of", str(4 * D)),
    ("qkv", torch.zeros((ROWS, 12, D), dtype=BF16), "2 dimensions", "3"),
    ("qkv", torch.zeros((12 * D, ROWS), dtype=BF16).T, "stride 1", "(1,"),
    ("cos_sin", torch.zeros((100, D + 2)), f"2 to {D}", str(D + 2)),
    ("cos_sin", torch.zeros((100, 7)), "an even width", "7"),
    ("cos_sin", torch.zeros((0, D)), "at least one position", "0"),
    ("cos_sin", torch.zeros(D), "2 dimensions", "1"),
    ("num_seqlen_per_req", torch.zeros((B, 1), dtype=I32), "1 dimensions", "2"),
    ("num_seqlen_per_req", torch.zeros(2 * B, dtype=I32)[::2], "contiguous", "(2,)"),
    ("q_index", torch.zeros(B, dtype=I32), f"[{B + 1}]", f"[{B}]"),
    ("kvcache_indices", torch.zeros((B + 1, 2), dtype=I32), f"[{B}, max_pages]", f"[{B + 1}, 2]"),
    ("q_norm_weight", torch.ones(D + 1), f"[{D}]", str(D + 1)),
    ("k_norm_weight", torch.ones(2 * D)[::2], "contiguous", "(2,)"),
    ("out_q", torch.zeros((ROWS, HQ * D), dtype=BF16), f"[{ROWS}, {HQ}, {D}]", str(HQ * D)),
    ("out_k", torch.zeros((ROWS, HQ, D), dtype=BF16), f"[{ROWS}, {HKV}, {D}]", str(HQ)),
    ("out_v", torch.zeros((ROWS + 1, HKV, D), dtype=BF16), f"[{ROWS}, {HKV}, {D}]", str(ROWS + 1)),
    ("out_q", torch.zeros((ROWS, HQ, 2 * D), dtype=BF16)[..., ::2], "stride 1", "2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "expected", "got"), SHAPES, ids=[f"{n}-{e}" for n, _, e, _ in SHAPES]
)
def test_shapes_and_strides(name: str, value: torch.Tensor, expected: str, got: str) -> None:
    refused("bf16", name, InvalidArgument, expected, got, **{name: value})


@both
@pytest.mark.parametrize("policy", [1, 2])
@pytest.mark.parametrize("name", ["q_norm_weight", "k_norm_weight"])
def test_row_17_a_norm_without_its_weight(kind: str, name: str, policy: int) -> None:
    refused(kind, name, InvalidDtype, "a torch.Tensor", "NoneType", **{name: None, "qk_norm_policy": policy})


@both
@pytest.mark.parametrize("policy", [3, -1, None, "2"])
def test_norm_policies(kind: str, policy: Any) -> None:
    refused(kind, "qk_norm_policy", InvalidArgument, "one of 0, 1, 2", repr(policy), qk_norm_policy=policy)


@both
@pytest.mark.parametrize("eps", [-1e-6, float("inf"), float("nan"), None, "0"])
def test_eps(kind: str, eps: Any) -> None:
    refused(kind, "eps", InvalidArgument, "a number that is not negative", repr(eps), eps=eps)


@pytest.mark.parametrize("policy", [0, 3, None, hpc.QuantType(1)])
def test_quant_policies(policy: Any) -> None:
    refused("fp8", "quant_policy", InvalidArgument, "one of 1, 2", "", quant_policy=policy)


@pytest.mark.parametrize("value", [0, -1.0, 449, float("inf"), float("nan"), "448", True])
def test_upper_max(value: Any) -> None:
    refused("fp8", "upper_max", InvalidArgument, "above 0 and up to 448", repr(value), upper_max=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_row_16_max_seqlens(value: Any) -> None:
    """The default of 0 cannot hold a scale; it matters in prefill with dynamic scales only."""
    refused(
        "fp8",
        "max_seqlens",
        InvalidArgument,
        "an integer in [1,",
        str(value),
        is_prefill=True,
        max_seqlens=value,
    )
    assert call("fp8", max_seqlens=0)[1].shape == (ROWS, HQ)
    assert call("fp8", is_prefill=True, max_seqlens=130)[1].shape == (B, HQ, 256)


def test_policy_2_needs_its_multiplier() -> None:
    refused("fp8", "q_scale_inv", InvalidDtype, "a torch.Tensor", "NoneType", quant_policy=2)
    refused(
        "fp8",
        "q_scale_inv",
        InvalidArgument,
        "at least one element",
        "[0]",
        quant_policy=2,
        q_scale_inv=torch.ones(0),
    )
    out, scale, flag = call("fp8", quant_policy=2, q_scale_inv=torch.ones(3), is_prefill=True, max_seqlens=0)
    assert scale is None and out.dtype == FP8 and flag.shape == (B, HKV)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales(name: str) -> None:
    refused("fp8", name, InvalidArgument, "one element", "[2]", **{name: torch.ones(2)})
    for wrong in ("1", True, [1.0]):
        refused("fp8", name, InvalidDtype, "a torch.Tensor", type(wrong).__name__, **{name: wrong})


ELSEWHERE = (
    "key_cache",
    "value_cache",
    "cos_sin",
    "num_seqlen_per_req",
    "q_index",
    "kvcache_indices",
    "q_norm_weight",
)


@both
@pytest.mark.parametrize("name", [*ELSEWHERE, "k_norm_weight", "out_q", "out_k", "out_v"])
def test_fr_54_mixed_devices(kind: str, name: str) -> None:
    stored = FP8 if kind == "fp8" else BF16
    shapes = {"out_q": (ROWS, HQ, D), "out_k": (ROWS, HKV, D), "out_v": (ROWS, HKV, D)}
    tensor = torch.zeros(shapes[name], dtype=stored) if name in shapes else arguments(kind)[name]
    refused(kind, name, UnsupportedDevice, "device cpu", "meta", **{name: tensor.to("meta")})


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "q_scale_inv"])
def test_fr_54_scales_elsewhere(name: str) -> None:
    changes = {"quant_policy": 2, "q_scale_inv": torch.ones(1), name: torch.ones(1, device="meta")}
    refused("fp8", name, UnsupportedDevice, "device cpu", "meta", **changes)


def test_fr_88_gpus_that_no_kernel_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "capability", lambda device: (7, 5))
    monkeypatch.setattr(arch, "device_name", lambda device: "Some GPU")
    with pytest.raises(
        UnsupportedDevice, match=r"rope_norm_store_kv needs an NVIDIA GPU of compute capability 8\.0"
    ):
        arch.require_gpu("rope_norm_store_kv", "cuda:0")


def test_a_plan_that_cannot_run_the_call() -> None:
    from hpc.rope.validate import Arguments

    given = arguments("bf16")
    x = Arguments("rope_norm_store_kv", *list(given.values())[:8])
    with pytest.raises(InvalidArgument) as caught:
        entry._prepare(x, HQ, plan.Plan(3, 4))
    says(caught.value, "rope_norm_store_kv", "plan", "a plan that can run this call", "3 heads")


# --- what is defined rather than refused ---------------------------------------------------------------------------


@both
def test_row_1_empty_calls(kind: str) -> None:
    none = call(
        kind,
        qkv=torch.zeros((0, 12 * D), dtype=BF16),
        is_prefill=True,
        **({"max_seqlens": 0} if kind == "fp8" else {}),
    )
    assert (none if kind == "bf16" else none[0]).shape == (0, HQ, D)
    result = call(kind, num_seqlen_per_req=torch.zeros(0, dtype=I32), q_index=torch.zeros(1, dtype=I32),
                  kvcache_indices=torch.zeros((0, 2), dtype=I32))  # fmt: skip
    assert (result if kind == "bf16" else result[0]).shape == (ROWS, HQ, D)


@both
def test_given_outputs_are_returned(kind: str) -> None:
    out = torch.zeros((ROWS, HQ, D), dtype=FP8 if kind == "fp8" else BF16)
    result = call(kind, out_q=out)
    assert (result if kind == "bf16" else result[0]) is out


def test_sglang_calls_by_keyword() -> None:
    """The call of its backend, with its names."""
    given = arguments("fp8", out_q=torch.zeros((ROWS, HQ, D), dtype=FP8))
    out, scale, flag = hpc.rope_norm_store_kv_fp8(**given)
    assert out is given["out_q"] and out.is_contiguous()
    assert scale.shape == (ROWS, HQ) and flag.dtype == I32 and not flag.any()


# --- queries alone ------------------------------------------------------------------------------------------------


QUERY = [
    ({"q": torch.zeros(3, 8, 64)}, InvalidDtype, "bfloat16", "float32"),
    ({"q": torch.zeros(3, 512).bfloat16()}, InvalidArgument, "3 dimensions", "2"),
    ({"q": torch.zeros(3, 8, 100).bfloat16()}, InvalidArgument, "a multiple of 8", "100"),
    ({"q": torch.zeros(3, 64, 8).bfloat16().transpose(1, 2)}, InvalidArgument, "stride 1", "(512"),
    ({"q_index": torch.zeros(2)}, InvalidDtype, "int32", "float32"),
    ({"q_index": torch.zeros(0, dtype=I32), "max_seqlens": 3}, InvalidArgument, "at least one entry", "0"),
    ({"q_index": torch.zeros(2, dtype=I32).to("meta"), "max_seqlens": 3}, UnsupportedDevice, "device cpu", "meta"),
    ({"max_seqlens": 0, "q_index": torch.zeros(2, dtype=I32)}, InvalidArgument, "an integer in [1,", "0"),
    ({"upper_max": 500}, InvalidArgument, "up to 448", "500"),
    ({"out_q": torch.zeros(3, 8, 64)}, InvalidDtype, "float8_e4m3fn", "float32"),
    ({"out_q": torch.zeros(3, 4, 64).to(FP8)}, InvalidArgument, "[3, 8, 64]", "[3, 4, 64]"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "expected", "got"), QUERY)
def test_quantize_query_refuses(
    changes: dict[str, Any], error: type[Exception], expected: str, got: str
) -> None:
    given: dict[str, Any] = {"q": torch.zeros(3, 8, 64).bfloat16(), **changes}
    with pytest.raises(error) as caught:
        hpc.quantize_query_fp8(**given)
    says(caught.value, "quantize_query_fp8", next(iter(changes)), expected, got)


def test_quantize_query_on_a_cpu() -> None:
    q = torch.randn(5, 2, 64).bfloat16()
    out, scale = hpc.quantize_query_fp8(q, upper_max=240)
    amax = q.float().abs().amax(-1)
    assert torch.equal(scale, amax / torch.full_like(amax, 240)) and out.float().abs().amax() == 240
    index = torch.tensor([1, 4], dtype=I32)
    given = torch.zeros(5, 2, 64).to(FP8)
    out, scale = hpc.quantize_query_fp8(q, index, 2, out_q=given)
    assert out is given and scale.shape == (1, 2, 128)
    assert not out[0].float().any() and not out[4].float().any() and not scale[:, :, 3:].any()
    assert scale[0, 0, 0] == amax[1, 0] / 448


# --- signatures seen before ------------------------------------------------------------------------------------------


def test_a_signature_is_told_from_every_other() -> None:
    """What a launch depends on is part of what a call is remembered by: no two of these share an entry."""
    from hpc.rope.validate import Arguments

    names = {"num_seqlen_per_req": "seq_lens", "kvcache_indices": "block_ids"}

    def signature(**changes: Any) -> tuple[Any, ...]:
        given = {names.get(name, name): value for name, value in arguments("fp8", **changes).items()}
        tensors, quick = entry._quick(Arguments("rope_norm_store_kv_fp8", **given), changes.get("plan"))
        return quick, tuple((t.shape, t.stride(), t.dtype) for t in tensors)

    def moved(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros((*shape[:-1], shape[-1] + 1), dtype=dtype)[..., 1:]

    wide, scale = (HQ + 2 * HKV) * D, torch.ones(1)
    variants: list[dict[str, Any]] = [
        {}, {"is_prefill": True}, {"max_seqlens": 2}, {"upper_max": 240.0}, {"qk_norm_policy": 1}, {"eps": 1e-5},
        {"is_neox_style": False}, {"quant_policy": 2}, {"quant_policy": 2, "q_scale_inv": scale}, {"k_scale": 1.0},
        {"k_scale": None}, {"v_scale": 1.0}, {"v_scale": None}, {"q_norm_weight": None}, {"k_norm_weight": None},
        {"out_q": torch.zeros((ROWS, HQ, D), dtype=FP8)}, {"out_k": torch.zeros((ROWS, HKV, D), dtype=FP8)},
        {"out_v": torch.zeros((ROWS, HKV, D), dtype=FP8)}, {"cos_sin": torch.zeros((100, D), dtype=BF16)},
        {"cos_sin": torch.zeros((100, D // 2))}, {"cos_sin": torch.zeros((200, D))},
        {"qkv": torch.zeros((ROWS + 1, wide), dtype=BF16)}, {"qkv": moved(BF16, ROWS, wide)},
        {"key_cache": torch.zeros((PAGES, HKV, P, D), dtype=FP8).permute(0, 2, 1, 3)},
        {"kvcache_indices": torch.zeros((B, 3), dtype=I32)}, {"kvcache_indices": torch.zeros((B, 4), dtype=I32)[:, :2]},
    ]  # fmt: skip
    seen = [signature(**changes) for changes in variants]
    assert len(set(seen)) == len(variants)
    assert signature() == seen[0]


def test_the_check_in_python_decides_the_same() -> None:
    tensors = [torch.zeros(3, 4), torch.zeros(5, dtype=I32)]
    same = entry._python_check(tensors)
    assert same(torch.ones(3, 4), torch.ones(5, dtype=I32))
    assert not same(torch.ones(4, 3).T, torch.ones(5, dtype=I32)) and not same(
        torch.ones(3, 4), torch.ones(5)
    )
