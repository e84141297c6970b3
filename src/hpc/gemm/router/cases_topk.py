"""Router product and expert choice as tests, `hpc check` and `hpc bench` see them: four models' routers."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import hpc
from hpc.bench.providers import Provider
from hpc.common.operator import Case, Floor, Progress, Tolerance
from hpc.gemm.router.reference import gemm_reference, topk_reference
from hpc.gemm.router.weight import RouterWeight

# Model -> (experts, hidden size, top_k, options of `hpc.router_topk`, with a bias).
ROUTERS: dict[str, tuple[int, int, int, dict[str, Any], bool]] = {
    "DeepSeek-V3": (
        256, 7168, 8,
        {"scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "renormalize": True, "routed_scaling": 2.5}, True,
    ),
    "Hy3": (192, 4096, 8, {"scoring": "sigmoid", "renormalize": True, "routed_scaling": 2.826}, True),
    "Qwen3-235B": (128, 4096, 8, {"renormalize": True}, False),
    "LongCat-Flash": (768, 6144, 12, {"routed_scaling": 6.0, "num_zero_experts": 256}, True),
}  # fmt: skip
MARGIN = 1e-4  # choices closer than this are not part of a case: fp32 sums may decide them either way


@dataclass(frozen=True)
class TopKCase:
    """`m` tokens through the router of a model; hidden size `k` if not the model's own."""

    model: str
    m: int
    k: int | None = None


