"""Small helpers of the prologue's tests: calls from a few numbers, the interpreted kernel, bit comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hpc.rope import cases, entry, launch, plan, validate, warm
from hpc.rope.case_lists import RopeCase
from hpc.rope.cases import RopeInputs
from hpc.testing import fill_nan, poisoned

FP8 = torch.float8_e4m3fn


def make(
    lens: Any, new: Any, heads: tuple[int, int] = (8, 2), device: Any = "cpu", seed: int = 1, **rest: Any
) -> RopeInputs:
    return cases.make_tensors(RopeCase(tuple(lens), tuple(new), *heads, **rest), device, seed)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN equals NaN, -0 is not 0."""
    return tensor.contiguous().cpu().flatten().view(torch.uint8)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def outputs(inputs: RopeInputs, result: Any) -> dict[str, torch.Tensor | None]:
    """Everything that a call leaves behind, by name."""
    found = {"out_q": cases.queries(result), "key_cache": inputs.cache.kcache, "value_cache": inputs.cache.vcache,
             "out_k": inputs.out_k, "out_v": inputs.out_v}  # fmt: skip
    if isinstance(result, tuple):
        found |= {"q_scale": result[1], "split_k_flag": result[2]}
    return found


def assert_same(
    have: dict[str, torch.Tensor | None], want: dict[str, torch.Tensor | None], what: str = ""
) -> None:
    """Every output, bit for bit."""
    assert have.keys() == want.keys()
    for name, tensor in have.items():
        other = want[name]
        if same_bits(tensor, other):
            continue
        assert tensor is not None and other is not None, f"{what}: {name} is {tensor}, expected {other}"
        assert tensor.shape == other.shape and tensor.dtype == other.dtype, f"{what}: {name}"
        a, b = tensor.cpu().double().flatten(), other.cpu().double().flatten()
        wrong = (raw(tensor) != raw(other)).view(len(a), -1).any(1)
        if tensor.dtype != FP8:  # a NaN has many patterns, e4m3 but two, of which we write one
            wrong &= ~(a.isnan() & b.isnan())
        if not wrong.any():
            continue
        first = int(wrong.to(torch.uint8).argmax())
        raise AssertionError(
            f"{what}: {name} {list(tensor.shape)} differs in {int(wrong.sum())} values, the first at {first}: "
            f"{a[first]} for {b[first]}"
        )


def poison(inputs: RopeInputs) -> RopeInputs:
    """The same call on copies of what it writes, kept keys and values full of NaN."""
    fresh = cases.copied(inputs)
    for tensor in (fresh.out_k, fresh.out_v):
        if tensor is not None:
            fill_nan(tensor)
    return fresh


def expected(inputs: RopeInputs, **more: Any) -> dict[str, torch.Tensor | None]:
    """What the reference leaves behind, computed on the CPU."""
    there = cases.copied(inputs, "cpu")
    return outputs(there, cases.prologue(there, **more))


def interpreted(inputs: RopeInputs, chosen: plan.Plan | None = None) -> dict[str, torch.Tensor | None]:
    """Everything that the kernel leaves behind, run by Triton's interpreter through the launch code's own arguments."""
    from hpc.rope import kernels

    p = inputs.params
    out_q = poisoned((p.tokens, p.q_heads, p.head_dim), inputs.cache.kcache.dtype)
    x = warm.arguments(inputs)._replace(out_q=out_q)
    heads = validate.call(x)
    widest = plan.power_of_two(max(p.head_dim, p.value_dim))
    chosen = chosen or plan.Plan(heads=max(1, 512 // widest), num_warps=4)
    facts = replace(launch.facts_of(x, heads, chosen, out_q), soft=True)
    sizes = entry.sizes_of(x)
    parts = sizes.grid(facts)
    _, q_scale, flag = entry.allocate(x, heads)
    for tensor in (q_scale, flag):
        if tensor is not None:
            fill_nan(tensor)
    given = map(launch.as_bytes, entry.pointers(x, (out_q, q_scale, flag), facts))
    upper = validate.FP8_MAX if p.upper_max is None else p.upper_max
    numbers = (p.eps, upper, 1.0, 1.0)
    kernels._rope_prologue_kernel[(sum(parts),)](
        *given, *sizes.arguments(parts), *numbers, sizes.stride_table, *facts.strides, *facts.constants(True)
    )
    return outputs(inputs, (out_q, q_scale, flag) if x.fp8 else out_q)


def capture(call: Callable[[], Any], warm: int = 2) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run `call` eagerly as engines do, then record it. (graph, what the recorded call returned)"""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    return graph, result


WHERE = pytest.mark.parametrize(
    "where", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def kernel(inputs: RopeInputs, **more: Any) -> dict[str, torch.Tensor | None]:
    """Everything that the kernel leaves behind: compiled on a GPU, else interpreted."""
    if inputs.qkv.is_cuda:
        return outputs(inputs, cases.prologue(inputs, **more))
    assert not more
    return interpreted(inputs)
