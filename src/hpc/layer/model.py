"""Shapes of a decoder layer with experts, read from a model's config.json. Pure Python."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from hpc.common.errors import fail

BLOCK = 128


@dataclass(frozen=True)
class LayerShape:
    """One layer on one rank.

    Heads, expert width and shared width are this rank's. `q_heads` 0: the model's attention is latent (MLA), for which
    this library has no operators; then a step is router and experts alone. `experts` leaves out the `zero_experts`,
    which stand behind them in the router and pass their input through.
    """

    name: str
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    rope_theta: float
    eps: float
    experts: int
    zero_experts: int
    top_k: int
    inter: int
    shared_inter: int
    scoring: str
    bias: bool
    renormalize: bool
    routed_scaling: float
    block_scales: bool

    @property
    def has_attention(self) -> bool:
        return self.q_heads > 0

    @property
    def qkv_width(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    def small(self) -> LayerShape:
        """Fewer heads and experts, and narrower: for a CPU. Group, head size, top-k and rules stay."""
        kv_heads = min(self.kv_heads, 1)
        experts = min(self.experts, 4 * self.top_k)
        return replace(
            self,
            hidden=min(self.hidden, 2 * BLOCK),
            q_heads=self.q_heads // max(1, self.kv_heads) * kv_heads,
            kv_heads=kv_heads,
            experts=experts,
            zero_experts=self.zero_experts * experts // self.experts,
            inter=min(self.inter, BLOCK),
            shared_inter=min(self.shared_inter, BLOCK),
        )


def names() -> list[str]:
    """Models whose shapes come with the library."""
    files = resources.files("hpc.layer").joinpath("models").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load(model: str, tp: int = 1) -> LayerShape:
    """Shapes by name (`names`), or from a config.json or the folder that holds one; one of `tp` equal ranks.

    Raises:
        InvalidArgument: an unknown name, a file that is no such configuration, or a number that `tp` does not divide.
    """
    path = Path(model)
    if model in names():
        text = resources.files("hpc.layer").joinpath(f"models/{model}.json").read_text()
        name = model
    elif path.exists():
        path = path / "config.json" if path.is_dir() else path
        text, name = path.read_text(), path.parent.name or path.stem
    else:
        fail("demo", "model", expected=f"{', '.join(names())}, or a config.json", got=model)
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        fail(
            "demo",
            "model",
            expected="a JSON object with a model's configuration",
            got=f"{model}: other content",
        )
    return split(from_config(config, name), tp)


def from_config(config: dict[str, Any], name: str = "model") -> LayerShape:
    """Shapes from the keys of Hugging Face configurations (Hy3, Qwen3-MoE, LongCat-Flash and kin)."""
    config = config.get("text_config", config)

    def first(*keys: str, default: Any = None) -> Any:
        found = next((config[key] for key in keys if config.get(key) is not None), default)
        if found is None:
            fail(
                "demo",
                "model",
                expected=f"a mixture-of-experts configuration with {' or '.join(keys)}",
                got=name,
            )
        return found

    heads = first("num_attention_heads")
    latent = config.get("kv_lora_rank") is not None
    rope = {**(config.get("rope_parameters") or {}), **config}
    quantisation = config.get("quantization_config") or {}
    inter = first("moe_intermediate_size", "expert_ffn_hidden_size")
    kind = str(config.get("model_type", ""))
    zero = int(config.get("zero_expert_num") or 0)
    sigmoid = bool(config.get("moe_router_use_sigmoid")) or config.get("scoring_func") == "sigmoid"
    return LayerShape(
        name=name,
        hidden=first("hidden_size"),
        q_heads=0 if latent else heads,
        kv_heads=0 if latent else first("num_key_value_heads"),
        head_dim=config.get("head_dim") or first("hidden_size") // heads,
        qk_norm=bool(config.get("qk_norm", kind.startswith("qwen3"))),
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        eps=float(first("rms_norm_eps", default=1e-6)),
        experts=first("num_experts", "n_routed_experts", "num_local_experts"),
        zero_experts=zero,
        top_k=first("num_experts_per_tok", "moe_topk"),
        inter=inter,
        shared_inter=inter * int(config.get("num_shared_experts") or config.get("n_shared_experts") or 0),
        scoring="sigmoid" if sigmoid else "softmax",
        bias=bool(config.get("moe_router_enable_expert_bias") or sigmoid or zero),
        renormalize=bool(config.get("route_norm", config.get("norm_topk_prob", False))),
        routed_scaling=float(first("router_scaling_factor", "routed_scaling_factor", default=1.0)),
        block_scales=quantisation.get("weight_block_size") is not None,
    )


def split(shape: LayerShape, tp: int) -> LayerShape:
    """One of `tp` tensor-parallel ranks; KV heads are repeated where there are fewer than ranks."""
    if tp < 1 or shape.q_heads % tp or shape.inter % (16 * tp) or shape.shared_inter % tp:
        fail("demo", "tp", expected=f"a divisor of {shape.q_heads} heads and of {shape.inter} / 16", got=tp)
    if shape.kv_heads > tp and shape.kv_heads % tp:
        fail("demo", "tp", expected=f"a divisor or multiple of {shape.kv_heads} KV heads", got=tp)
    if shape.block_scales and shape.inter // tp % BLOCK:
        fail("demo", "tp", expected=f"experts' width {shape.inter} / tp in whole blocks of {BLOCK}", got=tp)
    kv_heads = max(1, shape.kv_heads // tp) if shape.has_attention else 0
    name = shape.name if tp == 1 else f"{shape.name}, one of {tp} ranks"
    return replace(
        shape, name=name, q_heads=shape.q_heads // tp, kv_heads=kv_heads, inter=shape.inter // tp,
        shared_inter=shape.shared_inter // tp,
    )  # fmt: skip
