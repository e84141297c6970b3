"""Public functions for the stages of the fused MoE that engines call by themselves."""

from __future__ import annotations

import torch

from hpc.moe import ops, parts

Gathered = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor,
]  # fmt: skip


def count_and_gather(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    num_expert: int,
    rank_ep: int,
    intermediate_size: int,
    num_seq_per_group_avg: int,
) -> Gathered:
    """Token rows grouped by local expert, and where they went. No host synchronisation; capturable.

    Pair (t, k) belongs to local expert topk_ids[t, k] - rank_ep * num_expert; ids outside [0, num_expert) to none. Rows
    are placed by counting, without atomics, in the order of the pairs: equal ids give equal places.

    Args:
        x: [T, H], contiguous, 1, 2 or 4 bytes an element.
        topk_ids: int32 [T, K], global expert ids; K up to 128.
        num_expert: E, experts of this rank.
        rank_ep: expert-parallel rank.
        intermediate_size: columns of the second result.
        num_seq_per_group_avg: average rows a group; decides the tile: 8, 16, 32, 48, 64 up to as many rows, then 48 to
            96, 32 to 128, 48 to 144, else 64.

    Returns:
        gathered x [T * K, H], rows past the local ones uninitialised; an uninitialised BF16 buffer
        [T * K, intermediate_size]; topk_pos int32 [T, K], row of each pair or -1; seqlens int32 [E];
        cu_seqlens int32 [E + 1]; tiles int32 [E]; cu_tiles int32 [E + 1]; two opaque int8 [2 E, 128] buffers for
        descriptors.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: counting sort (Seward, 1954), by chunks of pairs.
    """
    if torch.compiler.is_compiling():
        op = torch.ops.hpc.count_and_gather.default
        result: Gathered = op(x, topk_ids, num_expert, rank_ep, intermediate_size, num_seq_per_group_avg)
        return result
    return parts.count_and_gather(x, topk_ids, num_expert, rank_ep, intermediate_size, num_seq_per_group_avg)


def reduce(
    x: torch.Tensor,
    topk_pos: torch.Tensor,
    topk_scale: torch.Tensor,
    shared_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = sum_k topk_scale[t, k] * x[topk_pos[t, k]] + shared_output[t], in fp32 and the order of k, rounded once.

    Args:
        x: BF16 [N, H], contiguous.
        topk_pos: int32 [T, K], rows of x; outside [0, N) it contributes nothing, whatever its weight. K up to 128.
        topk_scale: float32 [T, K].
        shared_output: BF16 [T, H], contiguous, or None.

    Returns:
        BF16 [T, H].

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: own.
    """
    if torch.compiler.is_compiling():
        out: torch.Tensor = torch.ops.hpc.reduce.default(x, topk_pos, topk_scale, shared_output)
        return out
    return parts.reduce(x, topk_pos, topk_scale, shared_output)


assert ops  # registers torch.ops.hpc.*
