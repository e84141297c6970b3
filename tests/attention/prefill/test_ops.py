"""The functions as `torch.ops.hpc.*`: schemas, fakes, tracing. On a CPU the ops run the reference."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from prefill_support import make
from torch._subclasses.fake_tensor import FakeTensorMode

import hpc
from hpc.attention.prefill import cases, ops
from hpc.attention.prefill.case_lists import prompts
from hpc.attention.prefill.plan import Plan

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
NAMES = {
    "bf16": "attention_with_kvcache_prefill_bf16", "fp8": "attention_with_kvcache_prefill_fp8",
    "ragged": "attention_prefill_bf16",
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", NAMES)


def inputs(kind: str, where: str, **rest: Any) -> cases.PrefillInputs:
    lens = prompts(20, 3) if kind == "ragged" else ((20, 70), (0, 5), (3, 3))
    rest = {"page_size": 0 if kind == "ragged" else 16, "dtype": "fp8" if kind == "fp8" else "bf16", **rest}
    return make(lens, (8, 2), device=where, head_dim=64, **rest)


def positional(x: cases.PrefillInputs) -> tuple[Any, ...]:
    """The arguments without a default."""
    if x.params.page_size == 0:
        return (x.q, x.k, x.v, x.seq_lens, x.cu_seqlens, 20)
    scales = (x.qscale, x.kscale, x.vscale) if x.params.dtype == "fp8" else ()
    return (x.q, x.k, x.v, *scales, x.cu_seqlens, x.block_ids, x.seq_lens, 20)


def packet(kind: str) -> Any:
    return getattr(torch.ops.hpc, NAMES[kind])


@HERE
@KINDS
@pytest.mark.parametrize(
    "options", [{}, {"window": 9, "logit_cap": 3.0, "return_lse": True, "softmax_scale": 0.2}]
)
def test_opcheck(kind: str, where: str, options: dict[str, Any]) -> None:
    x = inputs(kind, where)
    # torch's own test of what is written cannot compare float8
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if kind != "fp8":
        tests = ("test_schema", *tests)
    torch.library.opcheck(packet(kind).default, positional(x), options, test_utils=tests)
    output = torch.empty(x.q.shape, dtype=torch.bfloat16, device=x.q.device)
    torch.library.opcheck(packet(kind).out, positional(x), {**options, "output": output}, test_utils=tests)


@HERE
@KINDS
def test_fakes_agree_with_the_functions(kind: str, where: str) -> None:
    x = inputs(kind, where)
    real = packet(kind)(*positional(x), return_lse=True)
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in positional(x)]
        fake = packet(kind)(*args, return_lse=True)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


@KINDS
def test_op_arguments_are_those_of_the_function_in_their_order(kind: str) -> None:
    function = inspect.signature(getattr(hpc, NAMES[kind]))
    names = [n for n in function.parameters if n != "output"]
    assert [a.name for a in packet(kind).default._schema.arguments] == names
    assert [a.name for a in packet(kind).out._schema.arguments] == [*names, "output"]
    for argument in packet(kind).default._schema.arguments:
        default = function.parameters[argument.name].default
        if default is not inspect.Parameter.empty:
            assert argument.default_value == getattr(default, "value", default), argument.name


@HERE
@KINDS
@pytest.mark.parametrize("given", [True, False])
def test_compiled_without_graph_breaks(kind: str, where: str, given: bool) -> None:
    x = inputs(kind, where)
    function = getattr(hpc, NAMES[kind])
    output = torch.empty(x.q.shape, dtype=torch.bfloat16, device=where)

    def step(*args: Any) -> torch.Tensor:
        out, lse = function(*args, output=output if given else None, return_lse=True)
        return out.float().sum() + lse.exp().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*positional(x)), step(*positional(x)))


def test_plans_travel_as_ints() -> None:
    plan = Plan("sm90", 8, 128, 128, 4, 2, 8, 3)
    assert ops.unpack_plan(ops.pack_plan(plan)) == plan
    assert ops.pack_plan(None) is None and ops.unpack_plan(None) is None
