"""Random weights by which two sets of kernels can be compared; SGLang's plugin `hpc_bench_weights`.

With `--load-format dummy` SGLang draws every tensor from +-1e-3, scales included: in FP8 nearly all codes are then zero
and scales have random signs. With weights of unit gain throughout, a model is chaotic instead: close calls of the
router and e4m3 roundings grow from layer to layer, and two correct sets of kernels end far apart. Here a tensor depends
on its name alone, so every process has the same model, FP8 weights use the format's range, and errors do not grow:

    codes ~ N(0, 32^2) cut at 448,  scale = gain / (32 sqrt(fan in))
    gain 1 inside a branch; at its end (o_proj, down_proj, w2) such that all branches of all layers together have
        0.35 of the energy of the embedding, which therefore dominates: an error of a branch stays small, but seen
    norms 1; those of queries and keys 1.5: logits of attention then have a standard deviation of 2.25 and a token
        attends to a few others. With unit norms it would average hundreds of values to nothing, and hide an error

    embedding = sqrt(3/4) own part + sqrt(1/4) part of one of 256 clusters of tokens
    router: in each layer a cluster has its experts, with logits of 2 to 3 where the others have little, so that the
        choice has a margin; each expert has equally many clusters
    lm_head: each token has two successors far ahead of all others, and a random part decides between them; so the
        choice depends on the branches, with margins of the size of the logits' standard deviation
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

TARGET = "sglang.srt.model_loader.loader.initialize_dummy_weights"
CODES = 32.0  # standard deviation of e4m3 codes
ACTIVATION_SCALE = 16.0 / 448.0  # static scale of activations: values up to 16
PEAKED = 1.5  # weights of the norms of queries and keys
BRANCHES = 0.35  # energy of all branches, that of the embedding being 1
BRANCH_OUTPUT = (
    0.6  # of gain 1: silu(g) u of unit g and u has this standard deviation, attention between 0.4 and 1
)
CLUSTERS, SHARED = 256, 0.25  # clusters of tokens, and their part of an embedding's energy
CHOSEN = (2.0, 3.0)  # the router's logits of a cluster's experts
LOGITS, AHEAD = 1.5, 14.0  # standard deviation of the logits, and how far ahead successors are
KEPT = ("k_scale", "v_scale", "kv_scale", "inv_freq", "cos_sin_cache")  # SGLang's own defaults are right
END = re.compile(r"\b(o_proj|down_proj)\.weight$|w2_weight$")
ROUTER = re.compile(r"\b(gate|classifier)\.weight$")


def register() -> None:
    """Entry point of the plugin: SGLang calls it in each of its processes."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(TARGET, fill, hooks.HookType.REPLACE)


