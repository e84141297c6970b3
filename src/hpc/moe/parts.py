"""`count_and_gather` and `reduce`: checks, launches, and what they do on a CPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from hpc.common import arch, checks
from hpc.common.errors import fail
from hpc.common.launch import Kernel, raw_stream
from hpc.moe import plan


@lru_cache(maxsize=1024)
def _kernel(name: str, num_warps: int, pdl: bool, device: int, *facts: Any) -> Kernel:
    """One compiled kernel for a device and whatever Triton would specialise on."""
    from hpc.moe import route

    del device, facts
    return Kernel(getattr(route, name), name, num_warps=num_warps, launch_pdl=pdl)


def count_and_gather(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    num_expert: int,
    rank_ep: int,
    intermediate_size: int,
    average: int,
) -> Any:
    """See `hpc.count_and_gather`."""
    name = "count_and_gather"
    checks.is_tensor(name, "x", x)
    checks.ndim(name, "x", x, 2)
    checks.contiguous(name, "x", x)
    if x.element_size() not in (1, 2, 4):
        fail(name, "x", expected="1, 2 or 4 bytes an element", got=x.dtype)
    tokens, hidden = x.shape
    top_k = _routing(name, "topk_ids", topk_ids, tokens, x.device)
    experts = checks.int_range(name, "num_expert", num_expert, 1, plan.MAX_EXPERTS)
    rank_ep = checks.int_range(name, "rank_ep", rank_ep, 0, 2**31 // experts - 1)
    width = checks.int_range(name, "intermediate_size", intermediate_size, 0)
    average = checks.int_range(name, "num_seq_per_group_avg", average, 0)
    tile, pairs = plan.tile_rows(average), tokens * top_k
    if pairs >= 2**31:
        fail(name, "topk_ids", expected="fewer than 2^31 pairs", got=pairs)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    bins = max(16, plan.power_of_two(experts))
    gathered, position = empty(pairs, hidden, dtype=x.dtype), empty(tokens, top_k)
    totals, tiles = empty(bins), empty(experts)
    first_row, first_tile = empty(experts + 1), empty(experts + 1)
    if not x.is_cuda or pairs == 0:
        _count_on_cpu(
            x, topk_ids, experts, rank_ep, tile, gathered, position, totals, tiles, first_row, first_tile
        )
    else:
        arch.require_gpu(name, x.device)
        with torch.cuda.device(x.device):
            build_index(topk_ids, experts, rank_ep, tile, position, totals)
            _bounds(totals, first_row, tiles, first_tile, experts, bins, tile)
            _gather(x, position, gathered, top_k)
    return (
        gathered, empty(pairs, width, dtype=torch.bfloat16), position, totals[:experts], first_row, tiles, first_tile,
        empty(2 * experts, 128, dtype=torch.int8), empty(2 * experts, 128, dtype=torch.int8),
    )  # fmt: skip


def _routing(name: str, argument: str, tensor: torch.Tensor, tokens: int, device: torch.device) -> int:
    """Check an int32 [T, K] tensor; K."""
    checks.dtype(name, argument, tensor, torch.int32, "Convert with .to(torch.int32).")
    checks.shape(name, argument, tensor, (tokens, "K"))
    checks.contiguous(name, argument, tensor)
    checks.same_device(name, argument, tensor, device)
    top_k = tensor.shape[1]
    if not 1 <= top_k <= plan.MAX_TOP_K:
        fail(name, argument, expected=f"1 to {plan.MAX_TOP_K} columns", got=top_k)
    return top_k


def _facts(*tensors: torch.Tensor) -> tuple[bool, ...]:
    return tuple(t.data_ptr() % 16 == 0 for t in tensors)


def build_index(
    ids: torch.Tensor, experts: int, rank_ep: int, tile: int, position: torch.Tensor, totals: torch.Tensor
) -> None:
    """Launch the index build of `route.py` for its rows and totals; its tile list is dropped."""
    pairs, bins = ids.numel(), totals.numel()
    fused = pairs <= plan.FUSED_PAIRS
    chunk = plan.index_chunk(pairs)
    chunks, max_tiles = plan.ceil_div(pairs, chunk), min(pairs, experts + pairs // tile)
    index, stream = ids.device.index, raw_stream(ids.device.index)
    pdl = arch.is_hopper(ids.device)
    counts = torch.empty(1 if fused else chunks * bins, dtype=torch.int32, device=ids.device)
    dropped = torch.empty(3 * max_tiles + 2 + pairs, dtype=torch.int32, device=ids.device)
    lists = [dropped[i * max_tiles :] for i in range(3)]
    where = (pairs, experts, rank_ep * experts)
    if not fused:
        facts = (bins, chunk)
        count = _kernel("_moe_count_kernel", 4, pdl, index, *facts)
        count((chunks, 1, 1), stream, (ids, ids, counts, *where, bins, chunk, False, pdl))
        scan = _kernel("_moe_scan_kernel", 4, pdl, index, *facts)
        cols = min(32, bins)
        scan((bins // cols, 1, 1), stream, (counts, totals, chunks, bins, cols, 32, pdl))
    place = _kernel("_moe_place_kernel", 4, pdl, index, bins, chunk, plan.power_of_two(pairs), tile, fused,
                    max_tiles % 4)  # fmt: skip
    args = (
        ids, ids, counts, totals, *lists, dropped[3 * max_tiles :], dropped[3 * max_tiles + 2 :], position, counts,
        *where, 0, bins, chunk, plan.power_of_two(pairs), tile, fused, False, pdl,
    )  # fmt: skip
    place((chunks, 1, 1), stream, args)


def _bounds(totals: torch.Tensor, first_row: torch.Tensor, tiles: torch.Tensor, first_tile: torch.Tensor,
            experts: int, bins: int, tile: int) -> None:  # fmt: skip
    index, pdl = totals.device.index, arch.is_hopper(totals.device)
    kernel = _kernel("_moe_bounds_kernel", 4, pdl, index, bins, tile, experts)
    kernel((1, 1, 1), raw_stream(index), (totals, first_row, tiles, first_tile, experts, bins, tile, pdl))


def _gather(x: torch.Tensor, position: torch.Tensor, gathered: torch.Tensor, top_k: int) -> None:
    whole = x.shape[1] * x.element_size() % 4 == 0 and x.data_ptr() % 4 == 0
    source, target = (t.view(torch.int32 if whole else torch.uint8) for t in (x, gathered))
    words = source.shape[1]
    block = min(1024, plan.power_of_two(words))
    index, pdl = x.device.index, arch.is_hopper(x.device)
    kernel = _kernel("_moe_gather_kernel", max(1, block // 256), pdl, index, words, top_k, whole, *_facts(x))
    grid = (position.numel(), plan.ceil_div(words, block), 1)
    kernel(grid, raw_stream(index), (source, position, target, words, top_k, block, pdl))


def _count_on_cpu(x: torch.Tensor, ids: torch.Tensor, experts: int, rank_ep: int, tile: int, gathered: torch.Tensor,
                  position: torch.Tensor, totals: torch.Tensor, tiles: torch.Tensor, first_row: torch.Tensor,
                  first_tile: torch.Tensor) -> None:  # fmt: skip
    """The same by a stable sort; also for no tokens."""
    local = ids.flatten().long() - rank_ep * experts
    ours = (local >= 0) & (local < experts)
    key = local.where(ours, experts)
    order = key.argsort(stable=True)[: int(ours.sum())] if not x.is_cuda else key
    counts = torch.bincount(key[ours], minlength=experts) if not x.is_cuda else key.new_zeros(experts)
    totals.zero_()
    totals[:experts] = counts
    position.fill_(-1)
    position.view(-1)[order] = torch.arange(order.numel(), dtype=torch.int32, device=x.device)
    _raw(gathered)[: order.numel()] = _raw(x)[order // max(1, ids.shape[1])]
    tiles.copy_((counts + tile - 1) // tile)
    for target, values in ((first_row, counts), (first_tile, tiles)):
        target[0] = 0
        target[1:] = values.cumsum(0)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a float8 tensor, which cannot be indexed everywhere."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def reduce(
    x: torch.Tensor, topk_pos: torch.Tensor, topk_scale: torch.Tensor, shared_output: torch.Tensor | None
) -> torch.Tensor:
    """See `hpc.reduce`."""
    name = "reduce"
    checks.dtype(name, "x", x, torch.bfloat16)
    checks.ndim(name, "x", x, 2)
    checks.contiguous(name, "x", x)
    checks.is_tensor(name, "topk_pos", topk_pos)
    checks.ndim(name, "topk_pos", topk_pos, 2)
    tokens, hidden = topk_pos.shape[0], x.shape[1]
    top_k = _routing(name, "topk_pos", topk_pos, tokens, x.device)
    checks.dtype(name, "topk_scale", topk_scale, torch.float32, "Convert with .float().")
    checks.shape(name, "topk_scale", topk_scale, (tokens, top_k))
    checks.contiguous(name, "topk_scale", topk_scale)
    checks.same_device(name, "topk_scale", topk_scale, x.device)
    if shared_output is not None:
        checks.dtype(name, "shared_output", shared_output, torch.bfloat16)
        checks.shape(name, "shared_output", shared_output, (tokens, hidden))
        checks.contiguous(name, "shared_output", shared_output)
        checks.same_device(name, "shared_output", shared_output, x.device)
    out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=x.device)
    if out.numel() == 0:
        return out
    if not x.is_cuda:
        return out.copy_(reduce_reference(x, topk_pos, topk_scale, shared_output))
    arch.require_gpu(name, x.device)
    index, pdl = x.device.index, arch.is_hopper(x.device)
    block = min(1024, plan.power_of_two(hidden))
    shared = x if shared_output is None else shared_output
    fixed = (top_k, block, True, shared_output is not None, min(8, plan.power_of_two(top_k)), pdl, False)
    kernel = _kernel("_moe_reduce_kernel", max(1, block // 256), pdl, index, hidden, *fixed,
                     *_facts(x, topk_pos, shared))  # fmt: skip
    args = (x, topk_pos, topk_scale, shared, out, x.shape[0], hidden, hidden, 1.0, *fixed)
    with torch.cuda.device(x.device):
        kernel((tokens, plan.ceil_div(hidden, block), 1), raw_stream(index), args)
    return out


def reduce_reference(
    x: torch.Tensor, topk_pos: torch.Tensor, topk_scale: torch.Tensor, shared_output: torch.Tensor | None
) -> torch.Tensor:
    """The weighted sum in float64, unrounded."""
    ours = (topk_pos >= 0) & (topk_pos < x.shape[0])
    padded = torch.cat([x.double(), x.new_zeros(1, x.shape[1]).double()])
    rows = padded[topk_pos.long().where(ours, x.shape[0])]
    out = (rows * topk_scale.double().masked_fill(~ours, 0)[..., None]).sum(1)
    return out if shared_output is None else out + shared_output.double()
