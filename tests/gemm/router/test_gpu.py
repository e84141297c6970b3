"""The router on a GPU: every kernel on every kind of shape, graphs, streams, fresh weights, flags, expert choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hpc
from hpc.common import arch
from hpc.gemm.router import cases, cases_topk, plan
from hpc.gemm.router.cases import DEFAULT_SCALE, RouterCase
from hpc.testing import assert_close, guarded

pytestmark = pytest.mark.gpu

CASES = cases.OPERATOR.cases("gpu")
TOPK_CASES = cases_topk.OPERATOR.cases("gpu")


def check(out: torch.Tensor, inputs: cases.GemmInputs, what: str) -> None:
    case = cases.Case("x", frozenset(), inputs.params)
    assert_close(out, cases.OPERATOR.reference(inputs), cases.OPERATOR.tolerance(case), what)


def key_of(params: RouterCase) -> plan.Key:
    device = torch.cuda.current_device()
    aligned = params.pad % 8 == 0 and params.k % 8 == 0
    return plan.Key(
        arch.device_name(device), arch.is_hopper(device), arch.sm_count(device), params.m, params.n, params.k,
        params.terms, aligned,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: cases.Case) -> None:
    """Twice, into a poisoned output with guard bytes around it: right, complete, in bounds, and the same bits."""
    params: RouterCase = case.params
    inputs = cases.make_inputs(params, "cuda", 1)
    dtype = torch.float32 if params.fp32_output else torch.bfloat16
    guard = guarded((params.m, params.n), dtype, "cuda")
    out = cases.multiply(inputs, output=guard.tensor)
    assert out is guard.tensor
    guard.check_guards(case.name)
    check(out, inputs, case.name)
    assert torch.equal(cases.multiply(inputs), out), "same bits"


@pytest.mark.parametrize("terms", [2, 3])
@pytest.mark.parametrize("shape", [(192, 4096), (768, 6144), (100, 640), (64, 64)], ids=str)
@pytest.mark.parametrize("m", [1, 2, 8, 30, 64, 129, 700, 2049])
def test_every_plan(m: int, shape: tuple[int, int], terms: int) -> None:
    """Every candidate of the analytic choice, and the portable kernel in one split and in many."""
    params = RouterCase(m, *shape, terms=terms)
    inputs, key = cases.make_inputs(params, "cuda", 2), key_of(params)
    plans = [
        *plan.candidates(key),
        plan.Plan("block", 16, 32),
        plan.Plan("block", 64, 64, min(5, plan.ceil(key.k, 64))),
    ]
    legal = [p for p in dict.fromkeys(plans) if plan.is_legal(p, key) is None]
    assert legal
    for chosen in legal:
        out = cases.multiply(inputs, plan=chosen)
        assert_close(out, cases.OPERATOR.reference(inputs), cases.TOLERANCES[terms], str(chosen))


def test_no_tokens_and_views() -> None:
    inputs = cases.make_inputs(RouterCase(8, 192, 4096), "cuda", 3)
    high, low = inputs.parts
    for fp32 in (True, False):
        empty = hpc.gemm_bf16xfp32(inputs.x[:0], high, low, DEFAULT_SCALE, fp32)
        assert empty.shape == (0, 192) and empty.dtype == (torch.float32 if fp32 else torch.bfloat16)
    whole = hpc.gemm_bf16xfp32(inputs.x, high, low, DEFAULT_SCALE, True)
    again = hpc.gemm_bf16xfp32(inputs.x, high, low, torch.tensor(DEFAULT_SCALE), True)
    assert torch.equal(whole, again)
    half = hpc.gemm_bf16xfp32(inputs.x[:, 1:2049], high[:, 1:2049], low[:, 1:2049], DEFAULT_SCALE, True)
    want = inputs.x[:, 1:2049].double() @ inputs.weight[:, 1:2049].double().T
    assert_close(half, want, cases.TOLERANCES[2], "columns 1 to 2048: unaligned")


@pytest.mark.parametrize("m", [1, 16, 64, 256, 8192])
def test_the_flag_is_neither_read_nor_written(m: int) -> None:
    """Zero stays zero, and a dirty one neither hangs nor shows."""
    inputs = cases.make_inputs(RouterCase(m, 192, 4096), "cuda", 4)
    flag = hpc.get_gemm_bf16xfp32_workspace(192)
    assert flag.shape == (8192, 3) and flag.dtype == torch.int32
    clean = cases.multiply(inputs, split_flag=flag)
    assert int(flag.abs().max()) == 0
    flag.fill_(77)
    assert torch.equal(cases.multiply(inputs, split_flag=flag), clean)
    assert int(flag.min()) == 77


# --- graphs and streams -----------------------------------------------------------------------------


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


@pytest.mark.parametrize("m", [1, 8, 64, 300, 3000])
def test_replay_with_other_tokens(m: int) -> None:
    inputs = cases.make_inputs(RouterCase(m, 192, 4096), "cuda", 5)
    graph, out = capture(lambda: cases.multiply(inputs))
    for seed in (6, 7):
        fresh = cases.make_inputs(RouterCase(m, 192, 4096), "cuda", seed)
        inputs.x.copy_(fresh.x)
        out.fill_(float("nan"))
        graph.replay()
        check(out, inputs, f"replay {seed}")


@pytest.mark.parametrize("m", [1, 8, 512])
def test_two_streams_at_once(m: int) -> None:
    """Same shapes, other data, no synchronisation: each stream's bits are those of a single stream."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [cases.make_inputs(RouterCase(m, 768, 6144), "cuda", seed) for seed in (8, 9)]
    flags = [hpc.get_gemm_bf16xfp32_workspace(768) for _ in streams]
    alone = [cases.multiply(i) for i in inputs]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(100):
        for s in (0, 1):
            with torch.cuda.stream(streams[s]):
                results[s].append(cases.multiply(inputs[s], split_flag=flags[s]))
    torch.cuda.synchronize()
    for s in (0, 1):
        assert all(torch.equal(result, alone[s]) for result in results[s])


