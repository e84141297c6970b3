"""The Triton kernels, interpreted on the CPU, against the reference, bit for bit, on tiny cases.

Dead cache rows hold NaN, dead page-table entries hold garbage, outputs start as NaN.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from rope_support import assert_same, expected, interpreted, poison, same_bits

import hpc
from hpc.common.triton_helpers import to_e4m3_bytes
from hpc.rope import case_lists, cases, entry, launch, plan, reference
from hpc.testing import poisoned

pytestmark = pytest.mark.interpret

CASES = {case.name: case.params for case in case_lists.interpret_cases()}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_bit_for_bit(name: str) -> None:
    inputs = cases.make_tensors(CASES[name], "cpu", seed=1)
    want = expected(inputs)
    assert_same(interpreted(poison(inputs)), want, name)


@pytest.mark.parametrize(
    ("heads", "unroll"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        (32, 1),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
        (16, 2),
    ],
)
@pytest.mark.parametrize("name", ["fp8 prefill, ragged", "bf16 half rotated, kept K and V"])
def test_any_tile_gives_the_same_bits(name: str, heads: int, unroll: int) -> None:
    inputs = cases.make_tensors(CASES[name], "cpu", seed=2)
    assert_same(
        interpreted(poison(inputs), plan.Plan(heads, 4, unroll)), expected(inputs), f"{heads} x {unroll}"
    )


@pytest.mark.slow
def test_two_tiles_of_queries_where_the_heads_do_not_divide() -> None:
    inputs = cases.make_tensors(CASES["fp8 decode, 5 query heads, HND"], "cpu", seed=3)
    for heads in (1, 2, 4, 8):
        assert_same(interpreted(poison(inputs), plan.Plan(heads, 4, 2)), expected(inputs), f"{heads} heads")


@pytest.mark.parametrize("by_request", [False, True])
def test_queries_alone(by_request: bool) -> None:
    """The quantise-only kernel; rows of no request, a request without tokens, a scale without a place."""
    from hpc.rope import kernels_query

    q = torch.randn(11, 5, 24).mul_(3).bfloat16()
    q[3, 1] = 0
    q[4, 2, 7] = float("nan")
    index = torch.tensor([1, 6, 6, 9], dtype=torch.int32) if by_request else None
    columns = 128 if by_request else 0
    out = poisoned(q.shape, torch.float8_e4m3fn)
    scale = poisoned((3, 5, 128) if by_request else (11, 5), torch.float32)
    given, grid, numbers, constants, _ = entry.query_arguments(q, out, scale, index, columns, 448.0)
    kernels_query._quantize_query_kernel[(grid,)](
        *map(launch.as_bytes, given), *numbers, *constants, False, True, True
    )
    want, want_scale = hpc.quantize_query_fp8(q, index, 5 if by_request else 0)
    assert_same({"out_q": out, "scale": scale}, {"out_q": want, "scale": want_scale})


@triton.jit
def _convert(x_ptr, y_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(y_ptr + i, to_e4m3_bytes(tl.load(x_ptr + i), True))


def test_every_fp32_pattern_class_rounds_to_the_nearest_code() -> None:
    """The integer spelling of e4m3 against PyTorch's, around every boundary, with both signs."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    some = torch.cat(
        (codes, middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9)))
    )
    special = torch.tensor(
        [448.0, 464, 464.1, 480, 1e30, torch.inf, torch.nan, 1e-45, 1e-38, 2**-10, 2**-10 * 1.01]
    )
    x = torch.cat((some, -some, special, -special, torch.randn(256), torch.randn(256) * 0.01))
    x = torch.nn.functional.pad(x, (0, 2048 - len(x)))
    y = torch.zeros(2048, dtype=torch.uint8)
    _convert[(1,)](x, y, 2048)
    assert same_bits(y.view(torch.float8_e4m3fn), reference.to_fp8(x))
