"""A small decoder in plain PyTorch with SGLang's names, and what kernels do to it: roundings and faults."""

from __future__ import annotations

import dataclasses
import math
import types

import torch

FP8 = torch.float8_e4m3fn
HIDDEN, LAYERS, HEADS, DIM, EXPERTS, TOP_K, INTER, VOCABULARY = 768, 5, 8, 64, 16, 4, 96, 1024
DENSE_INTER = 3 * HIDDEN


@dataclasses.dataclass(frozen=True)
class Kernels:
    """`fp8_kv`: cache in e4m3. `other`: another correct implementation, which rounds elsewhere. The rest are faults."""

    exact: bool = False
    fp8_kv: bool = False
    other: bool = False
    wrong_page: int | None = None
    dropped_expert: bool = False
    scale: float = 1.0
    rope_shift: int = 0

    def bf16(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.exact else x.to(torch.bfloat16).float()

    def fp8(self, x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        return x if self.exact else (x / scale).clamp(-448.0, 448.0).to(FP8).float() * scale


def model(dense: bool = False) -> torch.nn.Module:
    """Empty tensors by SGLang's names and types: experts with FP8 weights, or one BF16 feed-forward a layer."""
    root = torch.nn.Module()
    root.config = types.SimpleNamespace(
        num_experts_per_tok=TOP_K, norm_topk_prob=True, routed_scaling_factor=2.0
    )
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "model.embed_tokens.weight": ((VOCABULARY, HIDDEN), torch.bfloat16),
        "lm_head.weight": ((VOCABULARY, HIDDEN), torch.bfloat16),
    }
    for number in range(LAYERS):
        at = f"model.layers.{number}"
        experts = (("mlp.experts.w13", 2 * INTER, HIDDEN), ("mlp.experts.w2", HIDDEN, INTER))
        feed = (("mlp.gate_up_proj", 2 * DENSE_INTER, HIDDEN), ("mlp.down_proj", HIDDEN, DENSE_INTER))
        for name, out, into in (
            ("self_attn.qkv_proj", (HEADS + 2) * DIM, HIDDEN), ("self_attn.o_proj", HIDDEN, HEADS * DIM),
            *(feed if dense else experts),
        ):  # fmt: skip
            if dense:
                shapes[f"{at}.{name}.weight"] = ((out, into), torch.bfloat16)
                continue
            stack = (EXPERTS,) if "expert" in name else ()
            end = "_" if stack else "."
            shapes[f"{at}.{name}{end}weight"] = ((*stack, out, into), FP8)
            shapes[f"{at}.{name}{end}weight_scale"] = (stack or (1,), torch.float32)
        if not dense:
            shapes[f"{at}.mlp.gate.weight"] = ((EXPERTS, HIDDEN), torch.float32)
        shapes[f"{at}.self_attn.q_norm.weight"] = ((DIM,), torch.bfloat16)
    for name, (shape, dtype) in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(
            leaf, torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        )
    return root


def dequantised(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights in float32, with their scales."""
    state = root.state_dict()
    found = {name: tensor.float() for name, tensor in state.items()}
    for name in [name for name in state if name.endswith("_scale")]:
        scale, of = found.pop(name), name.removesuffix("_scale")
        found[of] *= scale.view(-1, *(1 for _ in found[of].shape[1:]))
    return found


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def rope(x: torch.Tensor, shift: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(len(x)) + float(shift), 10000.0 ** -(torch.arange(0, DIM, 2) / DIM))
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Running:
    """One model with one set of kernels."""

    def __init__(self, state: dict[str, torch.Tensor], kernels: Kernels) -> None:
        self.state, self.kernels = state, kernels
        self.dense = "model.layers.0.mlp.gate_up_proj.weight" in state

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """FP8 product with a static scale of the activations; BF16 in a dense model. In parts if `other`."""
        x = self.kernels.bf16(x) if self.dense else self.kernels.fp8(x, 16 / 448)
        return self.kernels.bf16(self.product(x, self.state[f"{name}.weight"]))

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self.kernels.other:
            return x @ weight.T
        half = x.shape[-1] // 2
        return x[..., half:] @ weight[:, half:].T + x[..., :half] @ weight[:, :half].T

    def attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        use, count = self.kernels, len(x)
        weight = float(self.state[f"{at}.q_norm.weight"][0])
        q, k, v = self.linear(x, f"{at}.qkv_proj").view(count, -1, DIM).split([HEADS, 1, 1], 1)
        if use.other:  # rounded once, after the rotation
            q, k = (use.bf16(rope(norm(t) * weight, s)) for t, s in ((q, 0), (k, use.rope_shift)))
        else:
            q, k = (use.bf16(rope(use.bf16(norm(t) * weight), s)) for t, s in ((q, 0), (k, use.rope_shift)))
        if use.fp8_kv:
            k, v = use.fp8(k), use.fp8(v)
            q = use.fp8(q, q.abs().amax(-1, keepdim=True) / 448 if use.other else 1.0)
        if use.wrong_page is not None and count > 16 * (use.wrong_page + 1):
            page = slice(16 * use.wrong_page, 16 * use.wrong_page + 16)
            k, v = k.clone(), v.clone()
            k[page], v[page] = k[:16], v[:16]
        scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) / math.sqrt(DIM)
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        rounded = use.fp8(p, 1 / 256) if use.fp8_kv else use.bf16(p)
        out = use.bf16(torch.einsum("hqk,kd->qhd", rounded, v[:, 0]) / p.sum(-1).T[..., None])
        return self.linear(out.flatten(1) * use.scale, f"{at}.o_proj")

    def feed(self, x: torch.Tensor, at: str) -> torch.Tensor:
        if not self.dense:
            return self.experts(x, at)
        gate, value = self.linear(x, f"{at}.gate_up_proj").chunk(2, -1)
        inner = torch.nn.functional.silu(gate)
        return self.linear(
            (inner if self.kernels.other else self.kernels.bf16(inner)) * value, f"{at}.down_proj"
        )

    def experts(self, x: torch.Tensor, at: str) -> torch.Tensor:
        use, out = self.kernels, torch.zeros_like(x)
        logits = self.product(x, self.state[f"{at}.gate.weight"])
        chosen, ids = logits.sigmoid().topk(TOP_K, -1)
        weights = 2.0 * chosen / chosen.sum(-1, keepdim=True)
        if use.dropped_expert:
            weights[:, -1] = 0
        up, down = (self.state[f"{at}.experts.{name}_weight"] for name in ("w13", "w2"))
        codes = use.fp8(x, 16 / 448)
        for expert in ids.unique().tolist():
            rows, place = (ids == expert).nonzero(as_tuple=True)
            gate, value = self.product(codes[rows], up[expert]).chunk(2, -1)
            if not use.other:
                gate, value = use.bf16(gate), use.bf16(value)
            inner = use.fp8(torch.nn.functional.silu(gate) * value, 16 / 448)
            part = self.product(inner, down[expert]) * weights[rows, place, None]
            out.index_add_(0, rows, part if use.other else use.bf16(part))
        return use.bf16(out)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        use = self.kernels
        h = self.state["model.embed_tokens.weight"][tokens]
        for number in range(LAYERS):
            at = f"model.layers.{number}"
            h = use.bf16(h + self.attention(use.bf16(norm(h)), f"{at}.self_attn"))
            h = use.bf16(h + self.feed(use.bf16(norm(h)), f"{at}.mlp"))
        return use.bf16(use.bf16(norm(h)) @ self.state["lm_head.weight"].T)