def test_two_graphs_replayed_at_once() -> None:
    inputs = [cases.make_inputs(RouterCase(64, 192, 4096), "cuda", seed) for seed in (10, 11)]
    alone = [cases.multiply(i) for i in inputs]
    made = [capture(lambda i=i: cases.multiply(i)) for i in inputs]  # type: ignore[misc]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(50):
        for (graph, _), stream in zip(made, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, out), want in zip(made, alone, strict=True):
        assert torch.equal(out, want)


@pytest.mark.parametrize("m", [1, 8, 64, 300])
def test_a_chain_of_dependent_kernels(m: int) -> None:
    """Tokens and weights rewritten right before each call; the kernels start early and must still wait."""
    made = [cases.make_inputs(RouterCase(m, 192, 4096), "cuda", seed) for seed in range(4)]
    x = made[0].x.clone()
    high, low = (part.clone() for part in made[0].parts)
    alone = [cases.multiply(i) for i in made]
    torch.cuda.synchronize()
    results = []
    for step in range(200):
        chosen = made[step % 4]
        x.copy_(chosen.x)
        if step % 2 == 0:
            high.copy_(chosen.parts[0])
            low.copy_(chosen.parts[1])
        results.append((step, hpc.gemm_bf16xfp32(x, high, low, DEFAULT_SCALE, True)))
    torch.cuda.synchronize()
    for step, result in results:
        if step % 2 == 0:
            assert torch.equal(result, alone[step % 4]), f"step {step}"


def test_capture_of_an_unknown_shape_says_what_to_do() -> None:
    inputs = cases.make_inputs(RouterCase(6, 48, 333), "cuda", 12)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warmup"), torch.cuda.graph(graph):
        cases.multiply(inputs)


# --- the expert choice ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TOPK_CASES, ids=lambda case: case.name)
def test_routers_of_models(case: cases.Case) -> None:
    inputs = cases_topk.make_inputs(case.params, "cuda", 13)
    got, want = cases_topk.route(inputs), cases_topk.expected(inputs)
    assert got[1].dtype == torch.int32 and torch.equal(got[1].long(), want[1].long())
    for mine, reference in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", cases_topk.ROUTERS)
