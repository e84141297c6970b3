"""The fused MoE as tests, `hpc check`, `hpc bench` and `hpc warmup` see it: inputs, error limits, work, rivals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import hpc
from hpc.bench.providers import CannotRun, Provider
from hpc.bench.rivals import moe as rivals
from hpc.common.operator import Case, Floor, Progress, Tolerance
from hpc.moe import case_lists, choose, plan, validate
from hpc.moe.case_lists import MoeCase
from hpc.moe.reference import BLOCK, moe_reference
from hpc.moe.validate import Arguments

# Rounding the output to bf16 leaves 1.7e-3 RMS. The rest is flips: a relative error of 3.5e-5 to 1.2e-4 on gate and up
# (32 to 128 columns in one accumulator of the tensor core) changes a rounding to bf16 here and there, and through it
# one to e4m3, whose step is 6 to 12 %. That adds 1.7e-3 to 3.7e-3 in a model of the tensor core. The maximum is that of
# one flipped code with a large weight, which no precision short of the reference's excludes.
TOLERANCE = Tolerance(rms=5e-3, max=1e-1)
# With few values one flip of a large code is a good part of the norm: (intermediate values of all pairs, limit).
FEW_TOLERANCE = Tolerance(rms=1.6e-2, max=1e-1)
FEW_TOLERANCES = ((4096, FEW_TOLERANCE), (65536, Tolerance(rms=8e-3, max=1e-1)))
FEW = FEW_TOLERANCES[-1][0]
# Block scales here are up to a factor of 100 apart, so an eighth of the values decides the norm, or fewer: 16384 values
# gave 1.1e-2 once on the H200, and draws of the model with up to half a million values scatter from 2.6e-3 to 5.6e-3.
BLOCKS_THAT_COUNT = 8
# What flips may add to the error against activations that are not requantised at all: a code flips where two neighbours
# are equally far, so next to nothing. 0.2 % was the most in the model for some thousand values.
UNQUANTISED_FACTOR = 1.01
# Sums of 128 columns in the tensor core: 3.9e-3 to 6.2e-3 on the measured shapes. Chosen only where 5e-3 holds.
PAIR_128_TOLERANCE = Tolerance(rms=7e-3, max=1e-1)
# No e4m3 on the way: a flip is a step of bf16.
BF16_TOLERANCE = Tolerance(rms=2.6e-3, max=1.2e-2)
# Kernels that accumulate in fp32 flip next to nothing.
EXACT_TOLERANCE = Tolerance(rms=2.6e-3, max=1.2e-2)


@dataclass(frozen=True)
class MoeInputs:
    """All tensors of one call."""

    params: MoeCase
    x: torch.Tensor
    x_scale: torch.Tensor | None
    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    act_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_scale: torch.Tensor
    shared_output: torch.Tensor | None
    input_scale: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    @property
    def gate(self) -> tuple[str, float | None, float | None]:
        """Activation, limit and alpha."""
        return self.params.activation, self.params.swiglu_limit, self.params.swiglu_alpha


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _weights(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str, wide: bool = False
) -> torch.Tensor:
    """Normal weights, e4m3 or BF16, made expert by expert: the fp32 draw of all of them would not fit."""
    out = torch.empty(shape, dtype=torch.bfloat16 if wide else torch.float8_e4m3fn, device=device)
    for expert in range(shape[0]):
        draw = torch.randn(shape[1:], generator=generator, device=device)
        if wide:
            out[expert] = draw * shape[2] ** -0.5
            continue
        out.view(torch.uint8)[expert] = (
            (draw * 100).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        )
    return out


def make_routing(params: MoeCase, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_ids, topk_scale) on the CPU."""
    tokens, top_k, total = params.tokens, params.top_k, params.routed * params.ranks
    first = params.rank * params.routed
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    if params.routing == "uniform":
        ids = _distinct(torch.rand(tokens, total, generator=generator), top_k)
    elif params.routing == "one":
        ids = torch.full((tokens, top_k), first + params.routed - 1)
    elif params.routing == "zipf":
        odds = 1.0 / torch.arange(1, total + 1) ** 1.2
        ids = _distinct(torch.rand(tokens, total, generator=generator).log() / odds, top_k)
    elif params.routing == "half":
        ids = 2 * torch.randint((total + 1) // 2, (tokens, top_k), generator=generator)
    elif params.routing == "repeated":
        ids = torch.randint(min(total, 3), (tokens, top_k), generator=generator)
    elif params.routing == "none":
        ids = torch.full((tokens, top_k), total)
    else:
        ids = torch.randint(total, (tokens, top_k), generator=generator)
        strangers = torch.tensor([-1, total, 2**31 - 1, -(2**31)])
        bad = torch.rand(tokens, top_k, generator=generator) < 0.5
        ids = torch.where(bad, strangers[torch.randint(4, ids.shape, generator=generator)], ids)
        ids[0] = -1
        weights = torch.where((ids < 0) | (ids >= total), torch.nan, weights)
    return ids.to(torch.int32), weights / weights.nansum(-1, keepdim=True).clamp_min(0.1)


def _distinct(score: torch.Tensor, top_k: int) -> torch.Tensor:
    """Ids of the largest scores; repeats when there are fewer experts than asked for."""
    ids = score.topk(min(top_k, score.shape[1]), -1).indices
    return ids.repeat(1, -(-top_k // ids.shape[1]))[:, :top_k]


def make_inputs(params: MoeCase, device: torch.device | str, seed: int) -> MoeInputs:
    """Random inputs of about unit variance through the whole call; pad columns of block scales hold NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tokens, experts, hidden, inter = params.tokens, params.experts, params.hidden, params.inter

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device) + 0.5

    w13 = _weights((experts, 2 * inter, hidden), generator, device, params.bf16_weights)
    w2 = _weights((experts, hidden, inter), generator, device, params.bf16_weights)
    ids, weights = make_routing(params, torch.Generator().manual_seed(seed + 1))
    values = torch.randn(tokens, hidden, generator=generator, device=device) * 3
    shared = None
    if params.shared:
        shared = torch.randn(tokens, hidden, generator=generator, device=device).to(torch.bfloat16)
    up, down = 1.0 / (100 * hidden**0.5), 1.0 / (100 * inter**0.5)
    biases: tuple[torch.Tensor | None, ...] = (None, None)
    if params.bias is not None:
        dtype = getattr(torch, params.bias)
        biases = tuple((rand(experts, n) - 1.0).to(dtype) for n in (2 * inter, hidden))
    routing = (ids.to(device), weights.to(device), shared)
    if params.bf16_weights:
        return MoeInputs(params, values.bfloat16(), None, w13, None, w2, None, None, *routing, None, *biases)
    if not params.block:
        x = (values * 30).clamp(-448, 448).to(torch.float8_e4m3fn)
        input_scale = torch.full((1,), 1 / 30, device=device) if params.bf16_input and params.static else None
        # scales of the products hold those of their inputs, where these are given
        scales = (
            rand(experts) * (up if params.bf16_input and not params.static else up / 40),
            rand(experts) * (down / 20 if params.static else down),
        )
        act_scale = torch.full((1,), 20.0, device=device) if params.static else None
        return MoeInputs(params, values.bfloat16() if params.bf16_input else x, None, w13, scales[0], w2, scales[1],
                         act_scale, *routing, input_scale, *biases)  # fmt: skip
    padded = torch.nn.functional.pad(values, (0, -hidden % BLOCK)).view(tokens, _blocks(hidden), BLOCK)
    x_scale = padded.abs().amax(-1) / 448
    x = (padded / x_scale[..., None]).flatten(1)[:, :hidden].to(torch.float8_e4m3fn).contiguous()
    block_scales = []
    for rows, cols, scale in ((2 * inter, hidden, up), (hidden, inter, down)):
        full = torch.full((experts, _blocks(rows), 4 * -(-_blocks(cols) // 4)), torch.nan, device=device)
        # a factor of 100 between blocks: a scale taken from the wrong block shows
        full[:, :, : _blocks(cols)] = scale * 10 ** (2 * rand(experts, _blocks(rows), _blocks(cols)) - 2)
        block_scales.append(full)
    given = (values.bfloat16(), None) if params.bf16_input else (x, x_scale)
    return MoeInputs(params, given[0], given[1], w13, block_scales[0], w2, block_scales[1], None, *routing, None,
                     *biases)  # fmt: skip


def run(inputs: MoeInputs, **more: Any) -> torch.Tensor:
    """The public function of the case's kind."""
    params = inputs.params
    options: dict[str, Any] = {
        "shared_output": inputs.shared_output, "routed_scaling_factor": params.factor, "activation": params.activation,
        "swiglu_limit": params.swiglu_limit, "swiglu_alpha": params.swiglu_alpha, "gate_up_bias": inputs.w13_bias,
        "down_bias": inputs.w2_bias, "apply_router_weight_on_input": params.weight_on_input,
        "no_combine": params.no_combine, "num_fused_shared_experts": params.shared_experts, **more,
    }  # fmt: skip
    routing = (inputs.topk_ids, inputs.topk_scale, params.rank, params.experts * params.ranks)
    if params.bf16_weights:
        return hpc.fuse_moe_bf16(inputs.x, inputs.w13, inputs.w2, *routing, **options)
    assert inputs.w13_scale is not None and inputs.w2_scale is not None
    if params.block:
        return hpc.fuse_moe_blockwise(
            inputs.x,
            inputs.x_scale,
            inputs.w13,
            inputs.w13_scale,
            inputs.w2,
            inputs.w2_scale,
            *routing,
            **options,
        )
    return hpc.fuse_moe(
        inputs.x, inputs.w13, inputs.w2, inputs.w13_scale, inputs.w2_scale, inputs.act_scale, *routing,
        params.bf16_mul, input_scale=inputs.input_scale, **options,
    )  # fmt: skip


def reference(inputs: MoeInputs, requantised: bool = True) -> torch.Tensor:
    """The call in float64, from the inputs as stored; without rounding the activations to e4m3 if not requantised."""
    return moe_reference(
        inputs.x, inputs.w13, inputs.w2, inputs.topk_ids, inputs.topk_scale, rank_ep=inputs.params.rank,
        x_scale=inputs.x_scale, w13_scale=inputs.w13_scale, w2_scale=inputs.w2_scale, act_scale=inputs.act_scale,
        use_bf16_mul=inputs.params.bf16_mul, shared_output=inputs.shared_output,
        routed_scaling_factor=inputs.params.factor, input_scale=inputs.input_scale, gate=inputs.gate,
        w13_bias=inputs.w13_bias, w2_bias=inputs.w2_bias, no_combine=inputs.params.no_combine,
        weight_on_input=inputs.params.weight_on_input, shared_experts=inputs.params.shared_experts,
        requantised=requantised,
    )  # fmt: skip


def result_shape(params: MoeCase) -> tuple[int, ...]:
    """Shape of what the call gives."""
    tokens, hidden = params.tokens, params.hidden
    return (tokens, params.top_k + params.shared_experts, hidden) if params.no_combine else (tokens, hidden)


def tolerance(params: MoeCase) -> Tolerance:
    """Error limit of a case."""
    if params.bf16_weights:
        return BF16_TOLERANCE
    values = params.tokens * params.top_k * params.inter
    if params.block:
        values //= BLOCKS_THAT_COUNT
    return next((limit for most, limit in FEW_TOLERANCES if values <= most), TOLERANCE)


class MoeOperator:
    """See `hpc.common.operator.Operator`."""

    name = "moe.fused"
    functions = (
        "fuse_moe", "fuse_moe_pertensor_fp8", "fuse_moe_blockwise", "fuse_moe_blockwise_fp8", "count_and_gather",
        "fuse_moe_bf16", "reduce", "check_moe_weights", "pad_moe_biases", "pad_moe_weights",
        "get_fuse_moe_scratch_size",
    )  # fmt: skip

    def cases(self, tag: str) -> list[Case]:
        """Cases that carry `tag`: "interpret", "gpu", "target", "bench" (targets and more) or "demo"."""
        if tag == "gpu":
            return list(case_lists.gpu_cases())
        if tag in ("interpret", "demo"):
            known = case_lists.interpret_cases()
        else:
            known = case_lists.target_cases() + case_lists.bench_cases()
        return [case for case in known if tag in case.tags]

    def make_inputs(self, case: Case, device: torch.device | str, seed: int) -> MoeInputs:
        return make_inputs(case.params, device, seed)

    def rotate(self, inputs: MoeInputs, seed: int) -> MoeInputs:
        """The same call on another copy of the weights, with another routing: cold weights every time."""
        generator = torch.Generator().manual_seed(seed + 1)
        ids, weights = make_routing(inputs.params, generator)
        return replace(
            inputs, w13=_copy(inputs.w13), w2=_copy(inputs.w2), topk_ids=ids.to(inputs.x.device),
            topk_scale=weights.to(inputs.x.device),
        )  # fmt: skip

    def call(self, inputs: MoeInputs) -> torch.Tensor:
        return run(inputs)

    def reference(self, inputs: MoeInputs) -> torch.Tensor:
        return reference(inputs)

    def tolerance(self, case: Case) -> Tolerance:
        return tolerance(case.params)

    def floor(self, case: Case) -> Floor:
        """Weights of the experts that are met, read once; two products a pair.

        Met experts are counted on the routing of seed 0, which the first input set has; others differ by a few.
        """
        params: MoeCase = case.params
        ids, _ = make_routing(params, torch.Generator().manual_seed(1))
        local = ids - params.rank * params.routed
        local = local[(local >= 0) & (local < params.routed)]
        matrix, wide = 3 * params.hidden * params.inter, params.bf16_weights
        met = int(local.unique().numel()) + params.shared_experts
        pairs = local.numel() + params.tokens * params.shared_experts
        read = max(1, met * matrix * (2 if wide else 1))
        return Floor(bytes=read, flops=2.0 * pairs * matrix, kind="bf16" if wide else "fp8")

    def providers(self) -> dict[str, Provider]:
        """ "hpc" is the chosen plan, "hpc/..." are this library's alternatives to it, the others rivals."""
        own = [Provider("hpc", lambda inputs: lambda: run(inputs))]
        own += [Provider(f"hpc/{name}", _with_plan(name)) for name in plan.ALTERNATIVES]
        return {provider.name: provider for provider in own + rivals.providers(rival_inputs)}

    def warmup(self, device: torch.device | str, progress: Progress | None) -> int:
        """Compile what calls of the usual models reach: see `hpc.moe.warm`."""
        warm = importlib.import_module("hpc.moe.warm")
        count: int = warm.warmup(device, progress)
        return count


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor).view(torch.uint8).copy_(tensor.view(torch.uint8)).view(tensor.dtype)


def rival_inputs(inputs: MoeInputs) -> rivals.MoeRivalInputs:
    """The call as other libraries take it: BF16 x, scales of the two quantisations apart from those of the weights."""
    params, x, x_scale = inputs.params, inputs.x, inputs.input_scale
    obstacle = None
    if (
        params.ranks > 1
        or params.routing == "invalid"
        or inputs.gate != ("silu", None, None)
        or params.shared
        or params.bf16_weights
        or params.bias is not None
        or params.weight_on_input
        or params.no_combine
        or not params.static
        or params.shared_experts
    ):
        obstacle = "only plain calls are compared: all experts local, SiLU, no shared output"
    if inputs.w13_scale is None or inputs.w2_scale is None:
        raise CannotRun("no rival takes BF16 experts here")
    s13, s2, act = inputs.w13_scale, inputs.w2_scale, None
    if inputs.act_scale is None:
        s13 = s13[..., : _blocks(params.hidden)].contiguous()
        s2 = s2[..., : _blocks(params.inter)].contiguous()
        if inputs.x_scale is not None:
            x = (x.float() * inputs.x_scale.repeat_interleave(BLOCK, 1)[:, : params.hidden]).bfloat16()
    else:
        # our scales of the products hold those of their inputs
        x_scale = torch.ones(1, device=x.device) if x_scale is None else x_scale
        act = 1.0 / inputs.act_scale
        x, s13, s2 = x.bfloat16() if x.element_size() == 1 else x, s13 / x_scale, s2 / act
    return rivals.MoeRivalInputs(
        x, inputs.w13, inputs.w2, s13, s2, x_scale, act, inputs.topk_ids, inputs.topk_scale, obstacle
    )


def arguments(inputs: MoeInputs, output: torch.Tensor | None = None) -> Arguments:
    """The tensors of a case by role."""
    return Arguments(
        inputs.x, inputs.w13, inputs.w2, inputs.w13_scale, inputs.w2_scale, inputs.topk_ids, inputs.topk_scale,
        inputs.x_scale, inputs.act_scale, inputs.shared_output, output, inputs.input_scale, inputs.w13_bias,
        inputs.w2_bias, inputs.params.kind,
    )  # fmt: skip


def key_of(inputs: MoeInputs) -> plan.Key:
    """What decides the plan of a case."""
    p = inputs.params
    options = (p.bf16_mul, *inputs.gate, p.no_combine, p.weight_on_input, p.shared_experts)
    return validate.call("fuse_moe", arguments(inputs), p.rank, p.experts * p.ranks, *options)


def _with_plan(name: str) -> Callable[[MoeInputs], Callable[[], torch.Tensor]]:
    """The call under one of `plan.alternatives`."""

    def prepare(inputs: MoeInputs) -> Callable[[], torch.Tensor]:
        key = key_of(inputs)
        chosen = plan.alternatives(key).get(name)
        if chosen in (None, choose.choose(key)) or (name == "portable" and inputs.params.tokens > 512):
            raise CannotRun(f"no plan '{name}' here, or it is the chosen one")
        return lambda: run(inputs, plan=chosen)

    return prepare


OPERATOR = MoeOperator()
