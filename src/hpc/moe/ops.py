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
    f"Tensor? act_and_mul_scale, {_ROUTING}, bool use_bf16_mul=True"
)
_BLOCK = (
    "Tensor x, Tensor? x_scale, Tensor gate_up_weight, Tensor gate_up_weight_scale, Tensor down_weight, "
    f"Tensor down_weight_scale, {_ROUTING}"
)
_BF16 = f"Tensor x, Tensor gate_up_weight, Tensor down_weight, {_ROUTING}"
_OPTIONS = (
    "float routed_scaling_factor=1.0, Tensor? input_scale=None, str activation='silu', float? swiglu_limit=None, "
    "float? swiglu_alpha=None, Tensor? gate_up_bias=None, Tensor? down_bias=None, bool no_combine=False, "
    "bool apply_router_weight_on_input=False, int num_fused_shared_experts=0"
)
PER_TENSOR = ("fuse_moe", "fuse_moe_pertensor_fp8")
BLOCK = ("fuse_moe_blockwise", "fuse_moe_blockwise_fp8")
BF16 = ("fuse_moe_bf16",)

_LIBRARY = torch.library.Library("hpc", "FRAGMENT")


def _per_tensor(name: str, output: torch.Tensor | None, x, gate_up_weight, down_weight, gate_up_scale, down_scale,
                act_and_mul_scale, topk_ids, topk_scale, shared_output, rank_ep, num_expert_total, use_bf16_mul=True,
                *, input_scale=None, gate_up_bias=None, down_bias=None, **options):  # type: ignore[no-untyped-def]  # fmt: skip
    from hpc.moe import entry

    given = Arguments(x, gate_up_weight, down_weight, gate_up_scale, down_scale, topk_ids, topk_scale, None,
                      act_and_mul_scale, shared_output, output, input_scale, gate_up_bias, down_bias)  # fmt: skip
    return entry.fused(name, given, rank_ep, num_expert_total, use_bf16_mul, **options)


def _block(name: str, output: torch.Tensor | None, x, x_scale, gate_up_weight, gate_up_weight_scale, down_weight,
           down_weight_scale, topk_ids, topk_scale, shared_output, rank_ep, num_expert_total, *, input_scale=None,
           gate_up_bias=None, down_bias=None, **options):  # type: ignore[no-untyped-def]  # fmt: skip
    from hpc.moe import entry

    given = Arguments(x, gate_up_weight, down_weight, gate_up_weight_scale, down_weight_scale, topk_ids, topk_scale,
                      x_scale, None, shared_output, output, input_scale, gate_up_bias, down_bias, "block")  # fmt: skip
    return entry.fused(name, given, rank_ep, num_expert_total, **options)


def _bf16(name: str, output: torch.Tensor | None, x, gate_up_weight, down_weight, topk_ids, topk_scale, shared_output,
          rank_ep, num_expert_total, *, input_scale=None, gate_up_bias=None, down_bias=None,
          **options):  # type: ignore[no-untyped-def]  # fmt: skip
    from hpc.moe import entry

    given = Arguments(x, gate_up_weight, down_weight, None, None, topk_ids, topk_scale, None, None, shared_output,
                      output, input_scale, gate_up_bias, down_bias, "bf16")  # fmt: skip
    return entry.fused(name, given, rank_ep, num_expert_total, **options)


def _register(name: str, head: str, run: Any) -> None:
    def plain(*args: Any, **options: Any) -> torch.Tensor:
        return run(name, None, *args, **options)  # type: ignore[no-any-return]

    def out(*args: Any, output: torch.Tensor, **options: Any) -> None:
        run(name, output, *args, **options)

    where = [each.split()[1] for each in head.split(", ")].index("topk_ids")

    def fake(*args: Any, **options: Any) -> torch.Tensor:
        x = args[0] if args else options["x"]
        shape = x.shape
        if options.get("no_combine"):
            ids = args[where] if len(args) > where else options["topk_ids"]
            shape = (x.shape[0], ids.shape[1] + options.get("num_fused_shared_experts", 0), x.shape[1])
        return torch.empty(shape, dtype=torch.bfloat16, device=x.device)

    _LIBRARY.define(f"{name}({head}, *, {_OPTIONS}) -> Tensor")
    _LIBRARY.define(f"{name}.out({head}, *, {_OPTIONS}, Tensor(a!) output) -> ()")
    _LIBRARY.impl(name, plain, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}.out", out, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hpc::{name}", fake, lib=_LIBRARY)
    torch.library.register_fake(f"hpc::{name}.out", lambda *args, **rest: None, lib=_LIBRARY)


for _name in PER_TENSOR:
    _register(_name, _PER_TENSOR, _per_tensor)
for _name in BLOCK:
    _register(_name, _BLOCK, _block)
for _name in BF16:
    _register(_name, _BF16, _bf16)


def traced(
    name: str, args: Arguments, rank_ep: int, num_expert_total: int, use_bf16_mul: bool, **options: Any
) -> torch.Tensor:
    """The op `name` as a node of the traced graph."""
    op = getattr(torch.ops.hpc, name)
    tail = (args.topk_ids, args.topk_scale, args.shared_output, rank_ep, num_expert_total)
    given: tuple[Any, ...]
    if name in PER_TENSOR:
        weights = (args.w13, args.w2, args.w13_scale, args.w2_scale, args.act_scale)
        given = (args.x, *weights, *tail, use_bf16_mul)
    elif name in BF16:
        given = (args.x, args.w13, args.w2, *tail)
    else:
        given = (args.x, args.x_scale, args.w13, args.w13_scale, args.w2, args.w2_scale, *tail)
    options.update(input_scale=args.input_scale, gate_up_bias=args.w13_bias, down_bias=args.w2_bias)
    if args.output is None:
        return op.default(*given, **options)  # type: ignore[no-any-return]
    op.out(*given, **options, output=args.output)
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
