"""The named inputs of the fused MoE: a grid over what decides a path, the measured rows, the tiny ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from hpc.common.operator import Case

ROUTINGS = ("uniform", "one", "zipf", "half", "invalid", "repeated", "none")


@dataclass(frozen=True)
class MoeCase:
    """One call. `experts` are those of this rank, `ranks` how many ranks there are.

    Routing: "uniform" distinct random experts; "one" every pair to one expert; "zipf" skewed; "half" only even
    experts; "invalid" half of the ids -1 or out of range, their weights NaN; "repeated" ids repeat in a row; "none" no
    pair is local. `static` False, with one scale an expert: scales of BF16 x and of the activations are found inside.
    `bias`: dtype of both biases.
    """

    tokens: int
    experts: int
    hidden: int
    inter: int
    top_k: int = 8
    block: bool = False
    bf16_mul: bool = True
    routing: str = "uniform"
    ranks: int = 1
    rank: int = 0
    shared: bool = False
    factor: float = 1.0
    bf16_input: bool = False
    activation: str = "silu"
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    bf16_weights: bool = False
    static: bool = True
    bias: str | None = None
    weight_on_input: bool = False
    no_combine: bool = False
    shared_experts: int = 0  # of the rank's experts, the last ones: every token takes them

    @property
    def routed(self) -> int:
        """Experts of this rank that ids name."""
        return self.experts - self.shared_experts

    @property
    def kind(self) -> str:
        """Of the weights, as `Arguments` has it."""
        return "bf16" if self.bf16_weights else "block" if self.block else "tensor"


# (experts of the rank, hidden, intermediate of the rank, block scales, ranks)
SHAPES: dict[str, tuple[int, int, int, bool]] = {
    "Hy3 TP8": (192, 4096, 192, False),
    "Hy3 EP8": (24, 4096, 1536, False),
    "Hy3 EP8 block": (24, 4096, 1536, True),
    "Qwen3-235B TP8": (128, 4096, 192, False),
    "Qwen3-30B": (128, 2048, 768, False),
    "Qwen3-30B block": (128, 2048, 768, True),
}
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


@functools.cache
def target_cases() -> tuple[Case, ...]:
    """Rows with a stated target."""
    return tuple(
        Case(
            f"{name} M={tokens}", frozenset({"bench", "target"}), MoeCase(tokens, *sizes[:3], block=sizes[3])
        )
        for name, sizes in SHAPES.items()
        for tokens in TOKENS
    )


@functools.cache
def bench_cases() -> tuple[Case, ...]:
    """Skewed routings beside the targets."""
    return tuple(
        Case(
            f"{name} M={tokens} {routing}", frozenset({"bench"}),
            MoeCase(tokens, *SHAPES[name][:3], block=SHAPES[name][3], routing=routing),
        )
        for name in ("Hy3 TP8", "Hy3 EP8", "Qwen3-30B block")
        for tokens in (64, 512)
        for routing in ("one", "zipf", "half")
    )  # fmt: skip


def _tiny(name: str, tags: str = "interpret gpu", **fields: Any) -> Case:
    base: dict[str, Any] = {"tokens": 5, "experts": 6, "hidden": 128, "inter": 64, "top_k": 2}
    return Case(name, frozenset(tags.split()), MoeCase(**{**base, **fields}))


@functools.cache
def interpret_cases() -> tuple[Case, ...]:
    """Small enough for Triton's interpreter; they run on a GPU too."""
    both = [("tensor", False), ("block", True)]
    cases = [
        *(_tiny(f"{n}", block=b, tags="interpret gpu demo") for n, b in both),
        *(_tiny(f"{n} I=80 H=192", block=b, hidden=192, inter=80) for n, b in both),
        *(_tiny(f"{n} I=192 H=320", block=b, hidden=320, inter=192, tokens=9) for n, b in both),
        _tiny("tensor fp32 product", bf16_mul=False),
        _tiny("tensor one token", tokens=1),
        _tiny("block one expert", block=True, experts=1, top_k=1),
        _tiny("tensor shared, factor", shared=True, factor=2.5),
        *(_tiny(f"tensor {r}", routing=r, top_k=3) for r in ROUTINGS[1:]),
        *(_tiny(f"block {r}", routing=r, top_k=3, block=True, shared=True) for r in ("invalid", "none")),
        _tiny("tensor rank 1 of 2", ranks=2, rank=1, tokens=9),
        *(_tiny(f"{n} bf16 x", block=b, bf16_input=True, hidden=192) for n, b in both),
        _tiny("tensor gelu", activation="gelu"),
        _tiny("tensor swiglu limit", swiglu_limit=0.7, bf16_mul=False),
        _tiny("block swiglu limit and alpha", block=True, swiglu_limit=0.7, swiglu_alpha=1.702),
        _tiny("block 40 tokens to one expert", block=True, routing="one", tokens=40, top_k=1),
        *(_tiny(name, **{**_SMALL, **fields}) for name, fields in OPTIONS.items()),
    ]
    return tuple(cases)


