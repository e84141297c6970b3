"""The path of one call behind the public functions: signature, checks, plan, outputs, launch."""

from __future__ import annotations

from typing import Any

import torch

from hpc.common import arch
from hpc.common.errors import fail
from hpc.common.launch import raw_stream
from hpc.common.metadata import metadata_check
from hpc.rope import launch, plan, reference, validate
from hpc.rope.validate import FP8, Arguments

# Calls that passed their checks, by what is quick to read; each with a check of all its tensors, the first few of those
# that share a key. Bounded, since lengths of prompts vary.
_QUICK: dict[tuple[Any, ...], list[tuple[Any, launch.Call]]] = {}
_MAX_KEYS, _MAX_SHARED = 4096, 4

Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def prologue(x: Arguments, chosen: plan.Plan | None = None) -> Result:
    """Run one call: (out_q, q_scale, split_k_flag); the last two are None for BF16, q_scale also for policy 2."""
    known: launch.Call | None = None
    quick: tuple[Any, ...] = ()
    tensors: list[Any] = []
    try:
        if x.qkv.is_cuda:
            tensors, quick = _quick(x, chosen)
            for same, call in _QUICK.get(quick, ()):
                if same(*tensors):
                    known = call
                    break
    except (AttributeError, TypeError):
        known = None  # something is not what it should be: the checks say what
    if known is None:
        q_heads = validate.call(x)
        if not x.qkv.is_cuda:
            return by_reference(x, q_heads)
        known = _prepare(x, q_heads, chosen)
        _remember(quick, tensors, known)
    out_q, q_scale, flag = allocate(x, known.facts.q_heads)
    upper = validate.FP8_MAX if x.upper_max is None else float(x.upper_max)
    numbers = (float(x.eps), upper, _number(x.k_scale), _number(x.v_scale))
    known.run(pointers(x, (out_q, q_scale, flag), known.facts), numbers)
    return out_q, q_scale, flag


def _quick(x: Arguments, chosen: plan.Plan | None) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Every tensor of a call in a fixed order, and the rest of what decides its launch."""
    tensors = [x.qkv, x.key_cache, x.value_cache, x.cos_sin]
    present = 0
    for bit, tensor in enumerate((x.q_norm_weight, x.k_norm_weight, x.out_q, x.out_k, x.out_v)):
        if tensor is not None:
            tensors.append(tensor)
            present |= 1 << bit
    address = 0
    for tensor in tensors:
        address |= tensor.data_ptr()
    tensors += (x.seq_lens, x.q_index, x.block_ids)
    for bit, scale in enumerate((x.k_scale, x.v_scale, x.q_scale_inv), 5):
        if isinstance(scale, torch.Tensor):
            tensors.append(scale)
            present |= 1 << bit
        elif scale is not None:
            present |= 256 << bit if _is_number(scale) else 65536 << bit
    return tensors, (
        x.function, x.quant_policy, bool(x.is_prefill), x.max_seqlens, x.upper_max, x.qk_norm_policy, x.eps,
        bool(x.is_neox_style), chosen, present, x.qkv.numel(), x.block_ids.numel(), address % 16 == 0,
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _remember(quick: tuple[Any, ...], tensors: list[torch.Tensor], call: launch.Call) -> None:
    if not quick:
        return
    if len(_QUICK) >= _MAX_KEYS:
        _QUICK.clear()
    shared = _QUICK.setdefault(quick, [])
    if len(shared) < _MAX_SHARED:
        check = metadata_check(tensors) or _python_check(tensors)
        shared.append((check, call))


def _python_check(twins: list[torch.Tensor]) -> Any:
    """`metadata_check` where torch has no such check."""

    def facts(tensors: Any) -> list[Any]:
        return [(t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors]

    expected = facts(twins)
    return lambda *tensors: facts(tensors) == expected


def pointers(x: Arguments, outputs: Result, facts: launch.Facts) -> tuple[torch.Tensor, ...]:
    """Tensors in the kernel's order. One that the kernel does not read still needs an address."""
    other = x.qkv
    return (
        x.qkv, x.cos_sin, _or(x.q_norm_weight, other), _or(x.k_norm_weight, other), x.key_cache, x.value_cache,
        outputs[0], _or(x.out_k, other), _or(x.out_v, other), _or(outputs[1], other), _or(outputs[2], other),
        x.seq_lens, x.q_index, x.block_ids, x.k_scale if facts.k_in_memory else other,
        x.v_scale if facts.v_in_memory else other, _or(x.q_scale_inv, other),
    )  # fmt: skip


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


