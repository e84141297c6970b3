"""The same functions as `torch.ops.hpc.*`, for tracing. Eager calls bypass the dispatcher.

An op never returns an alias of an input: the default overloads return fresh (output, lse), their `.out` overloads write
the given output; the lse is empty unless asked for. For inference only: results never require a gradient. A plan
travels as the ints of `pack_plan`. `max_seqlens_q` decides nothing and travels as an int, 0 for a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpc.attention.prefill.plan import Plan

_SCALES = "Tensor qscale, Tensor kscale, Tensor vscale, "
_PAGED = "Tensor cu_seqlens_q, Tensor block_ids, Tensor seqlens_kvcache, SymInt max_seqlens_q, "
_TAIL = (
    "float? softmax_scale=None, int? window=None, float? logit_cap=None, Tensor? sinks=None, bool causal=True, "
    "bool return_lse=False, int[]? plan=None"
)
_CACHES = "Tensor q, Tensor kcache, Tensor vcache, "
_ARGUMENTS = {
    "attention_with_kvcache_prefill_bf16": _CACHES + _PAGED + _TAIL,
    "attention_with_kvcache_prefill_fp8": _CACHES + _SCALES + _PAGED + "int quant_type=1, " + _TAIL,
    "attention_prefill_bf16": (
        "Tensor q, Tensor k, Tensor v, Tensor seqlens_q, Tensor cu_seqlens_q, SymInt max_seqlens_q, " + _TAIL
    ),
}

_LIBRARY = torch.library.Library("hpc", "FRAGMENT")
_BACKENDS = ("sm90", "portable")


def pack_plan(plan: Plan | None) -> list[int] | None:
    """A plan as ints."""
    if plan is None:
        return None
    return [
        _BACKENDS.index(plan.backend),
        plan.pack,
        plan.block_m,
        plan.block_n,
        plan.warps,
        plan.stages,
        plan.short_pack,
        plan.splits,
        int(plan.overlap),
    ]


def unpack_plan(words: list[int] | None) -> Plan | None:
    """The plan of `pack_plan`'s ints."""
    if words is None:
        return None
    backend: Any = _BACKENDS[words[0]]
    pack, block_m, block_n, warps, stages, short_pack, splits, overlap = words[1:]
    return Plan(backend, pack, block_m, block_n, warps, stages, short_pack, splits, bool(overlap))


def _public(name: str) -> Callable[..., Any]:
    from hpc.attention.prefill import api

    function: Callable[..., Any] = getattr(api, name)
    return function


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=q.device)


def _run(name: str, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    result = _public(name)(**{**given, "plan": unpack_plan(given.get("plan"))})
    return result if isinstance(result, tuple) else (result, _no_lse(given["q"]))


def _fake(name: str, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    q = given["q"]
    v_dim = given["v" if "v" in given else "vcache"].shape[-1]
    out = torch.empty((q.shape[0], q.shape[1], v_dim), dtype=torch.bfloat16, device=q.device)
    wanted = given.get("return_lse", False)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if wanted else _no_lse(q)


def _implement(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"hpc::{name}", fake, lib=_LIBRARY)


def _register(name: str, arguments: str) -> None:
    _LIBRARY.define(f"{name}({arguments}) -> (Tensor, Tensor)")
    _LIBRARY.define(f"{name}.out({arguments}, *, Tensor(a!) output) -> Tensor")
    names = [argument.name for argument in getattr(torch.ops.hpc, name).default._schema.arguments]

    def body(of: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
        def both(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return of(name, {**dict(zip(names, args, strict=False)), **kwargs})

        return both

    def second(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*args, **kwargs)[1]

    _implement(name, body(_run), body(_fake))
    _implement(f"{name}.out", second(body(_run)), second(body(_fake)))


for _name, _arguments in _ARGUMENTS.items():
    _register(_name, _arguments)


def traced(
    name: str, args: tuple[Any, ...], output: torch.Tensor | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The op `name` as a node of the traced graph; `args` in the order of its schema, the plan as it is."""
    op = getattr(torch.ops.hpc, name)
    tail = _TAIL.count(",") + 1 + ("fp8" in name)
    longest = len(args) - tail - 1
    args = (
        *args[:longest],
        0 if isinstance(args[longest], torch.Tensor) else args[longest],
        *args[longest + 1 : -1],
        pack_plan(args[-1]),
    )
    out: torch.Tensor
    lse: torch.Tensor
    if output is None:
        out, lse = op.default(*args)
    else:
        out, lse = output, op.out(*args, output=output)
    return (out, lse) if return_lse else out
