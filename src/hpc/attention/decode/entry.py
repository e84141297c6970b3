"""The path of one decode call behind the public functions: signature, checks, plan, outputs, launch."""

from __future__ import annotations

import math
from typing import Any

import torch

from hpc.attention.decode import choose, launch, validate
from hpc.attention.decode.arguments import Arguments, plain_numbers
from hpc.attention.decode.reference import decode_reference
from hpc.common.errors import fail
from hpc.common.metadata import metadata_check

# A signature that passed its checks, with its launches. Bounded, since a serving process meets few.
_CALLS: dict[tuple[Any, ...], launch.Call] = {}
_MAX_CALLS = 4096
# The same by what is quick to read, each with a check of all tensors: the first few of those that share a key.
_QUICK: dict[tuple[Any, ...], list[tuple[Any, launch.Call]]] = {}
_MAX_SHARED = 4

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the checks and the plan read of a tensor; the device as an index, which is quicker than a torch.device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def decode(*given: Any) -> Result:
    """Run one call, given the fields of `Arguments` in their order."""
    (
        _, q, kcache, vcache, block_ids, seq_lens, scales, quant, mtp, new_kv_included, splitk, task_map,
        split_flag, output, softmax_scale, window, logit_cap, sinks, return_lse, batch_invariant, plan,
    ) = given  # fmt: skip
    # Numbers that equal others of another type would find their signature (1.0 == True == 1).
    if not (
        type(mtp) is int
        and (window is None or type(window) is int)
        and (softmax_scale is None or (type(softmax_scale) is float and math.isfinite(softmax_scale)))
        and (logit_cap is None or (type(logit_cap) is float and 0.0 < logit_cap < math.inf))
    ):
        return decode(*plain_numbers(Arguments(*given)))
    known: launch.Call | None = None
    quick: tuple[Any, ...] = ()
    signature: tuple[Any, ...] = ()
    tensors: list[Any] = []
    try:
        if q.is_cuda:
            tensors += (q, kcache, vcache, block_ids, seq_lens)
            address = q.data_ptr() | kcache.data_ptr() | vcache.data_ptr()
            if quant >= 0:
                tensors += scales
                address |= scales[1].data_ptr() if quant == 0 else 0  # may be bytes of a cache's buffer
            if task_map is not None:
                tensors.append(task_map)
                address |= task_map.data_ptr()
            if output is not None:
                tensors.append(output)
                address |= output.data_ptr()
            if sinks is not None:
                tensors.append(sinks)
            if split_flag is not None:
                tensors.append(split_flag)
            quick = (
                quant, mtp, new_kv_included, splitk, window, logit_cap is None, return_lse, batch_invariant, plan,
                task_map is None, output is None, sinks is None, split_flag is None, block_ids.numel(),
                None if address % 16 == 0 else tuple(tensor.data_ptr() % 16 for tensor in tensors),
            )  # fmt: skip
            for same, call in _QUICK.get(quick, ()):
                if same(*tensors):
                    known = call
                    break
            else:
                signature = (quick, *map(_facts, tensors))
    except (AttributeError, TypeError):
        pass  # something is not what it should be: the checks say what
    if known is None:
        known = _CALLS.get(signature) or _new_call(Arguments(*given))
        if known is None:
            return _reference(Arguments(*given))
        if signature:
            _remember(quick, signature, tensors, known)
    return known.run(
        q, kcache, vcache, block_ids, seq_lens, scales, task_map, sinks, softmax_scale, logit_cap, output
    )


def _new_call(args: Arguments) -> launch.Call | None:
    """Check the arguments; the call for their signature, or None where there is nothing to launch."""
    key, layout = validate.call(args)
    if not args.q.is_cuda or key.batch == 0:
        return None
    return launch.Call(key, _legal(args.function, args.plan, key), args.q.device.index, layout, args.window)


def _remember(
    quick: tuple[Any, ...], signature: tuple[Any, ...], tensors: list[torch.Tensor], call: launch.Call
) -> None:
    if len(_CALLS) >= _MAX_CALLS:
        _CALLS.clear()
        _QUICK.clear()
    _CALLS[signature] = call
    shared = _QUICK.setdefault(quick, [])
    if len(shared) < _MAX_SHARED:
        check = metadata_check(tensors)
        if check is not None:
            shared.append((check, call))


def _legal(function: str, plan: choose.Plan | None, key: choose.Key) -> choose.Plan:
    if plan is None:
        return choose.choose(key)
    why = choose.is_legal(plan, key)
    if why is not None:
        fail(function, "plan", expected="a plan that can run this call", got=why, remedy="Pass plan=None.")
    return plan


@torch.no_grad()
def _reference(args: Arguments) -> Result:
    """The reference, so that the library can be tried anywhere; also the empty batch."""
    qscale, kscale, vscale = args.scales
    out, lse = decode_reference(
        args.q, args.kcache, args.vcache, args.block_ids, args.seq_lens, num_new_tokens=args.mtp + 1,
        new_kv_included=args.new_kv_included, qscale=qscale, kscale=kscale, vscale=vscale,
        quant_type=args.quant if args.quant >= 0 else None, softmax_scale=args.softmax_scale, window=args.window,
        logit_cap=args.logit_cap, sinks=args.sinks, dtype=torch.float32,
    )  # fmt: skip
    out = out.to(torch.bfloat16)
    if args.output is not None:
        out = args.output.copy_(out)
    return (out, lse) if args.return_lse else out