def _number(scale: Any) -> float:
    if scale is None or (isinstance(scale, torch.Tensor) and scale.is_cuda):
        return 1.0
    return float(scale)


def _prepare(x: Arguments, q_heads: int, chosen: plan.Plan | None) -> launch.Call:
    # a fresh out_q is packed and on 16 bytes
    out_q = x.out_q if x.out_q is not None else torch.empty(
        (x.qkv.shape[0], q_heads, x.key_cache.shape[3]), dtype=FP8 if x.fp8 else torch.bfloat16, device=x.qkv.device
    )  # fmt: skip
    key = launch.key_of(x, q_heads, arch.capability(x.qkv.device)[0] == 9, out_q)
    if chosen is not None:
        why = plan.is_legal(chosen, key)
        if why is not None:
            fail(
                x.function,
                "plan",
                expected="a plan that can run this call",
                got=why,
                remedy="Pass plan=None.",
            )
    return launch.Call(launch.facts_of(x, q_heads, chosen or plan.choose(key), out_q), sizes_of(x))


def sizes_of(x: Arguments) -> launch.Sizes:
    """The numbers of checked arguments."""
    return launch.Sizes(
        x.qkv.shape[0], x.seq_lens.shape[0], x.cos_sin.shape[0], x.block_ids.shape[1], x.key_cache.shape[0],
        columns_of(x), x.block_ids.stride(0),
    )  # fmt: skip