def fill(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Write all floating tensors of a model."""
    state = model.state_dict()
    recipe = Recipe(state, getattr(model, "config", None))
    for name in sorted(state, key=lambda name: "lm_head" in name):  # which is made from the embedding
        tensor, leaf = state[name], name.rpartition(".")[2]
        if tensor.is_floating_point() and tensor.numel() and not leaf.endswith(KEPT):
            recipe.fill(name, leaf, tensor.data)


@dataclass
class Recipe:
    """How the tensors of one model are drawn. `config`: of the model, for what its router does."""

    state: dict[str, torch.Tensor]
    config: Any = None

    def fill(self, name: str, leaf: str, tensor: torch.Tensor) -> None:
        generator = _generator(name, tensor)
        if leaf.endswith("input_scale"):
            tensor.fill_(ACTIVATION_SCALE)
        elif "scale" in leaf:
            self._scale(name, tensor, generator)
        elif "bias" in leaf:
            _normal(
                tensor, 3e-4, generator
            )  # corrections of the router's choice stay small beside its scores
        elif tensor.dim() <= 1:
            tensor.fill_(PEAKED if ".q_norm" in name or ".k_norm" in name else 1.0)
        elif tensor.element_size() == 1:
            _normal(tensor, CODES, generator)
        elif ROUTER.search(name):
            self._router(tensor, generator)
        elif "oe_embed" in name:
            _normal(tensor, 1.0, generator)
        elif "oe_projection" in name:  # LongCat's n-grams, [n-grams, dim of one, hidden]
            _normal(tensor, 1 / math.sqrt(tensor.shape[1]), generator)
        elif "embed" in name:
            self._embedding(tensor, generator)
        elif "lm_head" in name and self._words(tensor) is not None:
            self._head(tensor, generator)
        else:
            _normal(tensor, self._gain(name) / math.sqrt(tensor.shape[-1]), generator)

    def _scale(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Scales of a weight: block by block up to 25 % from their mean; otherwise one an expert or layer, so that the
        shards of a fused weight share theirs and are not requantised."""
        of = name.replace("_scale_inv", "").replace("_scale", "")
        weight = self.state.get(of)
        fan_in = 4096 if weight is None else weight.shape[-1]
        codes = CODES if weight is not None and weight.element_size() == 1 else 1.0
        blocks = name.endswith("_scale_inv")
        shape = tensor.shape if blocks else (*tensor.shape[:1], *(1 for _ in tensor.shape[1:]))
        spread = torch.rand(shape, generator=generator, device=tensor.device, dtype=torch.float32)
        if not blocks and tensor.dim() < 2 and "expert" not in name:
            spread.fill_(0.5)
        unit = self._gain(of) / (codes * math.sqrt(fan_in))
        tensor.copy_(((0.75 + 0.5 * spread) * unit).expand(tensor.shape))

    def _gain(self, name: str) -> float:
        """Standard deviation of the output for unit inputs."""
        if not END.search(name):
            return 1.0
        count = sum(bool(END.search(other)) for other in self.state)
        routed = self._routed() if name.endswith("w2_weight") else 1.0
        return math.sqrt(BRANCHES / count) / (BRANCH_OUTPUT * routed)

    def _asked(self, *names: str, default: Any) -> Any:
        values = (getattr(self.config, name, None) for name in names)
        return next((value for value in values if value is not None), default)

    @property
    def top_k(self) -> int:
        return int(self._asked("num_experts_per_tok", "moe_topk", default=8))

    def _routed(self) -> float:
        """Root of the sum of the squares of a token's routing weights, taken as equal."""
        factor = self._asked("router_scaling_factor", "routed_scaling_factor", default=1.0)
        share = 1.0
        if not self._asked("route_norm", "norm_topk_prob", default=True):
            experts = next(tensor.shape[0] for name, tensor in self.state.items() if ROUTER.search(name))
            chosen = self.top_k * math.exp(sum(CHOSEN) / 2)
            share = chosen / (chosen + experts - self.top_k)
        return float(factor) * share / math.sqrt(self.top_k)

    def _router(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Logits of a cluster's experts from the cluster's part of the embedding; the experts in shuffled rounds."""
        experts, hidden = tensor.shape
        device, low, high = tensor.device, *CHOSEN
        rounds = -(-CLUSTERS * self.top_k // experts)
        order = torch.cat(
            [torch.randperm(experts, generator=generator, device=device) for _ in range(rounds)]
        )
        chosen = order[: CLUSTERS * self.top_k].view(CLUSTERS, self.top_k)
        logits = low + (high - low) * torch.rand(
            chosen.shape, generator=generator, device=device, dtype=torch.float32
        )
        table = torch.zeros(CLUSTERS, experts, device=device, dtype=torch.float32).scatter_add_(
            1, chosen, logits
        )
        tensor.copy_(table.T @ _codes(hidden, device) / (hidden * math.sqrt(SHARED)))

    def _words(self, head: torch.Tensor) -> torch.Tensor | None:
        """The embedding of words, if there is one as large as the head's."""
        found = (t for name, t in self.state.items() if "embed" in name and "oe_" not in name)
        return next((tensor for tensor in found if tensor.shape == head.shape), None)

    def _amplified(self) -> float:
        """LongCat takes the mean of the word and its n-grams; the word is to have its energy all the same."""
        return 1.0 + sum(t.shape[0] for name, t in self.state.items() if "oe_projection" in name)

    def _embedding(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        codes, clusters = _codes(tensor.shape[1], tensor.device), clusters_of(tensor)
        for rows, values in _parts(tensor, generator):
            values -= (
                values @ codes.T @ codes / codes.shape[1]
            )  # a token's own part says nothing to the routers
            values.mul_(math.sqrt(1 - SHARED)).add_(codes[clusters[rows]], alpha=math.sqrt(SHARED))
            tensor[rows] = (values * self._amplified()).to(tensor.dtype)

    def _head(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        words, hidden = self._words(tensor), tensor.shape[1]
        assert words is not None
        before = [
            torch.randperm(tensor.shape[0], generator=generator, device=tensor.device) for _ in range(2)
        ]
        for rows, values in _parts(tensor, generator):
            values.mul_(LOGITS / math.sqrt(hidden))
            for of in before:
                values.add_(words[of[rows]].float(), alpha=AHEAD / (hidden * self._amplified()))
            tensor[rows] = values.to(tensor.dtype)


def clusters_of(embedding: torch.Tensor) -> torch.Tensor:
    """Cluster of each token."""
    generator = _generator("clusters of tokens", embedding)
    return torch.randint(CLUSTERS, embedding.shape[:1], generator=generator, device=embedding.device)


@functools.cache
def _codes(hidden: int, device: torch.device) -> torch.Tensor:
    """[clusters, hidden], orthogonal, of unit variance; the same for embedding and routers."""
    generator = torch.Generator().manual_seed(zlib.crc32(b"codes of clusters"))
    basis = torch.linalg.qr(torch.randn(hidden, CLUSTERS, generator=generator, dtype=torch.float32)).Q
    return (basis.T * math.sqrt(hidden)).contiguous().to(device)


def _generator(name: str, tensor: torch.Tensor) -> torch.Generator:
    return torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))


def _parts(tensor: torch.Tensor, generator: torch.Generator) -> Iterator[tuple[slice, torch.Tensor]]:
    """Unit normal numbers by the first dimension, so that a stack of experts needs little room beside itself."""
    rows = max(1, (1 << 27) // max(1, tensor[0].numel())) if tensor.dim() > 1 else tensor.numel()
    for start in range(0, tensor.shape[0], rows):
        part = slice(start, min(start + rows, tensor.shape[0]))
        shape = tensor[part].shape
        yield part, torch.randn(shape, generator=generator, device=tensor.device, dtype=torch.float32)


def _normal(tensor: torch.Tensor, std: float, generator: torch.Generator) -> None:
    for rows, values in _parts(tensor, generator):
        values.mul_(std)
        part = tensor[rows]
        part.copy_((values.clamp_(-448.0, 448.0) if part.element_size() == 1 else values).to(part.dtype))