@dataclass(frozen=True)
class TopKInputs:
    """All tensors of one call."""

    params: TopKCase
    x: torch.Tensor
    weight: torch.Tensor
    split: RouterWeight
    bias: torch.Tensor | None

    @property
    def top_k(self) -> int:
        return ROUTERS[self.params.model][2]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that both the public function and the reference take."""
        return {**ROUTERS[self.params.model][3], "bias": self.bias}


def make_inputs(params: TopKCase, device: torch.device | str, seed: int) -> TopKInputs:
    """Random tokens and weights; tokens whose choice is a near tie give way to one whose is not."""
    experts, hidden, _, _, has_bias = ROUTERS[params.model]
    hidden = params.k or hidden
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(params.m, hidden, generator=generator, device=device).to(torch.bfloat16)
    weight = torch.randn(experts, hidden, generator=generator, device=device) * (1.3 / hidden**0.5)
    bias = torch.randn(experts, generator=generator, device=device) * 0.05 if has_bias else None
    inputs = TopKInputs(params, x, weight, hpc.split_router_weight(weight), bias)
    if params.m:
        clear = margin(inputs) > MARGIN
        good = int(clear.to(torch.uint8).argmax())
        x[~clear] = x[good].clone()
    return inputs


def margin(inputs: TopKInputs) -> torch.Tensor:
    """How little a score may change, per token, before the choice of groups or the order of experts could change."""
    logits = gemm_reference(inputs.x, (inputs.weight,), 1.0)
    options, top_k = inputs.options, inputs.top_k
    scores = logits.sigmoid() if options.get("scoring") == "sigmoid" else logits.softmax(-1)
    choice = logits if inputs.bias is None else scores + inputs.bias
    least = torch.full((len(logits),), torch.inf, dtype=logits.dtype, device=logits.device)
    groups, best = options.get("num_groups", 1), options.get("top_groups", 1)
    if groups > 1:
        rank = choice.view(len(choice), groups, -1).topk(2, -1).values.sum(-1)
        ordered = rank.sort(dim=-1, descending=True).values
        least = torch.minimum(least, ordered[:, best - 1] - ordered[:, best])
        allowed = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(best, -1).indices, True)
        choice = choice.masked_fill(~allowed.repeat_interleave(choice.shape[1] // groups, 1), -torch.inf)
    ordered = choice.topk(min(top_k + 1, choice.shape[1]), -1).values
    return torch.minimum(least, (ordered[:, :-1] - ordered[:, 1:]).min(-1).values)


def route(inputs: TopKInputs, weight: RouterWeight | None = None) -> tuple[torch.Tensor, ...]:
    """The public function."""
    return hpc.router_topk(inputs.x, weight or inputs.split, inputs.top_k, **inputs.options)


def flat(weights: torch.Tensor, ids: torch.Tensor, *zero: torch.Tensor) -> torch.Tensor:
    """Weights, ids and zero-expert weight of each token in one row, so that one comparison sees all."""
    return torch.cat([weights, ids.to(weights.dtype), *(z[:, None] for z in zero)], dim=1)


def expected(inputs: TopKInputs) -> tuple[torch.Tensor, ...]:
    """(weights, ids) or (weights, ids, zero weight) in float64 from the FP32 weight."""
    logits = gemm_reference(inputs.x, (inputs.weight,), 1.0)
    result = topk_reference(logits, inputs.top_k, **inputs.options)
    return result if inputs.options.get("num_zero_experts") else result[:2]


class RouterTopKOperator:
    """See `hpc.common.operator.Operator`."""

    name = "gemm.router_topk"
    functions = ("router_topk", "split_router_weight")

    def cases(self, tag: str) -> list[Case]:
        """ "bench" and "target" are the same rows."""
        if tag in ("interpret", "demo"):
            found = [TopKCase(model, 3, 64) for model in ROUTERS]
        else:
            tokens = (1, 5, 64, 700, 3000) if tag == "gpu" else (1, 16, 64, 256, 1024, 8192)
            found = [TopKCase(model, m) for model, m in itertools.product(ROUTERS, tokens)]
        tags = {"interpret": ("interpret", "demo"), "demo": ("interpret", "demo"), "gpu": ("gpu",)}
        chosen = frozenset(tags.get(tag, ("bench", "target")))
        return [Case(f"{params.model} M={params.m}", chosen, params) for params in found]

    def make_inputs(self, case: Case, device: torch.device | str, seed: int) -> TopKInputs:
        return make_inputs(case.params, device, seed)

    def rotate(self, inputs: TopKInputs, seed: int) -> TopKInputs:
        """The same tokens with cold weights."""
        del seed
        split = RouterWeight(inputs.split.high.clone(), inputs.split.low.clone(), None, inputs.split.scale)
        return replace(inputs, weight=inputs.weight.clone(), split=split)

    def call(self, inputs: TopKInputs) -> torch.Tensor:
        return flat(*route(inputs))

    def reference(self, inputs: TopKInputs) -> torch.Tensor:
        return flat(*expected(inputs))

    def tolerance(self, case: Case) -> Tolerance:
        """Ids weigh most: one wrong id of a token shows in both."""
        del case
        return Tolerance(rms=1e-6, max=1e-6)

    def floor(self, case: Case) -> Floor:
        """As the product's."""
        experts, hidden, *_ = ROUTERS[case.params.model]
        size = experts * (case.params.k or hidden)
        return Floor(bytes=4 * size, flops=4.0 * case.params.m * size, kind="bf16")

    def providers(self) -> dict[str, Provider]:
        """Ours writes two tensors in two launches; the rival is FP32 cuBLAS with PyTorch operators behind it."""
        own = Provider("hpc", lambda inputs: _timed(inputs, lambda: route(inputs)))
        rival = Provider("cublas fp32 + torch", lambda inputs: _timed(inputs, lambda: torch_router(inputs)))
        return {provider.name: provider for provider in (own, rival)}

    def warmup(self, device: torch.device | str, progress: Progress | None) -> int:
        """Compile the expert choice of the four models."""
        warm = importlib.import_module("hpc.gemm.router.warm")
        count: int = warm.warmup_topk(device, progress)
        return count


def _timed(inputs: TopKInputs, call: Callable[[], tuple[torch.Tensor, ...]]) -> Callable[[], torch.Tensor]:
    """Check by the joint tensor once; afterwards only what an engine would call, with the weights as the result."""
    del inputs

    def result() -> torch.Tensor:
        return flat(*call())

    return result


def torch_router(inputs: TopKInputs) -> tuple[torch.Tensor, ...]:
    """The same router in FP32 by PyTorch operators."""
    logits = torch.mm(inputs.x.float(), inputs.weight.T)
    result = topk_reference(logits, inputs.top_k, **inputs.options)
    return result if inputs.options.get("num_zero_experts") else result[:2]


OPERATOR = RouterTopKOperator()
