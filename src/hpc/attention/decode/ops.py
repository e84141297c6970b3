"""The same functions as `torch.ops.hpc.*`, for tracing. Eager calls bypass the dispatcher.

An op never returns an alias of an input: `attention_decode_*` return fresh (output, lse), their `_out` overloads write
the given output; the lse is empty unless asked for. For inference only: results never require a gradient, whatever the
inputs do, as in eager calls. A plan travels as the ints of `pack_plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpc.attention.decode.choose import Plan

_HEAD = "Tensor q, Tensor kcache, Tensor vcache, Tensor block_ids, Tensor num_seq_kvcache, "
_SCALES = "Tensor qscale, Tensor kscale, Tensor vscale, "
_TAIL = (
    "bool splitk=True, Tensor? task_map=None, Tensor? split_flag=None, float? softmax_scale=None, int? window=None, "
    "float? logit_cap=None, Tensor? sinks=None, bool return_lse=False, bool batch_invariant=False, int[]? plan=None"
)
_START = "int mtp=0, bool new_kv_included=False, "
_ARGUMENTS = {
    "attention_decode_bf16": _HEAD + _START + _TAIL,
    "attention_decode_fp8": _HEAD + _SCALES + _START + "int quant_type=1, " + _TAIL,
}

_LIBRARY = torch.library.Library("hpc", "FRAGMENT")
_BACKENDS = ("sm90", "portable")
_KERNELS = ("tokens", "rows")


def pack_plan(plan: Plan | None) -> list[int] | None:
    """A plan as ints, 0 for no register limit."""
    if plan is None:
        return None
    return [
        _BACKENDS.index(plan.backend), plan.ctas_per_sm, plan.block_rows, plan.warps_tok, plan.warps_row, plan.stages,
        plan.max_registers or 0, plan.num_splits, plan.min_chunk, _KERNELS.index(plan.kernel),
    ]  # fmt: skip


def unpack_plan(words: list[int] | None) -> Plan | None:
    """The plan of `pack_plan`'s ints."""
    if words is None:
        return None
    backend: Any = _BACKENDS[words[0]]
    kernel: Any = _KERNELS[words[9]]
    ctas, rows, warps_tok, warps_row, stages, registers, splits, chunk = words[1:9]
    return Plan(backend, ctas, rows, warps_tok, warps_row, stages, registers or None, splits, chunk, kernel)


def _public(name: str) -> Callable[..., Any]:
    import hpc

    function: Callable[..., Any] = getattr(hpc, name)
    return function


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=q.device)


def _run(name: str, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    result = _public(name)(**{**given, "plan": unpack_plan(given.get("plan"))})
    return result if isinstance(result, tuple) else (result, _no_lse(given["q"]))


def _fake(name: str, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    q, v_dim = given["q"], given["vcache"].shape[3]
    out = torch.empty((q.shape[0], q.shape[1], v_dim), dtype=torch.bfloat16, device=q.device)
    wanted = given.get("return_lse", False)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if wanted else _no_lse(q)


def _assign(num_seq_kvcache, num_head_kv, num_seq_q, new_kv_included, min_process_len, task_map, window=None):  # type: ignore[no-untyped-def]
    _public("assign_attention_decode_task")(
        num_seq_kvcache, task_map, num_head_kv, num_seq_q, new_kv_included, min_process_len, window=window
    )


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
_LIBRARY.define(
    "assign_attention_decode_task(Tensor num_seq_kvcache, int num_head_kv, int num_seq_q, bool new_kv_included, "
    "int min_process_len, Tensor(a!) task_map, int? window=None) -> ()"
)
_implement("assign_attention_decode_task", _assign, lambda *args, **kwargs: None)


def traced(
    name: str, args: tuple[Any, ...], output: torch.Tensor | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The op `name` as a node of the traced graph; `args` in the order of its schema, the plan as it is."""
    op = getattr(torch.ops.hpc, name)
    args = (*args[:-1], pack_plan(args[-1]))
    out: torch.Tensor
    lse: torch.Tensor
    if output is None:
        out, lse = op.default(*args)
    else:
        out, lse = output, op.out(*args, output=output)
    return (out, lse) if return_lse else out


def traced_assign(
    lens: torch.Tensor,
    task_map: torch.Tensor,
    num_head_kv: int,
    mtp: int,
    included: bool,
    min_process_len: int,
    window: int | None,
) -> torch.Tensor:
    """`assign_attention_decode_task` as a node of the traced graph."""
    op = torch.ops.hpc.assign_attention_decode_task.default
    op(lens, num_head_kv, mtp, included, min_process_len, task_map, window)
    return task_map