def columns_of(x: Arguments) -> int:
    return -(-x.max_seqlens // 128) * 128 if x.quant_policy == 1 and x.is_prefill else 0


def allocate(x: Arguments, q_heads: int) -> Result:
    """(out_q, q_scale, split_k_flag) to be written."""
    rows, device = x.qkv.shape[0], x.qkv.device
    out_q = x.out_q
    if out_q is None:
        dtype = FP8 if x.fp8 else torch.bfloat16
        out_q = torch.empty((rows, q_heads, x.key_cache.shape[3]), dtype=dtype, device=device)
    if not x.fp8:
        return out_q, None, None
    requests, q_scale = x.seq_lens.shape[0], None
    if x.quant_policy == 1:
        shape = (requests, q_heads, columns_of(x)) if x.is_prefill else (rows, q_heads)
        q_scale = torch.empty(shape, dtype=torch.float32, device=device)
    return out_q, q_scale, torch.empty((requests, x.key_cache.shape[2]), dtype=torch.int32, device=device)


@torch.no_grad()
def by_reference(x: Arguments, q_heads: int) -> Result:
    """The reference with the roundings of the kernels, so that results anywhere are those of a GPU. Any device."""
    rows = x.qkv.shape[0]
    request, position, place = reference.token_positions(x.seq_lens, x.q_index, rows)
    kv_heads, head_dim = x.key_cache.shape[2:]
    (q, factor), (k, k_factor), v = reference.project_unscaled(
        x.qkv, x.cos_sin, position, kv_heads, head_dim, x.value_cache.shape[3], q_norm_weight=x.q_norm_weight,
        k_norm_weight=x.k_norm_weight, qk_norm_policy=x.qk_norm_policy, eps=x.eps, is_neox_style=x.is_neox_style,
        dtype=torch.float32,
    )  # fmt: skip
    out_q, q_scale, flag = allocate(x, q_heads)
    if x.fp8:
        q, q_scale = _quantized(x, q, factor, request, place)
        k, v = _fixed_scale(k, k_factor, x.k_scale), _fixed_scale(v, None, x.v_scale)
        assert flag is not None
        flag.zero_()
    else:
        q, k = reference.scaled(q, factor), reference.scaled(k, k_factor)
    dtype = FP8 if x.fp8 else torch.bfloat16
    for out, part in ((out_q, q), (x.out_k, k), (x.out_v, v)):
        if out is not None:
            out.copy_(part.to(dtype))
            reference._bytes(out)[request < 0] = 0
    for kept, cache, part in ((x.out_k, x.key_cache, k), (x.out_v, x.value_cache, v)):
        if kept is None:
            reference.store(cache, part.to(dtype), x.block_ids, request, position)
        reference.clear_tails(cache, x.block_ids, x.seq_lens)
    return out_q, q_scale, flag


def _fixed_scale(part: torch.Tensor, factor: torch.Tensor | None, scale: Any) -> torch.Tensor:
    """e4m3(x * (factor * (1 / scale))) of float32 values and a scale in any of its forms."""
    number = scale.reshape(1) if isinstance(scale, torch.Tensor) else torch.tensor([_number(scale)])
    number = number.to(part.device, torch.float32)
    return reference.to_fp8(part * reference.both(factor, torch.ones_like(number) / number))


def _quantized(
    x: Arguments, q: torch.Tensor, factor: torch.Tensor | None, request: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes, scales in the layout of the call) of queries in float32 that lack a factor a head."""
    if x.quant_policy == 2:
        assert x.q_scale_inv is not None
        return reference.to_fp8(q * reference.both(factor, x.q_scale_inv.flatten()[0])), None
    upper = validate.FP8_MAX if x.upper_max is None else x.upper_max
    q8, scale = reference.quantize_query(q, upper, factor)
    if not x.is_prefill:
        return q8, scale.masked_fill((request < 0)[:, None], 0)
    columns = columns_of(x)
    q8.view(torch.uint8)[place >= columns] = 0x7F
    return q8, reference.scales_by_request(scale, request, place, x.seq_lens.shape[0], columns)


# --- queries alone --------------------------------------------------------------------------------------------


def quantize(
    function: str, q: torch.Tensor, q_index: torch.Tensor | None, max_seqlens: int, upper_max: float | None,
    out_q: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run one `quantize_query_fp8`."""
    columns = validate.query(function, q, q_index, max_seqlens, upper_max, out_q)
    rows, heads, dim = q.shape
    requests = 0 if q_index is None else q_index.shape[0] - 1
    upper = validate.FP8_MAX if upper_max is None else float(upper_max)
    if not q.is_cuda:
        return _quantize_on_cpu(q, q_index, columns, upper, out_q)
    if out_q is None:
        out_q = torch.empty((rows, heads, dim), dtype=FP8, device=q.device)
    shape = (rows, heads) if q_index is None else (requests, heads, columns)
    q_scale = torch.empty(shape, dtype=torch.float32, device=q.device)
    pointers, grid, numbers, constants, warps = query_arguments(q, out_q, q_scale, q_index, columns, upper)
    if grid == 0:
        return out_q, q_scale
    sm90, soft = arch.capability(q.device)[0] >= 9, arch.capability(q.device) < (8, 9)
    constants = (*constants, sm90, soft, False)
    kernel = launch.query_kernel_of(q.device.index, sm90, launch.aligned((q, out_q)), constants, warps)
    with torch.cuda.device(q.device.index):
        kernel(
            (grid, 1, 1), raw_stream(q.device.index), (*map(launch.as_bytes, pointers), *numbers, *constants)
        )
    return out_q, q_scale


def query_arguments(
    q: torch.Tensor, out_q: torch.Tensor, q_scale: torch.Tensor, q_index: torch.Tensor | None, columns: int,
    upper: float,
) -> tuple[tuple[torch.Tensor, ...], int, tuple[Any, ...], tuple[Any, ...], int]:  # fmt: skip
    """(pointers, grid, numbers, strides and constants but for the last three, warps) of the quantise-only kernel."""
    rows, heads, dim = q.shape
    requests = 0 if q_index is None else q_index.shape[0] - 1
    chosen = plan.choose(plan.Key(rows, heads, 1, dim, dim))
    tile = plan.tile(heads, chosen.heads)
    num_q = plan.programs(rows, heads, *tile)
    grid = num_q + requests * plan.CLEARERS
    numbers = (rows, requests, requests / max(1, rows), columns, num_q, upper)
    constants = (
        *q.stride()[:2], *out_q.stride()[:2], heads, dim, plan.power_of_two(dim), *tile, q_index is not None,
        plan.CLEARERS,
    )  # fmt: skip
    pointers = (q, out_q, q_scale, q if q_index is None else q_index)
    return pointers, grid, numbers, constants, chosen.num_warps


@torch.no_grad()
def _quantize_on_cpu(
    q: torch.Tensor, q_index: torch.Tensor | None, columns: int, upper: float, out_q: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    q8, scale = reference.quantize_query(q.float(), upper)
    if q_index is not None:
        lens = q_index[1:] - q_index[:-1]
        request, _, place = reference.token_positions(lens, q_index, q.shape[0])
        q8.view(torch.uint8)[place >= columns] = 0x7F
        q8.view(torch.uint8)[request < 0] = 0
        scale = reference.scales_by_request(scale, request, place, len(lens), columns)
    if out_q is not None:
        q8 = out_q.copy_(q8)
    return q8, scale