_SMALL: dict[str, Any] = {"tokens": 3, "experts": 4}
# What beside the engine's arguments a call can ask for; with block scales, one scale a tensor, or BF16 weights.
OPTIONS: dict[str, dict[str, Any]] = {
    "tensor no combine": {"no_combine": True, "ranks": 2},
    "block no combine, invalid": {"block": True, "no_combine": True, "routing": "invalid"},
    "tensor bf16 bias": {"bias": "bfloat16"},
    "block fp32 bias, limit and alpha": {
        "block": True, "bias": "float32", "swiglu_limit": 0.7, "swiglu_alpha": 1.702, "inter": 80,
    },
    "tensor weight on input": {"weight_on_input": True, "shared": True, "factor": 2.5},
    "block weight on input, top-1": {"block": True, "weight_on_input": True, "top_k": 1},
    "tensor dynamic": {"static": False, "inter": 144, "hidden": 192},
    "tensor dynamic, bf16 x": {"static": False, "bf16_input": True, "inter": 80, "hidden": 192},
    "tensor dynamic I=192": {"static": False, "bf16_input": True, "inter": 192, "bf16_mul": False},
    "bf16": {"bf16_weights": True, "hidden": 192, "inter": 80},
    "bf16 gelu, shared": {"bf16_weights": True, "activation": "gelu", "shared": True, "ranks": 2},
    "tensor shared experts": {"shared_experts": 2, "factor": 2.5, "ranks": 2, "rank": 1, "routing": "invalid"},
    "block one token, shared expert": {"block": True, "tokens": 1, "shared_experts": 1, "no_combine": True},
    "bf16 all at once": {
        "bf16_weights": True, "bias": "bfloat16", "weight_on_input": True, "no_combine": True, "swiglu_alpha": 1.702,
        "swiglu_limit": 0.7, "routing": "invalid",
    },
}  # fmt: skip


@functools.cache
def gpu_cases() -> tuple[Case, ...]:
    """What decides a path, each value at least once with either kind of scale."""
    cases = list(interpret_cases())
    for block in (False, True):
        kind = "block" if block else "tensor"
        for tokens in (1, 2, 3, 7, 16, 33, 64, 130, 300, 777, 2049):
            cases.append(_gpu(f"{kind} T={tokens}", tokens=tokens, block=block))
        for inter in (16, 64, 80, 96, 192, 320, 384, 768):
            cases.append(_gpu(f"{kind} I={inter}", inter=inter, block=block, tokens=9))
            cases.append(_gpu(f"{kind} I={inter} T=300", inter=inter, block=block, tokens=300))
        for hidden in (64, 192, 384, 640, 1152, 2048):
            cases.append(_gpu(f"{kind} H={hidden}", hidden=hidden, block=block, tokens=33))
        for experts in (1, 2, 3, 5, 7, 9, 31, 96, 129, 512):
            cases.append(
                _gpu(f"{kind} E={experts}", experts=experts, top_k=min(4, experts), block=block, tokens=64)
            )
        for routing in ROUTINGS[1:]:
            for tokens in (8, 64, 300):
                cases.append(
                    _gpu(f"{kind} {routing} T={tokens}", routing=routing, block=block, tokens=tokens)
                )
        for routing in ("half", "zipf", "one"):  # more items than programs, of experts with several tiles
            cases.append(
                _gpu(
                    f"{kind} E=24 I=1536 {routing}",
                    routing=routing,
                    block=block,
                    experts=24,
                    inter=1536,
                    top_k=8,
                )
            )
        for rank in range(4):
            cases.append(
                _gpu(f"{kind} rank {rank} of 4", ranks=4, rank=rank, experts=8, block=block, shared=True)
            )
        cases.append(_gpu(f"{kind} K=1", top_k=1, block=block))
        cases.append(_gpu(f"{kind} K=16", top_k=16, block=block))
        cases.append(_gpu(f"{kind} K=22 E=64", top_k=22, experts=64, block=block))
        cases.append(
            _gpu(f"{kind} (7168, 1152)", hidden=7168, inter=1152, tokens=33, experts=4, top_k=2, block=block)
        )
        cases.append(
            _gpu(
                f"{kind} one expert, 1024 tokens",
                routing="one",
                tokens=1024,
                experts=64,
                top_k=1,
                block=block,
            )
        )
    for tokens in (3, 64):
        for block in (False, True):
            kind = f"{'block' if block else 'tensor'} T={tokens}"
            cases.append(_gpu(f"{kind} bf16 x", tokens=tokens, block=block, bf16_input=True))
            cases.append(_gpu(f"{kind} gelu", tokens=tokens, block=block, activation="gelu"))
            cases.append(
                _gpu(f"{kind} limit", tokens=tokens, block=block, swiglu_limit=0.7, swiglu_alpha=1.702)
            )
    for name, fields in OPTIONS.items():
        for tokens in (1, 33, 300):
            cases.append(_gpu(f"{name} T={tokens}", **{**fields, "tokens": tokens}))
    cases.append(_gpu("tensor fp32 product T=64", bf16_mul=False))
    cases.append(_gpu("tensor shared, factor T=64", shared=True, factor=2.5))
    return tuple(cases)


def _gpu(name: str, **fields: Any) -> Case:
    base: dict[str, Any] = {"tokens": 64, "experts": 16, "hidden": 512, "inter": 256, "top_k": 4}
    return Case(name, frozenset({"gpu"}), MoeCase(**{**base, **fields}))
