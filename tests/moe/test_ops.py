"""The functions as `torch.ops.hpc.*`: schemas, fakes, tracing. On a CPU the ops run the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hpc
from hpc.moe import cases, ops
from hpc.moe.case_lists import MoeCase
from hpc.moe.cases import MoeInputs

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
NAMES = pytest.mark.parametrize("name", [*ops.PER_TENSOR, *ops.BLOCK, *ops.BF16])


def make(name: str, where: str = "cpu", **fields: Any) -> MoeInputs:
    base: dict[str, Any] = {
        "top_k": 2,
        "block": name in ops.BLOCK,
        "bf16_weights": name in ops.BF16,
        "shared": True,
    }
    return cases.make_inputs(MoeCase(5, 4, 128, 64, **{**base, **fields}), where, 1)


def positional(name: str, i: MoeInputs) -> tuple[Any, ...]:
    """Arguments in the order of the schema: shared_output stands before the ranks."""
    tail = (i.topk_ids, i.topk_scale, i.shared_output, 0, 4)
    if name in ops.BLOCK:
        return (i.x, i.x_scale, i.w13, i.w13_scale, i.w2, i.w2_scale, *tail)
    if name in ops.BF16:
        return (i.x, i.w13, i.w2, *tail)
    return (i.x, i.w13, i.w2, i.w13_scale, i.w2_scale, i.act_scale, *tail)


def public(name: str, i: MoeInputs, **more: Any) -> torch.Tensor:
    args = positional(name, i)
    result: torch.Tensor = getattr(hpc, name)(*args[:-3], 0, 4, shared_output=i.shared_output, **more)
    return result


@HERE
@NAMES
def test_op_equals_function(name: str, where: str) -> None:
    inputs = make(name, where)
    op = getattr(torch.ops.hpc, name)
    expected = public(name, inputs)
    assert torch.equal(op(*positional(name, inputs)), expected)
    out = torch.full_like(expected, torch.nan)
    assert op.out(*positional(name, inputs), output=out) is None
    assert torch.equal(out, expected)


@NAMES
def test_fake_has_shape_dtype_and_device(name: str) -> None:
    inputs = make(name)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in positional(name, inputs)]
        fake = getattr(torch.ops.hpc, name)(*fakes)
    real = public(name, inputs)
    assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (
        real.shape,
        real.dtype,
        real.device,
        real.stride(),
    )


@NAMES
def test_schema_marks_what_is_written(name: str) -> None:
    schemas = {
        overload: str(getattr(getattr(torch.ops.hpc, name), overload)._schema)
        for overload in ("default", "out")
    }
    assert "!" not in schemas["default"]
    assert schemas["out"].count("!") == 1 and "Tensor(a!) output" in schemas["out"]


@NAMES
def test_opcheck(name: str) -> None:
    inputs = make(name)
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.hpc, name).default, positional(name, inputs), test_utils=tests)


@HERE
@pytest.mark.parametrize("name", ["fuse_moe", "fuse_moe_blockwise", "fuse_moe_bf16"])
def test_options_go_through_the_op(name: str, where: str) -> None:
    """Biases, y uncombined, the router's weight on the input: traced, and the fake of that shape."""
    inputs = make(name, where, shared=False, bias="float32")
    options: dict[str, Any] = {
        "gate_up_bias": inputs.w13_bias, "down_bias": inputs.w2_bias, "no_combine": True,
        "apply_router_weight_on_input": True,
    }  # fmt: skip
    expected = public(name, inputs, **options)
    compiled = torch.compile(lambda: public(name, inputs, **options) * 1.0, fullgraph=True, backend="eager")
    assert torch.equal(compiled(), expected)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = getattr(torch.ops.hpc, name)(*positional(name, inputs), **options)
    assert (fake.shape, fake.dtype) == (expected.shape, expected.dtype) and fake.dim() == 3


@HERE
@pytest.mark.parametrize("name", ["fuse_moe", "fuse_moe_blockwise"])
@pytest.mark.parametrize("given", [False, True])
def test_traces_without_a_break(name: str, where: str, given: bool) -> None:
    """The Python functions under torch.compile: one graph, the same result, the caller's output written."""
    inputs = make(name, where)

    def layer(out: torch.Tensor | None) -> torch.Tensor:
        return public(name, inputs, output=out, routed_scaling_factor=2.5) * 1.0

    out = torch.full((5, 128), torch.nan, dtype=torch.bfloat16, device=where) if given else None
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    expected = public(name, inputs, routed_scaling_factor=2.5)
    assert torch.equal(compiled(out), expected)
    assert out is None or torch.equal(out, expected)
