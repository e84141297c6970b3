"""The same functions as `torch.ops.hpc.*`, for tracing. Eager calls bypass the dispatcher.

An op never returns an alias of an input: `attention_decode_*` return fresh (output, lse), their `_out` overloads write
the given output; the lse is empty unless asked for.
"""

from __future__ import annotations

from typing import Any

import torch

_TAIL = (
    "int mtp=0, bool new_kv_included=False, {quant}bool splitk=True, Tensor? task_map=None, float? softmax_scale=None, "
    "int? window=None, float? logit_cap=None, Tensor? sinks=None, bool return_lse=False, bool batch_invariant=False"
)
_HEAD = "Tensor q, Tensor kcache, Tensor vcache, Tensor block_ids, Tensor num_seq_kvcache, "
_SCALES = "Tensor qscale, Tensor kscale, Tensor vscale, "
_BF16 = _HEAD + _TAIL.format(quant="")
_FP8 = _HEAD + _SCALES + _TAIL.format(quant="int quant_type=1, ")

_LIBRARY = torch.library.Library("hpc", "FRAGMENT")
_LIBRARY.define(f"attention_decode_bf16({_BF16}) -> (Tensor, Tensor)")
_LIBRARY.define(f"attention_decode_bf16.out({_BF16}, *, Tensor(a!) output) -> Tensor")
_LIBRARY.define(f"attention_decode_fp8({_FP8}) -> (Tensor, Tensor)")
_LIBRARY.define(f"attention_decode_fp8.out({_FP8}, *, Tensor(a!) output) -> Tensor")
_LIBRARY.define(
    "assign_attention_decode_task(Tensor num_seq_kvcache, int num_head_kv, int num_seq_q, bool new_kv_included, "
    "int min_process_len, Tensor(a!) task_map, int? window=None) -> ()"
)


def _run(name: str, args: tuple[Any, ...], quant: int, return_lse: bool, output: torch.Tensor | None,
         tail: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from hpc.attention.decode import entry

    mtp, included, splitk, task_map, scale, window, cap, sinks, invariant = tail
    q, kcache, vcache, block_ids, lens = args[:5]
    scales = args[5:8] if quant >= 0 else (None, None, None)
    result = entry.decode(name, q, kcache, vcache, block_ids, lens, scales, quant, mtp, included, splitk, task_map,
                          None, output, scale, window, cap, sinks, return_lse, invariant, None)  # fmt: skip
    if isinstance(result, tuple):
        return result
    return result, _no_lse(args[0])


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=q.device)


def _bf16(q, kcache, vcache, block_ids, num_seq_kvcache, mtp=0, new_kv_included=False, splitk=True, task_map=None,
          softmax_scale=None, window=None, logit_cap=None, sinks=None, return_lse=False, batch_invariant=False,
          output=None):  # type: ignore[no-untyped-def]  # fmt: skip
    tail = (mtp, new_kv_included, splitk, task_map, softmax_scale, window, logit_cap, sinks, batch_invariant)
    args = (q, kcache, vcache, block_ids, num_seq_kvcache)
    return _run("attention_decode_bf16", args, -1, return_lse, output, tail)


def _fp8(q, kcache, vcache, block_ids, num_seq_kvcache, qscale, kscale, vscale, mtp=0, new_kv_included=False,
         quant_type=1, splitk=True, task_map=None, softmax_scale=None, window=None, logit_cap=None, sinks=None,
         return_lse=False, batch_invariant=False, output=None):  # type: ignore[no-untyped-def]  # fmt: skip
    tail = (mtp, new_kv_included, splitk, task_map, softmax_scale, window, logit_cap, sinks, batch_invariant)
    args = (q, kcache, vcache, block_ids, num_seq_kvcache, qscale, kscale, vscale)
    return _run("attention_decode_fp8", args, quant_type, return_lse, output, tail)


def _assign(num_seq_kvcache, num_head_kv, num_seq_q, new_kv_included, min_process_len, task_map, window=None):  # type: ignore[no-untyped-def]
    from hpc.attention.decode import api_tasks

    api_tasks.assign_attention_decode_task(
        num_seq_kvcache, task_map, num_head_kv, num_seq_q, new_kv_included, min_process_len, window=window
    )


def _fake(q: torch.Tensor, vcache: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty((q.shape[0], q.shape[1], vcache.shape[3]), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else _no_lse(q)
    return out, lse


def _register() -> None:
    for op, run in (("attention_decode_bf16", _bf16), ("attention_decode_fp8", _fp8)):
        at = 13 if run is _bf16 else 17  # position of return_lse among the positional arguments

        def wants_lse(args: tuple[Any, ...], kwargs: dict[str, Any], at: int = at) -> bool:
            return bool(args[at]) if len(args) > at else bool(kwargs.get("return_lse", False))

        def fake(*args: Any, wants_lse: Any = wants_lse, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            q, vcache = (args[i] if len(args) > i else kwargs[n] for i, n in ((0, "q"), (2, "vcache")))
            return _fake(q, vcache, wants_lse(args, kwargs))

        def out_run(*args: Any, run: Any = run, **kwargs: Any) -> torch.Tensor:
            lse: torch.Tensor = run(*args, **kwargs)[1]
            return lse

        def out_fake(*args: Any, fake: Any = fake, **kwargs: Any) -> torch.Tensor:
            lse: torch.Tensor = fake(*args, **{k: v for k, v in kwargs.items() if k != "output"})[1]
            return lse

        for name, implementation, meta in ((op, run, fake), (f"{op}.out", out_run, out_fake)):
            _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
            torch.library.register_fake(f"hpc::{name}", meta, lib=_LIBRARY)
    _LIBRARY.impl("assign_attention_decode_task", _assign, "CompositeExplicitAutograd")
    torch.library.register_fake("hpc::assign_attention_decode_task", lambda *a, **k: None, lib=_LIBRARY)


_register()


def traced(
    name: str, args: tuple[Any, ...], output: torch.Tensor | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The op `name` as a node of the traced graph; `args` in the order of its schema."""
    op = getattr(torch.ops.hpc, name)
    out: torch.Tensor
    lse: torch.Tensor
    if output is None:
        out, lse = op.default(*args)
    else:
        out, lse = output, op.out(*args, output=output)
    return (out, lse) if return_lse else out


def traced_assign(lens, task_map, num_head_kv, mtp, included, min_process_len, window):  # type: ignore[no-untyped-def]
    """`assign_attention_decode_task` as a node of the traced graph."""
    op = torch.ops.hpc.assign_attention_decode_task.default
    op(lens, num_head_kv, mtp, included, min_process_len, task_map, window)
    return task_map
