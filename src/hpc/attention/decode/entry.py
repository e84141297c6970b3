"""The path of one decode call behind the public functions: signature, checks, plan, outputs, launch."""

from __future__ import annotations

from typing import Any

import torch

from hpc.attention.decode import choose, launch, validate
from hpc.attention.decode.reference import decode_reference
from hpc.common.errors import fail

# A signature that passed its checks, with its launches. Bounded, since a serving process meets few.
_CALLS: dict[tuple[Any, ...], launch.Call] = {}
_MAX_CALLS = 4096

Scales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _facts(tensor: torch.Tensor | None) -> Any:
    """What the checks and the plan read of a tensor; the device as an index, which is quicker than a torch.device."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())


def decode(
    function: str,
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    block_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: Scales,
    quant: int,
    mtp: int,
    new_kv_included: bool,
    splitk: bool,
    task_map: torch.Tensor | None,
    split_flag: torch.Tensor | None,
    output: torch.Tensor | None,
    softmax_scale: float | None,
    window: int | None,
    logit_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    batch_invariant: bool,
    plan: choose.Plan | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run one call; see `hpc.attention_decode_bf16` for the arguments."""
    known: launch.Call | None = None
    signature: tuple[Any, ...] = ()
    if isinstance(q, torch.Tensor) and q.is_cuda:
        try:
            address = (
                q.data_ptr()
                | kcache.data_ptr()
                | vcache.data_ptr()
                | (0 if output is None else output.data_ptr())
            )
            signature = (
                _facts(q), _facts(kcache), _facts(vcache), _facts(block_ids), _facts(seq_lens), _facts(scales[0]),
                _facts(scales[1]), _facts(scales[2]), _facts(task_map), _facts(split_flag), _facts(output),
                _facts(sinks), quant, mtp, new_kv_included, splitk, window, logit_cap is None, return_lse,
                batch_invariant, plan, address % 16,
            )  # fmt: skip
            known = _CALLS.get(signature)
        except (AttributeError, TypeError):
            known = None  # something is not what it should be: the checks say what
    if known is None:
        key, layout = validate.call(
            function, q, kcache, vcache, block_ids, seq_lens, scales, quant, mtp, new_kv_included, splitk, task_map,
            split_flag, output, window, logit_cap, sinks, return_lse, batch_invariant,
        )  # fmt: skip
        if not q.is_cuda or key.batch == 0:
            return _on_cpu(q, kcache, vcache, block_ids, seq_lens, scales, quant, key, output, softmax_scale, window,
                           logit_cap, sinks, return_lse)  # fmt: skip
        known = launch.Call(key, _legal(function, plan, key), q.device.index, layout, window)
        if len(_CALLS) >= _MAX_CALLS:
            _CALLS.clear()
        _CALLS[signature] = known
    if output is None:
        output = torch.empty((q.shape[0], q.shape[1], vcache.shape[3]), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    scale = q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
    cap = 1.0 if logit_cap is None else float(logit_cap)
    known.run(q, kcache, vcache, block_ids, seq_lens, scales, task_map, sinks, scale, cap, output, lse)
    return output if lse is None else (output, lse)


def _legal(function: str, plan: choose.Plan | None, key: choose.Key) -> choose.Plan:
    if plan is None:
        return choose.choose(key)
    why = choose.is_legal(plan, key)
    if why is not None:
        fail(function, "plan", expected="a plan that can run this call", got=why, remedy="Pass plan=None.")
    return plan


def _on_cpu(q: torch.Tensor, kcache: torch.Tensor, vcache: torch.Tensor, block_ids: torch.Tensor,
            seq_lens: torch.Tensor, scales: Scales, quant: int, key: choose.Key, output: torch.Tensor | None,
            softmax_scale: float | None, window: int | None, logit_cap: float | None, sinks: torch.Tensor | None,
            return_lse: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The reference, so that the library can be tried anywhere; also the empty batch."""
    out, lse = decode_reference(
        q, kcache, vcache, block_ids, seq_lens, num_new_tokens=key.num_new_tokens, new_kv_included=key.new_kv_included,
        qscale=scales[0], kscale=scales[1], vscale=scales[2], quant_type=quant if quant >= 0 else None,
        softmax_scale=softmax_scale, window=window, logit_cap=logit_cap, sinks=sinks, dtype=torch.float32,
    )  # fmt: skip
    out = out.to(torch.bfloat16)
    if output is not None:
        out = output.copy_(out)
    return (out, lse) if return_lse else out
