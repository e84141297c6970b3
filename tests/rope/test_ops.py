"""The functions as `torch.ops.hpc.*`: schemas, fakes, tracing. On a CPU the ops run the reference."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from rope_support import assert_same, make, outputs, poison, raw, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import hpc
from hpc.rope import cases, ops
from hpc.rope.cases import RopeInputs

assert ops  # registers torch.ops.hpc.*

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BOTH = pytest.mark.parametrize("kind", ["bf16", "fp8"])
PREFILL = pytest.mark.parametrize("is_prefill", [True, False])


def inputs(kind: str, where: str, **rest: Any) -> RopeInputs:
    return make((20, 7, 0), (3, 7, 1), (4, 2), where, dtype=kind, head_dim=32, page_size=16, **rest)


def positional(x: RopeInputs) -> tuple[Any, ...]:
    """The arguments without a default."""
    tensors = (x.cache.kcache, x.cache.vcache, x.qkv, x.cos_sin, x.seq_lens, x.q_index, x.cache.block_ids)
    if x.params.dtype == "bf16":
        return (*tensors, x.params.is_prefill)
    return (*tensors, x.params.is_prefill, x.k_scale, x.v_scale, x.params.quant_policy)


def options(x: RopeInputs) -> dict[str, Any]:
    found: dict[str, Any] = {
        "q_norm_weight": x.q_weight, "k_norm_weight": x.k_weight, "qk_norm_policy": x.params.norm_policy,
        "out_k": x.out_k, "out_v": x.out_v, "eps": x.params.eps,
    }  # fmt: skip
    if x.params.dtype == "fp8":
        found |= {"max_seqlens": max(x.params.new), "q_scale_inv": x.q_scale_inv}
    return found


def packet(kind: str) -> Any:
    return torch.ops.hpc.rope_norm_store_kv if kind == "bf16" else torch.ops.hpc.rope_norm_store_kv_fp8


def out_q(x: RopeInputs) -> torch.Tensor:
    p = x.params
    return torch.zeros((p.tokens, p.q_heads, p.head_dim), dtype=x.cache.kcache.dtype, device=x.qkv.device)


@HERE
@BOTH
@PREFILL
@pytest.mark.parametrize("keep", [False, True])
def test_fr_71_opcheck(kind: str, where: str, is_prefill: bool, keep: bool) -> None:
    """`torch.library.opcheck`, whose own test of what is written cannot compare float8: there it is done by bytes."""
    x = inputs(kind, where, is_prefill=is_prefill, keep_k=keep, keep_v=keep)
    tests: tuple[str, ...] = ("test_autograd_registration", "test_faketensor")
    if kind == "bf16":
        tests = ("test_schema", *tests, "test_aot_dispatch_dynamic")
    for op, more in ((packet(kind).default, {}), (packet(kind).out, {"out_q": out_q(x)})):
        torch.library.opcheck(op, positional(x), {**options(x), **more}, test_utils=tests)
    read = [
        x.qkv,
        x.cos_sin,
        x.seq_lens,
        x.q_index,
        x.cache.block_ids,
        x.q_weight,
        x.k_weight,
        x.k_scale,
        x.v_scale,
    ]
    before = [None if t is None else raw(t).clone() for t in read]
    result = packet(kind)(*positional(x), **options(x))
    assert all(t is None or torch.equal(raw(t), old) for t, old in zip(read, before, strict=True))
    inside = {t.untyped_storage().data_ptr() for t in positional(x) if isinstance(t, torch.Tensor)}
    for tensor in result if isinstance(result, tuple) else (result,):
        assert tensor.numel() == 0 or tensor.untyped_storage().data_ptr() not in inside


@HERE
@pytest.mark.parametrize("by_request", [False, True])
def test_fr_71_opcheck_of_queries_alone(where: str, by_request: bool) -> None:
    q = torch.randn(5, 4, 32, device=where).bfloat16()
    index = torch.tensor([0, 2, 5], dtype=torch.int32, device=where) if by_request else None
    tests = ("test_autograd_registration", "test_faketensor")
    for op, more in (
        (torch.ops.hpc.quantize_query_fp8.default, {}),
        (torch.ops.hpc.quantize_query_fp8.out, {"out_q": torch.zeros_like(q, dtype=torch.float8_e4m3fn)}),
    ):
        torch.library.opcheck(op, (q, index, 3), more, test_utils=tests)


@HERE
@BOTH
@PREFILL
@pytest.mark.parametrize("quant_policy", [1, 2])
def test_row_32_fakes_agree_with_the_functions(
    kind: str, where: str, is_prefill: bool, quant_policy: int
) -> None:
    x = inputs(kind, where, is_prefill=is_prefill, quant_policy=quant_policy)
    real = packet(kind)(*positional(x), **options(x))
    with FakeTensorMode() as mode:

        def faked(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        fake = packet(kind)(*map(faked, positional(x)), **{n: faked(v) for n, v in options(x).items()})
    pairs = zip(real, fake, strict=True) if kind == "fp8" else [(real, fake)]
    for a, b in pairs:
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


@BOTH
def test_op_arguments_are_those_of_the_function_in_their_order(kind: str) -> None:
    name = "rope_norm_store_kv" if kind == "bf16" else "rope_norm_store_kv_fp8"
    function = inspect.signature(getattr(hpc, name))
    names = [n for n in function.parameters if n not in ("out_q", "plan")]
    assert [a.name for a in packet(kind).default._schema.arguments] == names
    assert [a.name for a in packet(kind).out._schema.arguments] == [*names, "out_q"]
    for argument in packet(kind).default._schema.arguments:
        default = function.parameters[argument.name].default
        if default is not inspect.Parameter.empty:
            assert argument.default_value == default, argument.name


@BOTH
def test_what_is_marked_as_written(kind: str) -> None:
    def written(op: Any) -> set[str]:
        return {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    kept = {"key_cache", "value_cache", "out_k", "out_v"}
    assert written(packet(kind).default) == kept and written(packet(kind).out) == {*kept, "out_q"}


@HERE
@BOTH
@PREFILL
@pytest.mark.parametrize("given", [True, False], ids=["out_q given", "new out_q"])
def test_fr_71_compiles_without_a_graph_break(kind: str, where: str, is_prefill: bool, given: bool) -> None:
    """A layer that reads the cache behind the call: what is written must be seen."""
    torch._dynamo.reset()
    x = inputs(kind, where, is_prefill=is_prefill)

    def layer(y: RopeInputs, out: torch.Tensor | None) -> tuple[Any, ...]:
        args: dict[str, Any] = options(y)
        if kind == "fp8":
            args["max_seqlens"] = 7
            result = hpc.rope_norm_store_kv_fp8(*positional(y), out_q=out, **args)
        else:
            result = (hpc.rope_norm_store_kv(*positional(y), out_q=out, **args),)
        return (*result, y.cache.kcache.float() + 1, y.qkv * 2)

    eager_inputs, traced_inputs = poison(x), poison(x)
    want = layer(eager_inputs, out_q(x) if given else None)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    have = compiled(traced_inputs, out_q(x) if given else None)
    for a, b in zip(have, want, strict=True):
        assert same_bits(a, b)
    assert_same(outputs(traced_inputs, have[0]), outputs(eager_inputs, want[0]))


def test_numbers_as_scales_and_queries_alone_under_compile() -> None:
    torch._dynamo.reset()
    x = inputs("fp8", "cpu", quant_policy=2)

    def run(qkv: torch.Tensor) -> Any:
        args = (
            x.cache.kcache,
            x.cache.vcache,
            qkv,
            x.cos_sin,
            x.seq_lens,
            x.q_index,
            x.cache.block_ids,
            False,
        )
        q, none, flag = hpc.rope_norm_store_kv_fp8(*args, 0.5, None, 2, q_scale_inv=x.q_scale_inv)
        assert none is None
        return q, flag, *hpc.quantize_query_fp8(qkv.view(-1, 8, 32))

    want = run(x.qkv)
    have = torch.compile(run, fullgraph=True, backend="aot_eager")(x.qkv)
    assert all(same_bits(a, b) for a, b in zip(have, want, strict=True))
    assert cases.K_SCALE != 0.5
