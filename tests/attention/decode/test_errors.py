"""Bad input: an exception before any launch that names function, argument, expected and got.

Checks read metadata only, so CPU tensors show all of them, and nothing here needs a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpc
from hpc.attention.decode import choose, plan, validate
from hpc.attention.decode.arguments import Arguments
from hpc.common import arch
from hpc.common.errors import InvalidArgument, InvalidDtype, UnsupportedDevice

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
I32 = torch.int32
B, HQ, HKV, D, P, PAGES = 3, 8, 2, 64, 16, 7


def zeros(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def arguments(kind: str, **changes: Any) -> dict[str, Any]:
    """A legal call of `attention_decode_<kind>`, changed."""
    stored = FP8 if kind == "fp8" else BF16
    given: dict[str, Any] = {
        "q": zeros(B, HQ, D, dtype=stored),
        "kcache": zeros(PAGES, P, HKV, D, dtype=stored),
        "vcache": zeros(PAGES, P, HKV, D, dtype=stored),
        "block_ids": zeros(B, 2, dtype=I32),
        "num_seq_kvcache": torch.tensor([20, 1, 0], dtype=I32),
        "new_kv_included": True,
    }
    if kind == "fp8":
        given |= {"qscale": torch.ones(B, HQ), "kscale": torch.ones(1), "vscale": torch.ones(1)}
    return given | changes


def call(kind: str, **changes: Any) -> Any:
    return getattr(hpc, f"attention_decode_{kind}")(**arguments(kind, **changes))


def refused(
    kind: str, argument: str, error: type[Exception], expected: str, got: str, **changes: Any
) -> None:
    with pytest.raises(error) as caught:
        call(kind, **changes)
    says(caught.value, f"attention_decode_{kind}", argument, expected, got)


def says(error: BaseException, function: str, argument: str, expected: str, got: str) -> None:
    text = str(error)
    assert text.startswith(f"hpc.{function}: argument '{argument}': expected "), text
    wanted, _, rest = text.partition("; got ")
    assert expected in wanted and got in rest, text
    assert isinstance(error, RuntimeError), "callers of compiled libraries expect RuntimeError"


both = pytest.mark.parametrize("kind", ["bf16", "fp8"])


@both
def test_the_unchanged_call_is_legal(kind: str) -> None:
    out = call(kind)
    assert out.shape == (B, HQ, D) and out.dtype == BF16 and (out == 0).all()


# --- dtypes ----------------------------------------------------------------------------------------

WRONG_DTYPES = [
    *[
        ("bf16", name, dtype)
        for name in ("q", "kcache", "vcache")
        for dtype in (torch.float16, FP8, torch.float32)
    ],
    *[
        ("fp8", name, dtype)
        for name in ("q", "kcache", "vcache")
        for dtype in (BF16, torch.float8_e5m2, torch.uint8)
    ],
    *[(kind, name, torch.int64) for kind in ("bf16", "fp8") for name in ("block_ids", "num_seq_kvcache")],
    *[("fp8", name, torch.float16) for name in ("qscale", "kscale", "vscale")],
]


@pytest.mark.parametrize(("kind", "name", "dtype"), WRONG_DTYPES)
def test_fr_85_dtypes_are_never_reinterpreted(kind: str, name: str, dtype: torch.dtype) -> None:
    wrong = torch.zeros(arguments(kind)[name].shape, dtype=dtype)
    right = str(arguments(kind)[name].dtype).removeprefix("torch.")
    refused(kind, name, InvalidDtype, right, str(dtype).removeprefix("torch."), **{name: wrong})
    with pytest.raises(TypeError):
        call(kind, **{name: wrong})


@both
@pytest.mark.parametrize("name", ["q", "kcache", "vcache", "block_ids", "num_seq_kvcache"])
@pytest.mark.parametrize("value", [None, 1.5, [1, 2]])
def test_no_tensor(kind: str, name: str, value: Any) -> None:
    refused(kind, name, InvalidDtype, "torch.Tensor", type(value).__name__, **{name: value})


@pytest.mark.parametrize("name", ["qscale", "kscale", "vscale"])
@pytest.mark.parametrize("value", [None, 1, 1.0])
def test_scales_are_tensors(name: str, value: Any) -> None:
    refused("fp8", name, InvalidDtype, "torch.Tensor", type(value).__name__, **{name: value})


@both
@pytest.mark.parametrize(
    ("name", "dtype", "right"),
    [
        ("output", torch.float16, "bfloat16"), ("sinks", BF16, "float32"), ("split_flag", torch.int64, "int32"),
        ("task_map", torch.uint8, "int8"),
    ],
)  # fmt: skip
def test_dtypes_of_optional_tensors(kind: str, name: str, dtype: torch.dtype, right: str) -> None:
    shapes = {"output": (B, HQ, D), "sinks": (HQ,), "split_flag": (B, HKV), "task_map": (10**6,)}
    wrong = torch.zeros(shapes[name], dtype=dtype)
    refused(kind, name, InvalidDtype, right, str(dtype).removeprefix("torch."), **{name: wrong})


# --- shapes and strides ------------------------------------------------------------------------------


@both
def test_shapes(kind: str) -> None:
    t = FP8 if kind == "fp8" else BF16
    for name, wrong, expected, got in [
        ("q", zeros(B, HQ * D, dtype=t), "3 dimensions", "2"),
        ("q", zeros(B + 1, HQ, D, dtype=t), "3 rows", "4 rows"),
        ("kcache", zeros(PAGES, P, HKV, 128, dtype=t), f"[{PAGES}, {P}, {HKV}, {D}]", "128"),
        ("kcache", zeros(PAGES - 1, P, HKV, D, dtype=t), f"[{PAGES}, {P}, {HKV}, {D}]", f"[{PAGES - 1},"),
        ("kcache", zeros(PAGES, P * HKV, D, dtype=t), "4 dimensions", "3"),
        ("vcache", zeros(PAGES, P * HKV, D, dtype=t), "4 dimensions", "3"),
        ("block_ids", zeros(B + 1, 2, dtype=I32), "[3, max_pages]", "[4, 2]"),
        ("block_ids", zeros(6, dtype=I32), "[3, max_pages]", "[6]"),
        ("num_seq_kvcache", zeros(B, 1, dtype=I32), "1 dimensions", "2"),
        ("output", zeros(B, HQ, D + 8), f"[{B}, {HQ}, {D}]", f"[{B}, {HQ}, {D + 8}]"),
        ("output", zeros(B, HQ * D), f"[{B}, {HQ}, {D}]", f"[{B}, {HQ * D}]"),
        ("sinks", torch.zeros(HQ + 1), f"[{HQ}]", f"[{HQ + 1}]"),
        ("split_flag", zeros(B, HQ, dtype=I32), f"[{B}, {HKV}]", f"[{B}, {HQ}]"),
    ]:
        refused(kind, name, InvalidArgument, expected, got, **{name: wrong})


@both
def test_strides(kind: str) -> None:
    t = FP8 if kind == "fp8" else BF16
    for name, wrong in [
        ("q", zeros(B, D, HQ, dtype=t).transpose(1, 2)),
        ("kcache", zeros(PAGES, P, D, HKV, dtype=t).transpose(2, 3)),
        ("vcache", zeros(PAGES, P, HKV, 2 * D, dtype=t)[..., ::2]),
        ("block_ids", zeros(2, B, dtype=I32).T),
        ("output", zeros(B, D, HQ).transpose(1, 2)),
    ]:
        refused(
            kind,
            name,
            InvalidArgument,
            "stride 1 in the last dimension",
            str(wrong.stride()),
            **{name: wrong},
        )
    for name, wrong in [
        ("num_seq_kvcache", zeros(2 * B, dtype=I32)[::2]),
        ("sinks", torch.zeros(2 * HQ)[::2]),
    ]:
        refused(kind, name, InvalidArgument, "a contiguous tensor", "strides (2,)", **{name: wrong})


@both
def test_free_strides_are_free(kind: str) -> None:
    """Rows of a fused projection, HND caches, slices of a joint buffer, rows of a wider page table, output slices."""
    t = FP8 if kind == "fp8" else BF16
    both_caches = zeros(PAGES, 2, HKV, P, D, dtype=t).transpose(2, 3)
    buffer = torch.full((B + 2, HQ + 1, D), 7.0).to(BF16)
    out = call(
        kind, q=zeros(B, HQ + 2 * HKV, D, dtype=t)[:, :HQ], kcache=both_caches[:, 0], vcache=both_caches[:, 1],
        block_ids=zeros(B, 9, dtype=I32)[:, 2:5], output=buffer[1 : B + 1, :HQ],
    )  # fmt: skip
    assert out.data_ptr() == buffer[1:].data_ptr() and (out == 0).all()
    buffer[1 : B + 1, :HQ] = 7
    assert (buffer == 7).all()


@both
def test_strides_of_dimensions_of_one_do_not_matter(kind: str) -> None:
    """A cache of one KV head as a view with any stride for it is still one that TMA reads; a repeated page is not."""
    t = FP8 if kind == "fp8" else BF16
    packed = zeros(PAGES, P, 1, D, dtype=t)
    odd = packed.as_strided((PAGES, P, 1, D), (P * D, D, 1, 1))
    repeated = zeros(1, P, 1, D, dtype=t).expand(PAGES, P, 1, D)
    found = []
    for cache in (packed, odd, repeated):
        given = arguments(kind, kcache=cache, vcache=cache)
        scales = tuple(given.get(name) for name in ("qscale", "kscale", "vscale"))
        args = Arguments(
            "f", given["q"], cache, cache, given["block_ids"], given["num_seq_kvcache"], scales,
            1 if kind == "fp8" else -1,
        )  # fmt: skip
        key, layout = validate.call(args)
        found.append((key.tma, layout.k))
    assert found[0] == found[1] == (True, (P * D, D, D))
    assert found[2] == (False, (0, D, D))


def test_fp8_queries_are_read_in_pairs() -> None:
    refused("fp8", "q", InvalidArgument, "even strides", "(513, 64, 1)", q=torch.zeros(B * 513).to(FP8).as_strided(
        (B, HQ, D), (513, D, 1)))  # fmt: skip


@both
@pytest.mark.parametrize("q_heads", [7, 130, 0])
def test_fr_02_groups(kind: str, q_heads: int) -> None:
    t = FP8 if kind == "fp8" else BF16
    changes: dict[str, Any] = {"q": zeros(B, q_heads, D, dtype=t)}
    if kind == "fp8":
        changes["qscale"] = torch.ones(B, q_heads)
    got = f"{q_heads} query heads over {HKV} KV heads"
    refused(kind, "q", InvalidArgument, "a group of 1 to 64", got, **changes)


@both
def test_no_kv_head(kind: str) -> None:
    t = FP8 if kind == "fp8" else BF16
    empty = zeros(PAGES, P, 0, D, dtype=t)
    refused(kind, "q", InvalidArgument, "a group of 1 to 64", "over 0 KV heads", kcache=empty, vcache=empty)


@both
@pytest.mark.parametrize("page", [3, 48, 96, 512])
def test_fr_05_page_sizes(kind: str, page: int) -> None:
    cache = zeros(PAGES, page, HKV, D, dtype=FP8 if kind == "fp8" else BF16)
    refused(
        kind, "kcache", InvalidArgument, "a power of two up to 256", str(page), kcache=cache, vcache=cache
    )


@both
@pytest.mark.parametrize("dim", [4, 12, 60, 100, 264, 576])
def test_fr_23_and_row_2_head_dims(kind: str, dim: int) -> None:
    """Nothing unsupported reaches a launch."""
    t = FP8 if kind == "fp8" else BF16
    cache = zeros(PAGES, P, HKV, dim, dtype=t)
    expected = "a head dim of 8 to 256, a multiple of 8"
    refused(
        kind,
        "q",
        InvalidArgument,
        expected,
        str(dim),
        q=zeros(B, HQ, dim, dtype=t),
        kcache=cache,
        vcache=cache,
    )
    refused(kind, "vcache", InvalidArgument, expected, str(dim), vcache=cache)


@both
def test_a_cache_without_pages(kind: str) -> None:
    t = FP8 if kind == "fp8" else BF16
    cache = zeros(0, P, HKV, D, dtype=t)
    refused(kind, "kcache", InvalidArgument, "at least one page", "0", kcache=cache, vcache=cache)


# --- values --------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("mtp", [-1, 16, 1.0, None, True, "1"])
def test_fr_07_mtp(kind: str, mtp: Any) -> None:
    refused(kind, "mtp", InvalidArgument, "[0, 15]", str(mtp), mtp=mtp)


@both
@pytest.mark.parametrize("mtp", [1, 2, 15])
def test_mtp_that_does_not_fit_the_queries(kind: str, mtp: int) -> None:
    refused(kind, "q", InvalidArgument, f"{B * (mtp + 1)} rows", "3 rows", mtp=mtp)


@both
def test_options(kind: str) -> None:
    for window in (0, -1, 1.5):
        refused(kind, "window", InvalidArgument, "an integer in [1,", str(window), window=window)
    for cap in (0, -3.0, "5", float("nan"), float("inf"), True):
        refused(kind, "logit_cap", InvalidArgument, "a positive number", str(cap), logit_cap=cap)
    for scale in ("1", True, float("nan"), float("inf"), [0.1]):
        refused(kind, "softmax_scale", InvalidArgument, "a finite number", str(scale), softmax_scale=scale)


@both
@pytest.mark.parametrize("name", ["softmax_scale", "logit_cap"])
def test_numbers_are_not_read_from_tensors(kind: str, name: str) -> None:
    """A meta tensor has no value: reading it would raise something else. On a GPU it would wait."""
    refused(kind, name, InvalidArgument, "number", "a Tensor", **{name: torch.ones((), device="meta")})


@both
@pytest.mark.parametrize("name", ["new_kv_included", "splitk", "return_lse", "batch_invariant"])
def test_flags_are_not_read_from_tensors(kind: str, name: str) -> None:
    flag = torch.ones((), dtype=torch.bool, device="meta")
    refused(kind, name, InvalidArgument, "True or False", "a tensor", **{name: flag})


@both
def test_an_output_whose_rows_overlap(kind: str) -> None:
    row = zeros(1, 1, D)
    wrong = (row.expand(B, HQ, D), zeros(B * HQ * D).as_strided((B, HQ, D), (D, D, 1)))
    for output in wrong:
        refused(
            kind, "output", InvalidArgument, "rows that do not overlap", str(output.stride()), output=output
        )


@pytest.mark.parametrize(
    "quant", [2, 3, -1, None, True, 1.0, torch.ones((), device="meta"), hpc.QuantType(2), hpc.QuantType(3)]
)
def test_quant_types_without_a_kernel(quant: Any) -> None:
    refused("fp8", "quant_type", InvalidArgument, "one of 0, 1", "", quant_type=quant)


@pytest.mark.parametrize("quant", [0, 1, hpc.QuantType(1)])
def test_quant_type_takes_the_enum_or_its_value(quant: Any) -> None:
    per_token = {"kscale": torch.ones(PAGES, 1, HKV, P), "vscale": torch.ones(HKV)} if quant == 0 else {}
    assert call("fp8", quant_type=quant, **per_token).shape == (B, HQ, D)


def test_fp8_scales() -> None:
    refused("fp8", "qscale", InvalidArgument, f"[{B}, {HQ}]", f"[{HQ}, {B}]", qscale=torch.ones(HQ, B))
    wrong = torch.ones(HQ, B).T
    refused("fp8", "qscale", InvalidArgument, "stride 1", str(wrong.stride()), qscale=wrong)
    for name in ("kscale", "vscale"):
        refused("fp8", name, InvalidArgument, "one element", "[2]", **{name: torch.ones(2)})
    kscale, vscale = torch.ones(PAGES, 1, HKV, P), torch.ones(HKV)
    refused("fp8", "vscale", InvalidArgument, f"[{HKV}]", "[1]", quant_type=0, kscale=kscale)
    for wrong_shape in ((PAGES - 1, 1, HKV, P), (PAGES, 1, HKV + 1, P), (PAGES, 1, HKV, P - 1)):
        refused("fp8", "kscale", InvalidArgument, f"[{PAGES}, rows, {HKV}, scales]", str(list(wrong_shape)),
                quant_type=0, kscale=torch.ones(wrong_shape), vscale=vscale)  # fmt: skip
    refused("fp8", "kscale", InvalidArgument, "4 dimensions", "1", quant_type=0, vscale=vscale)


# --- devices ---------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "name", ["kcache", "vcache", "block_ids", "num_seq_kvcache", "output", "sinks", "split_flag"]
)
def test_fr_54_mixed_devices(kind: str, name: str) -> None:
    optional = {"output": zeros(B, HQ, D), "sinks": torch.zeros(HQ), "split_flag": zeros(B, HKV, dtype=I32)}
    elsewhere = {**arguments(kind), **optional}[name].to("meta")
    refused(kind, name, UnsupportedDevice, "device cpu", "meta", **{name: elsewhere})


@pytest.mark.parametrize("name", ["qscale", "kscale", "vscale"])
def test_fr_54_scales_elsewhere(name: str) -> None:
    refused("fp8", name, UnsupportedDevice, "device cpu", "meta", **{name: arguments("fp8")[name].to("meta")})


@pytest.mark.parametrize("found", [(7, 5), (7, 0)])
@pytest.mark.parametrize("device", [0, "cuda:0", torch.device("cuda", 1)])
def test_fr_88_gpus_that_no_kernel_runs_on(
    monkeypatch: pytest.MonkeyPatch, device: Any, found: tuple[int, int]
) -> None:
    monkeypatch.setattr(arch, "capability", lambda device: found)
    monkeypatch.setattr(arch, "device_name", lambda device: "Some GPU")
    with pytest.raises(UnsupportedDevice) as caught:
        arch.require_gpu("attention_decode_fp8", device)
    text = str(caught.value)
    assert "attention_decode_fp8 needs an NVIDIA GPU of compute capability 8.0" in text
    assert f"found Some GPU with {found[0]}.{found[1]}" in text


@pytest.mark.parametrize("found", [(8, 9), (10, 0), (12, 0)])
def test_fr_88_other_gpus_get_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, int]
) -> None:
    monkeypatch.setattr(arch, "capability", lambda device: found)
    arch.require_gpu("attention_decode_fp8", "cuda:0")
    key = choose.Key(
        sm90=arch.is_hopper("cuda:0"), sms=100, batch=1, q_heads=8, kv_heads=1, head_dim=128, v_dim=128, page_size=64,
        max_pages=4, num_new_tokens=1, quant_type=1,
    )  # fmt: skip
    assert choose.choose(key).backend == "portable"


def test_row_31_facts_of_a_device_are_kept_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        def __init__(self, index: int) -> None:
            self.multi_processor_count, self.major, self.minor, self.name = (
                (132, 78)[index],
                9 - index,
                index,
                "x",
            )

    monkeypatch.setattr(arch, "_properties", Properties)
    assert [arch.sm_count(f"cuda:{i}") for i in (0, 1)] == [132, 78]
    assert [arch.is_hopper(i) for i in (0, 1)] == [True, False]


# --- task maps -----------------------------------------------------------------------------------------------


def workspace(kv_heads: int = HKV) -> torch.Tensor:
    return hpc.get_attention_decode_task_workspace(B, 4096, kv_heads, device="cpu")


@both
def test_row_13_splitk_false_with_a_task_map(kind: str) -> None:
    refused(
        kind, "splitk", InvalidArgument, "True with a task map", "False", splitk=False, task_map=workspace()
    )


@both
def test_batch_invariance_with_a_task_map(kind: str) -> None:
    changes = {"batch_invariant": True, "task_map": workspace()}
    refused(kind, "batch_invariant", InvalidArgument, "False with a task map", "True", **changes)


@both
def test_fr_14_a_workspace_that_is_too_small(kind: str) -> None:
    given = workspace()[:-16]
    needed = 4 * plan.workspace_words(132, HKV)
    refused(
        kind, "task_map", InvalidArgument, f"at least {needed} bytes", f"{needed - 16} bytes", task_map=given
    )
    fewer = torch.zeros(needed // 4 - 4, dtype=I32)
    with pytest.raises(InvalidArgument) as caught:
        hpc.assign_attention_decode_task(zeros(B, dtype=I32), fewer, HKV, 1, True)
    says(
        caught.value,
        "assign_attention_decode_task",
        "task_map",
        f"at least {needed} bytes",
        f"{needed - 16} bytes",
    )


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("batch", [1, 64, 512])
def test_fr_14_a_workspace_made_for_one_request_serves_any_batch(kv_heads: int, batch: int) -> None:
    """Its size depends on neither batch nor length, so there is nothing to overflow."""
    made = hpc.get_attention_decode_task_workspace(1, 1, kv_heads, device="cpu")
    lens = torch.full((batch,), 131072, dtype=I32)
    hpc.assign_attention_decode_task(lens, made, kv_heads, 1, True)
    assert (
        made.numel() == hpc.get_attention_decode_task_workspace(512, 131072, kv_heads, device="cpu").numel()
    )


@both
def test_task_maps_of_the_wrong_kind(kind: str) -> None:
    sliced = torch.zeros(2 * 10**6, dtype=torch.int8)[::2]
    refused(kind, "task_map", InvalidArgument, "a contiguous tensor", "(2,)", task_map=sliced)
    refused(kind, "task_map", UnsupportedDevice, "device cpu", "meta", task_map=workspace().to("meta"))
    refused(kind, "task_map", InvalidDtype, "Tensor", "int", task_map=3)
    whole = torch.zeros(workspace().numel() + 16, dtype=torch.int8)
    refused(kind, "task_map", InvalidArgument, "16-byte aligned", "4 bytes past", task_map=whole[4:])
    refused(kind, "task_map", InvalidArgument, "1 dimensions", "2", task_map=workspace().view(2, -1))


# --- assign, workspace, scratch size, print -------------------------------------------------------------------


def assign(**changes: Any) -> Any:
    given = {"num_seq_kvcache": zeros(B, dtype=I32), "task_map": workspace(), "num_head_kv": HKV, "mtp": 1,
             "new_kv_included": True}  # fmt: skip
    return hpc.assign_attention_decode_task(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "expected", "got"),
    [
        ({"mtp": 0}, InvalidArgument, "[1, 16]", "0"),
        ({"mtp": 17}, InvalidArgument, "[1, 16]", "17"),
        ({"mtp": None}, InvalidArgument, "[1, 16]", "None"),
        ({"num_head_kv": 0}, InvalidArgument, "[1, 65535]", "0"),
        ({"min_process_len": -1}, InvalidArgument, ">= 0", "-1"),
        ({"window": 0}, InvalidArgument, "[1,", "0"),
        ({"num_seq_kvcache": torch.zeros(B, dtype=torch.int64)}, InvalidDtype, "int32", "int64"),
        ({"num_seq_kvcache": [1, 2]}, InvalidDtype, "torch.Tensor", "list"),
        ({"num_seq_kvcache": torch.zeros(B, 1, dtype=I32)}, InvalidArgument, "1 dimensions", "2"),
        ({"num_seq_kvcache": torch.zeros(6, dtype=I32)[::2]}, InvalidArgument, "contiguous", "(2,)"),
        ({"task_map": None}, InvalidDtype, "torch.Tensor", "NoneType"),
        ({"task_map": torch.zeros(10**6)}, InvalidDtype, "int8 or int32", "float32"),
        ({"new_kv_included": torch.ones((), device="meta")}, InvalidArgument, "True or False", "a tensor"),
        ({"num_head_kv": 65536}, InvalidArgument, "[1, 65535]", "65536"),
        (
            {"num_seq_kvcache": torch.zeros(B, dtype=I32, device="meta")},
            UnsupportedDevice,
            "CUDA or CPU",
            "meta",
        ),
    ],
)
def test_row_14_assign_refuses(
    changes: dict[str, Any], error: type[Exception], expected: str, got: str
) -> None:
    argument = next(iter(changes))
    with pytest.raises(error) as caught:
        assign(**changes)
    says(caught.value, "assign_attention_decode_task", argument, expected, got)


def test_a_workspace_made_for_more_kv_heads_has_too_few_bins() -> None:
    needed, given = (4 * plan.workspace_words(132, heads) for heads in (1, 8))
    with pytest.raises(InvalidArgument) as caught:
        assign(num_head_kv=1, task_map=workspace(8))
    expected = f"at least {needed} bytes for 1 KV heads"
    says(caught.value, "assign_attention_decode_task", "task_map", expected, f"{given} bytes")


@both
def test_fr_14_decode_with_a_workspace_made_for_more_kv_heads(kind: str) -> None:
    needed, given = (4 * plan.workspace_words(132, heads) for heads in (HKV, 8))
    expected, got = f"at least {needed} bytes for {HKV} KV heads", f"{given} bytes"
    refused(kind, "task_map", InvalidArgument, expected, got, task_map=workspace(8))
    assert call(kind, task_map=workspace(1)).shape == (B, HQ, D), (
        "fewer heads need more bins: theirs is larger"
    )


@pytest.mark.parametrize("batch", [0, 1, 5, 4000])
def test_row_14_any_batch_fits_and_short_requests_keep_their_neighbours(batch: int) -> None:
    """A padded length of 1 under 4 query tokens, more requests than the workspace was made for, any floor."""
    for floor in (0, 64, 100_000):
        task_map = assign(num_seq_kvcache=torch.ones(batch, dtype=I32), mtp=4, min_process_len=floor)
        words = task_map.view(I32).tolist()
        bins = plan.num_bins(132, HKV, 0)
        entries = [words[16 + 8 * g : 24 + 8 * g] for g in range(bins)]
        walked = [b for entry in entries for b in range(entry[1], entry[3])]
        assert walked == list(range(batch))


@pytest.mark.parametrize("name", ["max_num_batch", "max_seqlen", "num_head_kv"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_workspace_sizes(name: str, value: Any) -> None:
    given = {"max_num_batch": 1, "max_seqlen": 64, "num_head_kv": 1, name: value}
    with pytest.raises(InvalidArgument) as caught:
        hpc.get_attention_decode_task_workspace(**given, device="cpu")
    says(caught.value, "get_attention_decode_task_workspace", name, "an integer ", str(value))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 0)])
def test_a_gpu_that_is_not_there(device: Any) -> None:
    for name, call in (
        ("task_workspace", lambda: hpc.get_attention_decode_task_workspace(1, 64, 1, device=device)),
        ("scratch_size", lambda: hpc.get_attention_decode_scratch_size(**SCRATCH, device=device)),
    ):
        with pytest.raises(UnsupportedDevice) as caught:
            call()
        got = "torch sees no GPU"
        says(caught.value, f"get_attention_decode_{name}", "device", "a device of this machine", got)


@both
def test_tensors_that_are_on_no_device(kind: str) -> None:
    elsewhere = {k: v.to("meta") for k, v in arguments(kind).items() if isinstance(v, torch.Tensor)}
    refused(kind, "q", UnsupportedDevice, "a CUDA or CPU tensor", "meta", **elsewhere)


def test_scales_per_token_at_an_odd_address() -> None:
    kscale = torch.zeros(PAGES * HKV * 4 * P + 1, dtype=torch.uint8)[1:].view(PAGES, 1, HKV, 4 * P)
    changes = {"quant_type": 0, "kscale": kscale, "vscale": torch.ones(HKV)}
    refused("fp8", "kscale", InvalidArgument, "4-byte aligned", "address", **changes)


SCRATCH = {"num_batch": 1, "num_head_q": 8, "num_head_kv": 1}


@pytest.mark.parametrize(
    ("changes", "blamed", "expected"),
    [
        *[({name: 0}, name, ">= 1") for name in (*SCRATCH, "head_dim", "v_head_dim", "page_size")],
        *[({name: True}, name, ">= 1") for name in ("num_batch", "head_dim")],
        ({"head_dim": 12}, "head_dim", "a multiple of 8"),
        ({"head_dim": 576}, "head_dim", "8 to 256"),
        ({"v_head_dim": 100}, "v_head_dim", "a multiple of 8"),
        ({"page_size": 48}, "page_size", "a power of two"),
        ({"page_size": 512}, "page_size", "up to 256"),
        ({"num_head_q": 7, "num_head_kv": 2}, "num_head_q", "a group of 1 to 64"),
        ({"num_head_q": 65}, "num_head_q", "a group of 1 to 64"),
        ({"mtp": 16}, "mtp", "[0, 15]"),
        ({"quant_type": 3}, "quant_type", "one of 0, 1"),
        ({"batch_invariant": True}, "batch_invariant", "False with a task map"),
    ],
)
def test_scratch_of_a_call_that_cannot_be(changes: dict[str, Any], blamed: str, expected: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        hpc.get_attention_decode_scratch_size(**{**SCRATCH, **changes}, device="cpu")
    says(caught.value, "get_attention_decode_scratch_size", blamed, expected, "")


def test_scratch_sizes_of_calls_that_can_be() -> None:
    size = hpc.get_attention_decode_scratch_size
    dynamic = [size(batch, 8, 1, device="cpu") for batch in (1, 64, 4000)]
    assert dynamic[0] > 0 and len(set(dynamic)) == 1, "whatever the batch"
    assert size(**SCRATCH, v_head_dim=64, device="cpu") < dynamic[0]
    assert size(**SCRATCH, batch_invariant=True, dynamic=False, device="cpu") > 0
    assert size(**SCRATCH, quant_type=None, device="cpu") > 0


@pytest.mark.parametrize(
    ("task_map", "error", "expected", "got"),
    [
        (None, InvalidDtype, "torch.Tensor", "NoneType"),
        (torch.zeros(4), InvalidDtype, "int8 or int32", "float32"),
        (torch.zeros(128, dtype=torch.int8)[::2], InvalidArgument, "contiguous", "(2,)"),
        (torch.zeros(4, 64, dtype=torch.int8), InvalidArgument, "1 dimensions", "2"),
        (torch.zeros(65, dtype=torch.int8), InvalidArgument, "whole, aligned int32 words", "65 bytes"),
        (torch.zeros(129, dtype=torch.int8)[1:], InvalidArgument, "whole, aligned int32 words", "128 bytes"),
        (torch.zeros(60, dtype=torch.int8), InvalidArgument, "at least 64 bytes", "60 bytes"),
        (torch.zeros(0, dtype=I32), InvalidArgument, "at least 64 bytes", "0 bytes"),
        (torch.full((64,), 1, dtype=I32), InvalidArgument, "132 multiprocessors", "a header of"),
    ],
    ids=str,
)
def test_print_needs_a_map(task_map: Any, error: type[Exception], expected: str, got: str) -> None:
    with pytest.raises(error) as caught:
        hpc.print_attention_decode_task(task_map)
    says(caught.value, "print_attention_decode_task", "task_map", expected, got)


def test_print_of_a_map_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    filled = assign()
    needed = 4 * plan.workspace_words(132, HKV)
    with pytest.raises(InvalidArgument) as caught:
        hpc.print_attention_decode_task(filled[:4096])
    says(caught.value, "print_attention_decode_task", "task_map", f"at least {needed} bytes", "4096 bytes")
    assert capsys.readouterr().out == ""
    hpc.print_attention_decode_task(filled)
    hpc.print_attention_decode_task(filled.view(I32))
    hpc.print_attention_decode_task(workspace())
    out = capsys.readouterr().out
    assert out.count("bins:") == 4 and "not assigned yet" in out


# --- what is defined rather than refused ---------------------------------------------------------------------------


@both
def test_row_1_an_empty_batch_gives_an_empty_result(kind: str) -> None:
    t = FP8 if kind == "fp8" else BF16
    changes: dict[str, Any] = {"q": zeros(0, HQ, D, dtype=t), "block_ids": zeros(0, 2, dtype=I32),
                               "num_seq_kvcache": zeros(0, dtype=I32)}  # fmt: skip
    if kind == "fp8":
        changes["qscale"] = torch.ones(0, HQ)
    for mtp in (0, 3):
        out, lse = call(kind, mtp=mtp, return_lse=True, **changes)
        assert out.shape == (0, HQ, D) and out.dtype == BF16 and lse.shape == (0, HQ)
    given = zeros(0, HQ, D)
    assert call(kind, output=given, task_map=workspace(), **changes) is given
    empty = zeros(0, P, HKV, D, dtype=t)
    assert call(kind, kcache=empty, vcache=empty, **changes).numel() == 0


@both
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_length_of_zero_gives_zeros(kind: str, scheduled: bool) -> None:
    """Values of 1, so that only the row without a key is zero; an output full of NaN shows that it is written."""
    t = FP8 if kind == "fp8" else BF16
    output = torch.full((B, HQ, D), float("nan"), dtype=BF16)
    lens = arguments(kind)["num_seq_kvcache"]
    task_map = hpc.assign_attention_decode_task(lens, workspace(), HKV, 1, True) if scheduled else None
    out, lse = call(kind, vcache=torch.ones(PAGES, P, HKV, D).to(t), output=output, task_map=task_map,
                    return_lse=True)  # fmt: skip
    assert out is output and (out[:2] == 1).all() and (out[2] == 0).all()
    assert (lse[2] == -torch.inf).all() and lse[:2].isfinite().all()


@both
def test_row_11_split_flag_is_neither_read_nor_written(kind: str) -> None:
    flag = torch.full((B, HKV), 5, dtype=I32)
    before = call(kind)
    assert torch.equal(call(kind, split_flag=flag), before) and (flag == 5).all()


@both
def test_results_are_new_tensors_unless_output_is_given(kind: str) -> None:
    output = zeros(B, HQ, D)
    result = call(kind, output=output)
    assert result is output
    out, lse = call(kind, output=output, return_lse=True)
    assert out is output and lse.shape == (B, HQ) and lse.dtype == torch.float32


@both
def test_a_plan_that_is_none(kind: str) -> None:
    for wrong in ("sm90", 3, ["unhashable"], {}):
        refused(kind, "plan", InvalidArgument, "a Plan", type(wrong).__name__, plan=wrong)


def test_a_plan_that_cannot_run_the_call() -> None:
    from hpc.attention.decode import entry

    key = choose.Key(
        sm90=False, sms=132, batch=1, q_heads=8, kv_heads=1, head_dim=128, v_dim=128, page_size=64, max_pages=4,
        num_new_tokens=1, quant_type=1,
    )  # fmt: skip
    wrong = choose.Plan("sm90", 1, 8, 4, 1, 2)
    with pytest.raises(InvalidArgument) as caught:
        entry._legal("attention_decode_fp8", wrong, key)
    says(caught.value, "attention_decode_fp8", "plan", "a plan that can run this call", "9.0")
