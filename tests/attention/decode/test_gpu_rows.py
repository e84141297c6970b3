"""The SM90 kernel for many query rows on a GPU, against float64 and against the other SM90 kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_support import compare

from hpc.attention.decode import case_lists, cases, choose
from hpc.attention.decode.case_lists import DecodeCase
from hpc.attention.decode.tuning import TUNING
from hpc.testing import guarded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

BOTH = pytest.mark.parametrize("dtype", ["fp8", "bf16"])
EDGES = (0, 1, 2, 3, 5, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 513)
# (query heads, kv heads, new tokens): 17, 24, 32, 48, 64, 80, 128 and 256 rows
SHAPES = [
    (17, 1, 1), (24, 8, 8), (8, 1, 4), (64, 8, 4), (12, 1, 4), (16, 1, 4), (64, 1, 1), (16, 1, 5), (64, 4, 8),
    (16, 1, 16),
]  # fmt: skip


def run(inputs: cases.DecodeInputs, kernel: str = "rows", **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, written into NaN between guards, and lse."""
    key = TUNING.key(inputs)
    plan = choose.rows_plan(key) if kernel == "rows" else choose.tokens_plan(key)
    assert choose.is_legal(plan, key) is None
    output = guarded((*inputs.q.shape[:2], inputs.params.value_dim), torch.bfloat16, "cuda")
    output.tensor.fill_(float("nan"))
    out, lse = cases.attend(inputs, inputs.task_map, output=output.tensor, return_lse=True, plan=plan, **more)
    output.check_guards(kernel)
    return out, lse


def make(params: DecodeCase, seed: int = 1) -> cases.DecodeInputs:
    inputs = cases.make_tensors(params, "cuda", seed)
    return replace(inputs, task_map=cases.make_task_map(inputs)) if params.dynamic else inputs


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64_and_repeats_bit_for_bit(dtype: str, shape: tuple[int, int, int]) -> None:
    """A stage freed or read too early shows as bits that change between runs."""
    q_heads, kv_heads, new = shape
    inputs = make(DecodeCase(EDGES, q_heads, kv_heads, dtype=dtype, num_new_tokens=new))
    out, lse = run(inputs)
    compare(inputs, out, lse, many_rows=True)
    for i in range(50):
        again, _ = run(inputs)
        assert torch.equal(out, again), f"run {i} differs"


@BOTH
@pytest.mark.parametrize("page", [16, 32, 128, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages_and_head_dims(dtype: str, page: int, dim: int) -> None:
    inputs = make(DecodeCase(EDGES, 12, 1, dim, page_size=page, dtype=dtype, num_new_tokens=4))
    out, lse = run(inputs)
    compare(inputs, out, lse, many_rows=True)


@BOTH
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 1000])
def test_options(dtype: str, dynamic: bool, window: int | None) -> None:
    params = DecodeCase(
        (*EDGES, 3000), 64, 8, dtype=dtype, num_new_tokens=4, window=window, logit_cap=5.0, sinks=True, dynamic=dynamic,
        layout="HND", new_kv_included=False,
    )  # fmt: skip
    inputs = make(params)
    out, lse = run(inputs)
    compare(inputs, out, lse, many_rows=True)


@BOTH
@pytest.mark.parametrize("lens", [(131072, 70), (65536,) + (4096,) * 15, (4096,) * 64])
def test_long_requests_merge_in_a_fixed_order(dtype: str, lens: tuple[int, ...]) -> None:
    inputs = make(DecodeCase(lens, 8, 1, dtype=dtype, num_new_tokens=4), seed=3)
    out, lse = run(inputs)
    compare(inputs, out, lse, many_rows=True)
    for _ in range(30):
        assert torch.equal(out, run(inputs)[0])


@BOTH
def test_few_rows_too(dtype: str) -> None:
    """The choice takes it from 17 rows on; a plan may ask for it below."""
    inputs = make(DecodeCase(EDGES, 8, 1, dtype=dtype))
    out, lse = run(inputs)
    compare(inputs, out, lse, many_rows=True)


@BOTH
def test_the_two_kernels_agree(dtype: str) -> None:
    inputs = make(DecodeCase(case_lists.BATCHES["mixed"], 8, 1, dtype=dtype, num_new_tokens=4))
    (a, a_lse), (b, b_lse) = run(inputs), run(inputs, "tokens")
    torch.testing.assert_close(a.double(), b.double(), rtol=2e-2, atol=2e-2 * float(b.abs().max()))
    torch.testing.assert_close(a_lse, b_lse, rtol=1e-4, atol=1e-3)


@BOTH
def test_map_of_another_call_gives_nan_in_bounds(dtype: str) -> None:
    inputs = make(DecodeCase((300, 65, 1000), 8, 1, dtype=dtype, num_new_tokens=4))
    other = make(DecodeCase((300, 65, 1000, 4), 8, 1, dtype=dtype, num_new_tokens=4))
    out, lse = run(replace(inputs, task_map=other.task_map))
    assert bool(out.isnan().all()) and bool(lse.isnan().all())
