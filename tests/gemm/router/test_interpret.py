"""The Triton kernels, interpreted on the CPU, against the float64 reference on tiny cases.

Outputs and partials start as NaN, rows of padded operands are NaN apart: what is read without right or left unwritten
shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc.gemm.router import cases, cases_topk
from hpc.gemm.router.plan import BLOCK_K, ceil, power_of_two
from hpc.gemm.router.reference import gemm_reference, topk_reference
from hpc.testing import assert_close

pytestmark = pytest.mark.interpret

IDS = [cases.name_of(params) for params in cases.INTERPRET]
SCALE = cases.DEFAULT_SCALE


def strides(inputs: cases.GemmInputs) -> tuple[int, ...]:
    """Row strides of x, high, low and third."""
    parts = inputs.parts if len(inputs.parts) == 3 else (*inputs.parts, inputs.parts[1])
    return tuple(tensor.stride(0) for tensor in (inputs.x, *parts))


def pointers(inputs: cases.GemmInputs) -> tuple[torch.Tensor, ...]:
    return (inputs.x, *(inputs.parts if len(inputs.parts) == 3 else (*inputs.parts, inputs.parts[1])))


def poisoned(params: cases.RouterCase) -> torch.Tensor:
    dtype = torch.float32 if params.fp32_output else torch.bfloat16
    return torch.full((params.m, params.n), float("nan"), dtype=dtype)


def by_rows(inputs: cases.GemmInputs, rows: int) -> torch.Tensor:
    from hpc.gemm.router import kernels

    p = inputs.params
    out = poisoned(p)
    kernels._router_row_kernel[(ceil(p.n, rows),)](
        *pointers(inputs), out, p.m, p.n, p.k, *strides(inputs), p.n, SCALE, power_of_two(p.m), rows,
        power_of_two(p.k), p.terms, False, not p.fp32_output, False, True,
    )  # fmt: skip
    return out


def by_blocks(inputs: cases.GemmInputs, splits: int, block: tuple[int, int] = (16, 16)) -> torch.Tensor:
    from hpc.gemm.router import kernels

    p = inputs.params
    partial = splits > 1
    out = poisoned(p)
    part = torch.full((splits, p.m, p.n), float("nan")) if partial else out
    steps = ceil(ceil(p.k, BLOCK_K), splits)
    grid = (ceil(p.n, block[1]) * ceil(p.m, block[0]), 1, splits)
    kernels._router_block_kernel[grid](
        *pointers(inputs), part, p.m, p.n, p.k, steps, *strides(inputs), p.n, SCALE, *block, BLOCK_K, p.terms, partial,
        not p.fp32_output and not partial, False, True,
    )  # fmt: skip
    if partial:
        kernels._router_sum_kernel[(ceil(p.m * p.n, 64),)](
            part, out, p.m, p.n, splits, p.n, power_of_two(splits), 64, not p.fp32_output, False, True
        )
    return out


def check(out: torch.Tensor, inputs: cases.GemmInputs, what: str) -> None:
    reference = cases.OPERATOR.reference(inputs)
    case = cases.Case("interpreted", frozenset(), inputs.params)
    assert_close(out, reference, cases.OPERATOR.tolerance(case), what)


@pytest.mark.parametrize("params", cases.INTERPRET, ids=IDS)
def test_blocks(params: cases.RouterCase) -> None:
    check(by_blocks(cases.make_inputs(params, "cpu", 1), 1), cases.make_inputs(params, "cpu", 1), "one split")


@pytest.mark.parametrize("params", [p for p in cases.INTERPRET if p.k > BLOCK_K], ids=cases.name_of)
@pytest.mark.parametrize("splits", [2, 3])
def test_splits(params: cases.RouterCase, splits: int) -> None:
    """Three splits of two blocks: the last one has nothing to add and writes zeros."""
    inputs = cases.make_inputs(params, "cpu", 2)
    check(by_blocks(inputs, splits), inputs, f"{splits} splits")


@pytest.mark.parametrize("params", [p for p in cases.INTERPRET if p.m <= 2], ids=cases.name_of)
@pytest.mark.parametrize("rows", [1, 2])
def test_rows(params: cases.RouterCase, rows: int) -> None:
    inputs = cases.make_inputs(params, "cpu", 3)
    check(by_rows(inputs, rows), inputs, f"{rows} rows")


def test_the_low_part_counts() -> None:
    """The tolerance fails a product by the high part alone, and one with the factor left out."""
    params = cases.RouterCase(5, 33, 130)
    inputs = cases.make_inputs(params, "cpu", 4)
    for parts, scale in (((inputs.parts[0],), 1.0), (inputs.parts, 1.0)):
        wrong = gemm_reference(inputs.x, parts, scale)
        with pytest.raises(AssertionError):
            check(wrong, inputs, "wrong")


def choose(
    logits: torch.Tensor, top_k: int, splits: int = 1, rows: int = 1, **options: Any
) -> tuple[torch.Tensor, ...]:
    """The expert choice on logits that are given as `splits` equal partials."""
    from hpc.gemm.router import topk_kernel

    m, n = logits.shape
    part = (logits / splits).expand(splits, m, n).contiguous()
    weights = torch.full((m, top_k), float("nan"))
    ids = torch.full((m, top_k), -7, dtype=torch.int32)
    zero = torch.full((m,), float("nan"))
    groups, bias = options.get("num_groups", 1), options.get("bias")
    topk_kernel._router_topk_kernel[(ceil(m, rows),)](
        part, part if bias is None else bias, weights, ids, zero, m, n, splits, rows,
        options.get("routed_scaling", 1.0), power_of_two(splits), top_k, power_of_two(top_k), groups,
        options.get("top_groups", 1), power_of_two(groups),
        n // groups, power_of_two(n // groups), options.get("scoring") == "sigmoid", bias is not None,
        options.get("renormalize", False), options.get("num_zero_experts", 0), False,
    )  # fmt: skip
    return (weights, ids, zero) if options.get("num_zero_experts") else (weights, ids)


def agree(logits: torch.Tensor, top_k: int, splits: int = 1, rows: int = 1, **options: Any) -> None:
    got = choose(logits, top_k, splits, rows, **options)
    want = topk_reference(logits.double(), top_k, **options)
    assert got[1].tolist() == want[1].tolist()
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=1e-7)
    if len(got) == 3:
        torch.testing.assert_close(got[2].double(), want[2], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("model", cases_topk.ROUTERS)
@pytest.mark.parametrize(("splits", "rows"), [(1, 1), (4, 3)])
def test_routers_of_models(model: str, splits: int, rows: int) -> None:
    """Selection and weights of DeepSeek-V3, Hy3, Qwen3 and LongCat-Flash; the last program has fewer tokens."""
    experts, _, top_k, options, has_bias = cases_topk.ROUTERS[model]
    generator = torch.Generator().manual_seed(len(model))
    logits = torch.randn(4, experts, generator=generator) * 1.3
    bias = torch.randn(experts, generator=generator) * 0.05 if has_bias else None
    agree(logits, top_k, splits, rows, bias=bias, **options)


def test_groups_that_are_no_powers_of_two() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(5, 60, generator=generator), torch.randn(60, generator=generator) * 0.1
    for given in (None, bias):
        agree(logits, 6, num_groups=5, top_groups=2, scoring="sigmoid", bias=given, renormalize=True)


def test_ties_nan_and_infinities() -> None:
    """Of equals the lower id comes first; NaN counts as the lowest; every id is distinct and in range."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, -0.0, 1.0, 1.0, 0.0], [nan, 2.0, nan, 2.0, -inf], [-inf] * 5, [nan] * 5])
    weights, ids = choose(logits, 4)
    assert ids[0].tolist() == [2, 3, 0, 1]
    assert (
        ids[1].tolist()[:2] == [1, 3] and ids[2].tolist() == [0, 1, 2, 3] and ids[3].tolist() == [0, 1, 2, 3]
    )
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert not weights.isnan().any()


@pytest.mark.parametrize("experts", [60, 256])
def test_choices_full_of_ties(experts: int) -> None:
    """Five values among all logits: nearly every choice is a tie, of groups too."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randint(-2, 3, (6, experts), generator=generator).float() * 0.5
    agree(logits, 12)
    agree(logits, 5, num_groups=4, top_groups=2)
    agree(
        logits, 8, scoring="sigmoid", bias=torch.zeros(experts), num_groups=4, top_groups=3, renormalize=True
    )
