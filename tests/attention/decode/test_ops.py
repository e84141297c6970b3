"""The functions as `torch.ops.hpc.*`: schemas, fakes, tracing. On a CPU the ops run the reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_support import attend, make, raw, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import hpc
from hpc.attention.decode import ops, validate
from hpc.attention.decode.arguments import Arguments
from hpc.attention.decode.cases import DecodeInputs
from hpc.attention.decode.choose import Plan

assert ops  # registers torch.ops.hpc.*

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BOTH = pytest.mark.parametrize("kind", ["bf16", "fp8"])


def inputs(kind: str, where: str, **rest: Any) -> DecodeInputs:
    return make((70, 1, 0, 200), (8, 2), device=where, dtype=kind, head_dim=64, page_size=16, **rest)


def positional(x: DecodeInputs) -> tuple[torch.Tensor, ...]:
    """The arguments without a default."""
    tensors = (x.q, x.cache.kcache, x.cache.vcache, x.cache.block_ids, x.seq_lens)
    if x.params.dtype == "bf16":
        return tensors
    assert x.qscale is not None and x.kscale is not None and x.vscale is not None
    return (*tensors, x.qscale, x.kscale, x.vscale)


def packet(kind: str) -> Any:
    return getattr(torch.ops.hpc, f"attention_decode_{kind}")


def transposed(q: torch.Tensor) -> torch.Tensor:
    """The same queries as a view with heads outside rows."""
    rows, heads, dim = q.shape
    view = torch.empty((heads, rows, dim), dtype=q.dtype, device=q.device).transpose(0, 1)
    view.copy_(q)
    return view


def opcheck(op: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
    """`torch.library.opcheck`, whose own test of what is written cannot compare float8: here it is done by bytes."""
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if args[0].dtype == torch.bfloat16:
        tests = ("test_schema", *tests)
    torch.library.opcheck(op, args, kwargs, test_utils=tests)
    given = [*args, *(v for name, v in kwargs.items() if isinstance(v, torch.Tensor) and name != "output")]
    before = [raw(tensor).clone() for tensor in given]
    result = op(*args, **kwargs)
    assert all(torch.equal(raw(tensor), old) for tensor, old in zip(given, before, strict=True))
    inside = {tensor.untyped_storage().data_ptr() for tensor in given}
    for out in result if isinstance(result, tuple) else (result,):
        assert out.numel() == 0 or out.untyped_storage().data_ptr() not in inside, (
            "no result aliases an argument"
        )


# --- fr_71: schema, fake and real agree ------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {
        "window": 50,
        "logit_cap": 3.0,
        "return_lse": True,
        "new_kv_included": True,
        "softmax_scale": 0.2,
    },
}


@HERE
@BOTH
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("view", ["packed", "transposed q"])
@pytest.mark.parametrize("scheduled", [True, False])
def test_fr_71_opcheck(kind: str, where: str, variant: str, view: str, scheduled: bool) -> None:
    options = VARIANTS[variant]
    x = inputs(
        kind, where, window=options.get("window"), sinks=variant == "all", new_kv_included=variant == "all"
    )
    q, *others = positional(x)
    args = (transposed(q) if view != "packed" else q, *others)
    kwargs = {**options, "task_map": x.task_map if scheduled else None, "sinks": x.sinks}
    opcheck(packet(kind).default, args, kwargs)
    output = torch.empty((q.shape[0], q.shape[1], 64), dtype=torch.bfloat16, device=q.device)
    opcheck(packet(kind).out, args, {**kwargs, "output": output})


@HERE
def test_fr_71_opcheck_of_assign(where: str) -> None:
    x = inputs("bf16", where)
    assert x.task_map is not None
    op = torch.ops.hpc.assign_attention_decode_task.default
    torch.library.opcheck(op, (x.seq_lens, 2, 1, True, 512, x.task_map))
    torch.library.opcheck(op, (x.seq_lens, 2, 4, False, 64, x.task_map, 100))


@HERE
@BOTH
def test_row_32_fakes_agree_with_the_functions(kind: str, where: str) -> None:
    """Shape, dtype, strides and device, for queries whose own strides must not be inherited."""
    x = inputs(kind, where)
    q, *others = positional(x)
    real = packet(kind)(transposed(q), *others, return_lse=True, new_kv_included=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = packet(kind)(
            *map(mode.from_tensor, (transposed(q), *others)), return_lse=True, new_kv_included=True
        )
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
    assert real[0].dtype == torch.bfloat16


# --- fr_78: fakes with required arguments only, and with every optional one None ----------------------------------


def optional_nones(op: Any) -> dict[str, None]:
    return {a.name: None for a in op._schema.arguments if isinstance(a.type, torch.OptionalType)}


@BOTH
@pytest.mark.parametrize("options", ["required only", "all None"])
def test_fr_78_fake_tensors(kind: str, options: str) -> None:
    x = inputs(kind, "cpu")
    for op in (packet(kind).default, packet(kind).out):
        kwargs: dict[str, Any] = optional_nones(op) if options == "all None" else {}
        with FakeTensorMode() as mode:
            args = tuple(map(mode.from_tensor, positional(x)))
            if op is packet(kind).out:
                kwargs["output"] = mode.from_tensor(torch.empty(4, 8, 64, dtype=torch.bfloat16))
            result = op(*args, **kwargs)
        out, lse = (kwargs["output"], result) if op is packet(kind).out else result
        assert out.shape == (4, 8, 64) and lse.numel() == 0


def test_fr_78_fake_assign() -> None:
    x = inputs("bf16", "cpu")
    assert x.task_map is not None
    op = torch.ops.hpc.assign_attention_decode_task.default
    with FakeTensorMode() as mode:
        lens, task_map = mode.from_tensor(x.seq_lens), mode.from_tensor(x.task_map)
        assert op(lens, 2, 1, True, 512, task_map) is None
        assert op(lens, 2, 1, True, 512, task_map, **optional_nones(op)) is None


@BOTH
def test_op_arguments_are_those_of_the_function_in_their_order(kind: str) -> None:
    function = inspect.signature(getattr(hpc, f"attention_decode_{kind}"))
    names = [n for n in function.parameters if n != "output"]
    assert [a.name for a in packet(kind).default._schema.arguments] == names
    assert [a.name for a in packet(kind).out._schema.arguments] == [*names, "output"]
    for argument in packet(kind).default._schema.arguments:
        default = function.parameters[argument.name].default
        if default is not inspect.Parameter.empty:
            assert argument.default_value == getattr(default, "value", default), argument.name


@BOTH
def test_only_the_output_and_the_task_map_are_marked_as_written(kind: str) -> None:
    def written(op: Any) -> set[str]:
        return {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    assert written(packet(kind).default) == set() and written(packet(kind).out) == {"output"}
    assert written(torch.ops.hpc.assign_attention_decode_task.default) == {"task_map"}


# --- tracing ------------------------------------------------------------------------------------------------


def step(x: DecodeInputs, given: bool) -> Callable[..., torch.Tensor]:
    """One step of a model: the schedule, two layers that share it, and work before and after."""
    p = x.params

    def run(
        q: torch.Tensor, lens: torch.Tensor, task_map: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        hpc.assign_attention_decode_task(lens, task_map, p.kv_heads, p.num_new_tokens, p.new_kv_included)
        total = torch.zeros((), device=q.device)
        for _ in range(2):
            tensors = (q, x.cache.kcache, x.cache.vcache, x.cache.block_ids, lens)
            options: dict[str, Any] = {
                "mtp": p.num_new_tokens - 1, "new_kv_included": p.new_kv_included, "task_map": task_map,
                "output": output if given else None,
            }  # fmt: skip
            if p.dtype == "fp8":
                out = hpc.attention_decode_fp8(*tensors, x.qscale, x.kscale, x.vscale, **options)
            else:
                out = hpc.attention_decode_bf16(*tensors, **options)
            total = total + out.float().sum()
        return out * 2 + 0 * total

    return run


@HERE
@BOTH
@pytest.mark.parametrize("given", [True, False], ids=["output given", "new output"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_fr_71_compiles_without_a_graph_break(kind: str, where: str, given: bool, dynamic: bool) -> None:
    torch._dynamo.reset()
    x = inputs(kind, where, num_new_tokens=2)
    assert x.task_map is not None
    eager, output = step(x, given), torch.empty(8, 8, 64, dtype=torch.bfloat16, device=where)
    compiled = torch.compile(step(x, given), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lens in (x.seq_lens, torch.clamp(x.seq_lens - 3, min=0)):
        expected = eager(x.q, lens, x.task_map, output.clone())
        x.task_map.view(torch.int32)[16:].fill_(-7)
        written = output.clone().fill_(float("nan"))
        got = compiled(x.q, lens, x.task_map, written)
        assert same_bits(got, expected)
        assert not given or same_bits(written * 2, expected)


@HERE
@BOTH
def test_lse_under_compile(kind: str, where: str) -> None:
    torch._dynamo.reset()
    x = inputs(kind, where)

    def run(task_map: torch.Tensor) -> Any:
        return attend(x, return_lse=True)

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(x.task_map)
    for a, b in zip(got, run(x.task_map), strict=True):
        assert same_bits(a, b)


# --- what tracing must not lose ---------------------------------------------------------------------------------


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    traced: Callable[..., Any] = torch.compile(call, fullgraph=True, backend="aot_eager")
    return traced


PLANS = [
    Plan("portable", 2, 16, 4, 1, 2),
    Plan("sm90", 1, 8, 8, 1, 4, 168, 7, 8),
]


@pytest.mark.parametrize("plan", [None, *PLANS])
def test_a_plan_survives_the_schema(plan: Plan | None) -> None:
    words = ops.pack_plan(plan)
    assert ops.unpack_plan(words) == plan and (words is None or all(type(word) is int for word in words))


@BOTH
@pytest.mark.parametrize("plan", PLANS)
def test_the_plan_is_not_lost_under_compile(kind: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    checked = validate.call

    def watched(args: Arguments) -> Any:
        seen.append(args.plan)
        return checked(args)

    monkeypatch.setattr(validate, "call", watched)
    x = inputs(kind, "cpu")
    compiled(lambda task_map: attend(x, plan=plan))(x.task_map)
    assert seen == [plan]


@HERE
@BOTH
def test_split_flag_is_checked_under_compile(kind: str, where: str) -> None:
    x = inputs(kind, where)
    good, bad = (torch.zeros((4, 2), dtype=dtype, device=where) for dtype in (torch.int32, torch.int64))
    run = compiled(lambda flag: attend(x, split_flag=flag))
    assert same_bits(run(good), attend(x))
    with pytest.raises(TypeError, match="split_flag"):
        run(bad)


# --- inference only ---------------------------------------------------------------------------------------------


@HERE
@pytest.mark.parametrize("given", [True, False], ids=["output given", "new output"])
def test_no_gradient_flows(where: str, given: bool) -> None:
    """Eager, op and compiled alike: results need none, an output that does may be written, nothing warns."""
    x = inputs("bf16", where)
    q, *others = positional(x)
    q = q.clone().requires_grad_()
    expected, _ = packet("bf16")(*positional(x))

    def buffer() -> torch.Tensor | None:
        return torch.empty_like(expected) if given else None

    def eager(q: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = hpc.attention_decode_bf16(q, *others, output=output)
        return result

    def op(q: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        if output is None:
            result: torch.Tensor = packet("bf16")(q, *others)[0]
            return result
        packet("bf16").out(q, *others, output=output)
        return output

    for call in (eager, op, compiled(eager)):
        result = call(q, buffer())
        assert not result.requires_grad and result.grad_fn is None and same_bits(result, expected)
    if given:
        leaf = torch.empty_like(expected).requires_grad_()
        assert same_bits(eager(q, leaf).detach(), expected)
