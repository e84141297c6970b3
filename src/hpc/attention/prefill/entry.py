"""The path of one prefill call behind the public functions: signature, checks, plan, outputs, launch."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from hpc.attention.prefill import launch, plan, validate
from hpc.attention.prefill.reference import prefill_reference
from hpc.attention.prefill.validate import Arguments
from hpc.common.errors import fail

# A signature that passed its checks, with its launches. Bounded, since a serving process meets few.
_CALLS: dict[tuple[Any, ...], launch.Call] = {}
_MAX_CALLS = 4096

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _rows(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the checks and the plan read of a tensor whose number of rows changes from call to call."""
    return tensor.shape[1:], tensor.stride(), tensor.dtype, tensor.get_device()


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def prefill(*given: Any) -> Result:
    """Run one call, given the fields of `validate.Arguments` in their order."""
    (
        _, q, k, v, cu_seqlens, block_ids, seq_lens, max_seqlens_q, scales, quant, output, softmax_scale, window,
        logit_cap, sinks, causal, return_lse, chosen,
    ) = given  # fmt: skip
    # Numbers that equal others of another type would find their signature (1.0 == True == 1).
    if not (
        (window is None or type(window) is int)
        and (softmax_scale is None or (type(softmax_scale) is float and math.isfinite(softmax_scale)))
        and (logit_cap is None or (type(logit_cap) is float and 0.0 < logit_cap < math.inf))
    ):
        return prefill(*validate.plain_numbers(Arguments(*given)))
    signature: tuple[Any, ...] = ()
    try:
        if q.is_cuda and _counts_agree(
            q, k, cu_seqlens, block_ids, seq_lens, max_seqlens_q, scales[0], output
        ):
            address = q.data_ptr() | k.data_ptr() | v.data_ptr()
            if output is not None:
                address |= output.data_ptr()
            qscale, kscale, vscale = scales
            paged = block_ids is not None
            signature = (
                address % 16, _rows(q), _facts(k) if paged else _rows(k), _facts(v) if paged else _rows(v),
                cu_seqlens.stride(), cu_seqlens.dtype, cu_seqlens.get_device(), seq_lens.stride(), seq_lens.dtype,
                seq_lens.get_device(), (block_ids.dim(), block_ids.dtype, block_ids.get_device()) if paged else None,
                quant, None if quant < 0 else (qscale.dtype, qscale.get_device(), _facts(kscale), kscale.data_ptr() % 4,
                                               _facts(vscale)),
                None if output is None else _rows(output), None if sinks is None else _facts(sinks), window,
                softmax_scale is None or softmax_scale > 0, logit_cap is None, causal, return_lse, chosen,
            )  # fmt: skip
    except (AttributeError, TypeError, IndexError):
        signature = ()  # something is not what it should be: the checks say what
    known = _CALLS.get(signature) or _new_call(Arguments(*given), signature)
    if known is None:
        return _reference(Arguments(*given))
    return known.run(
        q, k, v, cu_seqlens, block_ids, seq_lens, scales, sinks, softmax_scale, logit_cap, output
    )


def _counts_agree(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor, block_ids: torch.Tensor | None, seq_lens: torch.Tensor,
    max_seqlens_q: int | torch.Tensor, qscale: torch.Tensor | None, output: torch.Tensor | None,
) -> bool:  # fmt: skip
    """Whether the row and request counts, which are not part of the signature, fit each other."""
    rows, batch = q.shape[0], seq_lens.shape[0]
    if cu_seqlens.shape != (batch + 1,) or (output is not None and output.shape[0] != rows) or not rows:
        return False
    if isinstance(max_seqlens_q, torch.Tensor):
        if max_seqlens_q.numel() != 1:
            return False
    else:
        longest = operator.index(max_seqlens_q)
        if longest < 0 or type(max_seqlens_q) is bool:
            return False
        if qscale is not None and qscale.shape[2] < min(longest, rows):
            return False
    if qscale is not None and (
        qscale.shape[:2] != (batch, q.shape[1]) or (qscale.shape[2] > 1 and qscale.stride(2) != 1)
    ):
        return False
    if block_ids is None:
        return bool(k.shape[0] == rows)
    return bool(block_ids.shape[0] == batch and (block_ids.shape[1] <= 1 or block_ids.stride(1) == 1))


def _new_call(args: Arguments, signature: tuple[Any, ...]) -> launch.Call | None:
    """Check the arguments; the call for their signature, or None where there is nothing to launch."""
    key, layout = validate.call(args)
    if not args.q.is_cuda or args.q.shape[0] == 0:
        return None
    call = launch.Call(key, _legal(args.function, args.plan, key), args.q.device.index, layout, args.window)
    if signature:
        if len(_CALLS) >= _MAX_CALLS:
            _CALLS.clear()
        _CALLS[signature] = call
    return call


def _legal(function: str, given: plan.Plan | None, key: plan.Key) -> plan.Plan:
    if given is None:
        return plan.choose(key)
    why = plan.is_legal(given, key)
    if why is not None:
        fail(function, "plan", expected="a plan that can run this call", got=why, remedy="Pass plan=None.")
    return given


@torch.no_grad()
def _reference(args: Arguments) -> Result:
    """The reference, so that the library can be tried anywhere; also the empty call."""
    qscale, kscale, vscale = args.scales
    out, lse = prefill_reference(
        args.q, args.k, args.v, args.cu_seqlens, args.block_ids, args.seq_lens if args.paged else None,
        qscale=qscale, kscale=kscale, vscale=vscale, quant_type=args.quant if args.quant >= 0 else None,
        softmax_scale=args.softmax_scale, window=args.window, logit_cap=args.logit_cap, sinks=args.sinks,
        causal=bool(args.causal), dtype=torch.float32,
    )  # fmt: skip
    out = out.to(torch.bfloat16)
    if args.output is not None:
        out = args.output.copy_(out)
    return (out, lse) if args.return_lse else out
