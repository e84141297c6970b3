"""The same functions as `torch.ops.hpc.*`, for tracing. Eager calls bypass the dispatcher.

An op never returns an alias of an input: the plain ones return a fresh tensor, their `.out` overloads write the given
one and return nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from hpc.moe.validate import Arguments

_ROUTING = "Tensor topk_ids, Tensor topk_scale, Tensor? shared_output, int rank_ep, int num_expert_total"
_PER_TENSOR = (
    "Tensor x, Tensor gate_up_weight, Tensor down_weight, Tensor gate_up_scale, Tensor down_scale, "
    f"Tensor act_and_mul_scale, {_ROUTING}, bool use_bf16_mul=True"
)
_BLOCK = (
    "Tensor x, Tensor x_scale, Tensor gate_up_weight, Tensor gate_up_weight_scale, Tensor down_weight, "
    f"Tensor down_weight_scale, {_ROUTING}"
)
_FACTOR = "float routed_scaling_factor=1.0"
PER_TENSOR = ("fuse_moe", "fuse_moe_pertensor_fp8")
BLOCK = ("fuse_moe_blockwise", "fuse_moe_blockwise_fp8")

_LIBRARY = torch.library.Library("hpc", "FRAGMENT")


def _run_per_tensor(name: str, args: tuple[Any, ...], output: torch.Tensor | None) -> torch.Tensor:
    from hpc.moe import entry

    x, w13, w2, s13, s2, act, ids, weights, shared, rank, total, bf16_mul, factor = args
    given = Arguments(x, w13, w2, s13, s2, ids, weights, None, act, shared, output)
    return entry.fused(name, given, rank, total, bf16_mul, factor)


def _run_block(name: str, args: tuple[Any, ...], output: torch.Tensor | None) -> torch.Tensor:
    from hpc.moe import entry

    x, x_scale, w13, s13, w2, s2, ids, weights, shared, rank, total, factor = args
    given = Arguments(x, w13, w2, s13, s2, ids, weights, x_scale, None, shared, output)
    return entry.fused(name, given, rank, total, True, factor)


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)


def _register(name: str, head: str, run: Any) -> None:
    defaults = (True, 1.0) if name in PER_TENSOR else (1.0,)
    required = len(head.split(", ")) - (1 if name in PER_TENSOR else 0)

    def complete(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args, *defaults[len(args) - required :])

    def plain(*args: Any, routed_scaling_factor: float = 1.0) -> torch.Tensor:
        return run(name, (*complete((*args,))[:-1], routed_scaling_factor), None)  # type: ignore[no-any-return]

    def out(*args: Any, output: torch.Tensor, routed_scaling_factor: float = 1.0) -> None:
        run(name, (*complete((*args,))[:-1], routed_scaling_factor), output)

    _LIBRARY.define(f"{name}({head}, *, {_FACTOR}) -> Tensor")
    _LIBRARY.define(f"{name}.out({head}, *, {_FACTOR}, Tensor(a!) output) -> ()")
    _LIBRARY.impl(name, plain, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}.out", out, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hpc::{name}", lambda *args, **rest: _fake(args[0]), lib=_LIBRARY)
    torch.library.register_fake(f"hpc::{name}.out", lambda *args, **rest: None, lib=_LIBRARY)


for _name in PER_TENSOR:
    _register(_name, _PER_TENSOR, _run_per_tensor)
for _name in BLOCK:
    _register(_name, _BLOCK, _run_block)


def traced(
    name: str, args: Arguments, rank_ep: int, num_expert_total: int, use_bf16_mul: bool, factor: float
) -> torch.Tensor:
    """The op `name` as a node of the traced graph."""
    op = getattr(torch.ops.hpc, name)
    tail = (args.topk_ids, args.topk_scale, args.shared_output, rank_ep, num_expert_total)
    given: tuple[Any, ...]
    if name in PER_TENSOR:
        given = (
            args.x,
            args.w13,
            args.w2,
            args.w13_scale,
            args.w2_scale,
            args.act_scale,
            *tail,
            use_bf16_mul,
        )
    else:
        given = (args.x, args.x_scale, args.w13, args.w13_scale, args.w2, args.w2_scale, *tail)
    if args.output is None:
        return op.default(*given, routed_scaling_factor=factor)  # type: ignore[no-any-return]
    op.out(*given, routed_scaling_factor=factor, output=args.output)
    return args.output


def _count_and_gather(x, topk_ids, num_expert, rank_ep, intermediate_size, num_seq_per_group_avg):  # type: ignore[no-untyped-def]
    from hpc.moe import parts

    return parts.count_and_gather(x, topk_ids, num_expert, rank_ep, intermediate_size, num_seq_per_group_avg)


def _fake_count_and_gather(x, topk_ids, num_expert, rank_ep, intermediate_size, num_seq_per_group_avg):  # type: ignore[no-untyped-def]
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    return (
        empty(pairs, x.shape[1], dtype=x.dtype), empty(pairs, intermediate_size, dtype=torch.bfloat16),
        empty(*topk_ids.shape), empty(num_expert), empty(num_expert + 1), empty(num_expert), empty(num_expert + 1),
        empty(2 * num_expert, 128, dtype=torch.int8), empty(2 * num_expert, 128, dtype=torch.int8),
    )  # fmt: skip


def _reduce(x, topk_pos, topk_scale, shared_output=None):  # type: ignore[no-untyped-def]
    from hpc.moe import parts

    return parts.reduce(x, topk_pos, topk_scale, shared_output)


def _fake_reduce(x, topk_pos, topk_scale, shared_output=None):  # type: ignore[no-untyped-def]
    return torch.empty((topk_pos.shape[0], x.shape[1]), dtype=torch.bfloat16, device=x.device)


def _register_parts() -> None:
    tensors = ", ".join(["Tensor"] * 9)
    _LIBRARY.define(
        "count_and_gather(Tensor x, Tensor topk_ids, int num_expert, int rank_ep, int intermediate_size, "
        f"int num_seq_per_group_avg) -> ({tensors})"
    )
    _LIBRARY.define(
        "reduce(Tensor x, Tensor topk_pos, Tensor topk_scale, Tensor? shared_output=None) -> Tensor"
    )
    for name, run, fake in (
        ("count_and_gather", _count_and_gather, _fake_count_and_gather),
        ("reduce", _reduce, _fake_reduce),
    ):
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hpc::{name}", fake, lib=_LIBRARY)


_register_parts()