def test_expert_choice_of_several_tokens_a_program(model: str) -> None:
    inputs = cases_topk.make_inputs(cases_topk.TopKCase(model, 9001, 512), "cuda", 21)
    assert plan.topk_rows(9001, arch.sm_count(torch.cuda.current_device())) > 1
    got, want = cases_topk.route(inputs), cases_topk.expected(inputs)
    assert torch.equal(got[1], want[1])
    assert_close(
        cases_topk.flat(*got), cases_topk.flat(*want), cases_topk.OPERATOR.tolerance(TOPK_CASES[0]), model
    )


def test_equal_logits_give_the_lower_id() -> None:
    """Every second expert equals its neighbour, so every choice is a tie."""
    x = torch.randn(300, 256, device="cuda").bfloat16()
    weight = torch.randn(96, 256, device="cuda").mul_(0.05).repeat_interleave(2, 0).contiguous()
    _, ids = hpc.router_topk(x, hpc.split_router_weight(weight), 8)
    assert torch.equal(ids[:, ::2] + 1, ids[:, 1::2]) and not (ids[:, ::2] % 2).any()


def test_expert_choice_in_a_graph() -> None:
    inputs = cases_topk.make_inputs(cases_topk.TopKCase("DeepSeek-V3", 33), "cuda", 14)
    eager = cases_topk.route(inputs)
    graph, out = capture(lambda: cases_topk.route(inputs))
    for tensor in out:
        tensor.fill_(-9)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(out, eager, strict=True))


def test_fr_27_no_set_differs_beyond_near_ties() -> None:
    """896 experts of 7168 hidden values: sets differ from float64 only where the gap is below 1e-5."""
    generator = torch.Generator(device="cuda").manual_seed(15)
    for experts in (896, 256):
        x = torch.randn(4096, 7168, generator=generator, device="cuda").bfloat16()
        weight = torch.randn(experts, 7168, generator=generator, device="cuda") * 0.02
        for terms, gap in ((2, 1e-4), (3, 1e-5)):
            split = hpc.split_router_weight(weight, terms=terms)
            _, ids = hpc.router_topk(x, split, 8)
            logits = x.double() @ weight.double().T
            top = logits.topk(9, -1)
            clear = top.values[:, 7] - top.values[:, 8] > gap
            mine, want = ids.long().sort(-1).values, top.indices[:, :8].sort(-1).values
            assert torch.equal(mine[clear], want[clear]), f"{experts} experts, {terms} parts"


# --- the split --------------------------------------------------------------------------------------


def test_split_follows_the_weight_and_refuses_captures() -> None:
    weight = torch.randn(64, 128, device="cuda")
    first = hpc.split_router_weight(weight)
    assert hpc.split_router_weight(weight) is first
    weight.mul_(2.0)
    second = hpc.split_router_weight(weight)
    assert second is not first and torch.equal(second.high, first.high * 2)
    weight.mul_(2.0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(hpc.common.errors.InvalidArgument, match="capture"), torch.cuda.graph(graph):
        hpc.split_router_weight(weight)


ADVERSARIAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dynamic range": lambda w: w * 2.0 ** torch.randint(-30, 30, w.shape, device=w.device),
    "powers of two": lambda w: torch.sign(w) * 2.0 ** torch.randint(-20, 20, w.shape, device=w.device),
    "one bit below": lambda w: (1 + 2.0**-9) * torch.sign(w),
    "large": lambda w: w / w.abs().max() * 1e30,
    "small": lambda w: w * 1e-30,
}


@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("m", [1, 16, 256, 2048])
def test_adversarial_weights(kind: str, m: int) -> None:
    """Two parts: within 2^-16 of the sum of magnitudes."""
    inputs = cases.make_inputs(RouterCase(m, 192, 4096), "cuda", 16)
    weight = ADVERSARIAL[kind](inputs.weight)
    split = hpc.split_router_weight(weight)
    changed = replace(inputs, weight=weight, parts=split.parts)
    out = cases.multiply(changed).double()
    want = cases.OPERATOR.reference(changed)
    magnitude = inputs.x.double().abs() @ weight.double().abs().T
    assert torch.isfinite(out).all()
    assert ((out - want).abs() <= 2.0**-16 * magnitude).all()
