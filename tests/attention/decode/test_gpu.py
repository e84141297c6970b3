"""The full grid on a GPU, through the public functions, against float64."""

from __future__ import annotations

import pytest
import torch

from hpc.attention.decode import case_lists, cases
from hpc.testing import assert_close, guarded

pytestmark = pytest.mark.gpu

GRID = {case.name: case.params for case in case_lists.gpu_cases()}


@pytest.mark.parametrize("name", GRID)
def test_equals_float64(name: str) -> None:
    """Output and lse, into a NaN-poisoned output between guards, over a cache whose dead rows are NaN."""
    params = GRID[name]
    inputs = cases.make_tensors(params, "cuda", seed=1)
    task_map = cases.make_task_map(inputs) if params.dynamic else None
    rows = len(params.lens) * params.num_new_tokens
    output = guarded((rows, params.q_heads, params.value_dim), torch.bfloat16, "cuda")
    output.tensor.fill_(float("nan"))
    result, lse = cases.attend(inputs, task_map, output=output.tensor, return_lse=True)
    assert result is output.tensor
    output.check_guards(name)
    expected, expected_lse = cases.reference(inputs)
    assert_close(result, expected, cases.tolerance(params), name)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=cases.lse_tolerance(params))


MIXED = tuple((i * 37) % 301 for i in range(200))  # many requests a bin, most with a partial last tile


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize(
    "heads,new_tokens", [((64, 8), 1), ((8, 1), 1), ((128, 8), 1), ((64, 8), 4), ((64, 1), 1)]
)
def test_short_requests_are_right_and_repeat_bit_for_bit(
    dtype: str, heads: tuple[int, int], new_tokens: int
) -> None:
    """A missed barrier shows as NaN from dead rows or as bits that change between runs."""
    params = case_lists.DecodeCase(MIXED, *heads, dtype=dtype, num_new_tokens=new_tokens)
    inputs = cases.make_tensors(params, "cuda", seed=2)
    task_map = cases.make_task_map(inputs)
    first = cases.attend(inputs, task_map)
    assert_close(first, cases.reference(inputs)[0], cases.tolerance(params), "first run")
    for run in range(50):
        assert torch.equal(first, cases.attend(inputs, task_map)), f"run {run} differs"


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("lens", [(131072, 70), (65536,) + (4096,) * 15, (16384,) + (64,) * 15])
def test_long_requests_merge_in_a_fixed_order(dtype: str, lens: tuple[int, ...]) -> None:
    """Up to one chunk a bin, merged in two levels by whichever CTA comes last."""
    params = case_lists.DecodeCase(lens, 8, 1, dtype=dtype)
    inputs = cases.make_tensors(params, "cuda", seed=3)
    task_map = cases.make_task_map(inputs)
    first = cases.attend(inputs, task_map)
    assert_close(first, cases.reference(inputs)[0], cases.tolerance(params), str(lens[:2]))
    for _ in range(30):
        assert torch.equal(first, cases.attend(inputs, task_map))


def test_map_of_another_call_gives_nan_in_bounds() -> None:
    params = case_lists.DecodeCase((300, 65, 1000), 8, 1)
    inputs = cases.make_tensors(params, "cuda", seed=5)
    other = cases.make_tensors(case_lists.DecodeCase((300, 65, 1000, 4), 8, 1), "cuda", seed=5)
    assert bool(cases.attend(inputs, cases.make_task_map(other)).isnan().all())
    never = torch.zeros_like(cases.make_task_map(inputs))
    assert bool(cases.attend(inputs, never).isnan().all())
