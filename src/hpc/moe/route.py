"""Index build of the fused MoE, and the weighted sum at its end. Triton; these run on any GPU and interpreted.

Pairs p = token * top_k + k are counted into contiguous row ranges, one a local expert, in pair order: a row's place is

    row(p) = rows of smaller experts + pairs q < p of the same expert

No atomics: each program counts what it needs, so the same ids give the same rows. A range is cut into tiles of at most
TILE rows; the tile list (expert, first row, rows) is what the GEMMs walk, so empty experts cost nothing. Its word for
the expert also says which tile of a group of the expert's this is: see `order`.
"""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait, to_bf16
from hpc.moe import order

EXPERT_BITS = tl.constexpr(order.EXPERT_BITS)
GROUP = tl.constexpr(order.GROUP)
GROUP_BITS = tl.constexpr(order.GROUP_BITS)
IN_TURN = tl.constexpr(order.IN_TURN)


@triton.jit(
    do_not_specialize=["num_pairs", "first_expert", "num_routed", "shared_weight"],
    do_not_specialize_on_alignment=["ids_ptr", "weight_ptr"],
)
def _moe_append_kernel(
    ids_ptr, weight_ptr, new_ids_ptr, new_weight_ptr, num_pairs, first_expert, num_routed, shared_weight,
    ROUTED: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(num_pairs / BLOCK)): ids and weights of a token's ROUTED experts, then of shared ones: EACH in all.

    New ids are local: shared experts come behind the rank's num_routed ones, others' are -1.
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = p % EACH
    live = p < num_pairs
    routed = live & (k < ROUTED)
    at = p // EACH * ROUTED + k
    local = tl.load(ids_ptr + at, mask=routed, other=-1) - first_expert
    local = tl.where((local >= 0) & (local < num_routed), local, -1)
    weight = tl.load(weight_ptr + at, mask=routed, other=0.0)
    tl.store(new_ids_ptr + p, tl.where(routed, local, num_routed + k - ROUTED), mask=live)
    tl.store(new_weight_ptr + p, tl.where(routed, weight, shared_weight), mask=live)


@triton.jit
def _local_ids(ids_ptr, weight_ptr, p, num_pairs, first_expert, num_experts, DROP_ZERO: tl.constexpr):
    """(local expert or 0, whether pair p is ours). With DROP_ZERO, pairs of weight 0 count as nobody's."""
    live = p < num_pairs
    local = tl.load(ids_ptr + p, mask=live, other=-1) - first_expert
    ours = live & (local >= 0) & (local < num_experts)
    if DROP_ZERO:
        ours = ours & (tl.load(weight_ptr + p, mask=ours, other=0.0) != 0.0)
    return tl.where(ours, local, 0), ours


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "first_expert"],
    do_not_specialize_on_alignment=["ids_ptr", "weight_ptr"],
)
def _moe_count_kernel(
    ids_ptr, weight_ptr, count_ptr, num_pairs, num_experts, first_expert,
    EP: tl.constexpr, CHUNK: tl.constexpr, DROP_ZERO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks): count_ptr[chunk, :] = pairs of this chunk an expert."""
    pdl_wait(PDL)
    pdl_launch(PDL)
    chunk = tl.program_id(0)
    p = chunk * CHUNK + tl.arange(0, CHUNK)
    local, ours = _local_ids(ids_ptr, weight_ptr, p, num_pairs, first_expert, num_experts, DROP_ZERO)
    tl.store(count_ptr + chunk * EP + tl.arange(0, EP), tl.histogram(local, EP, mask=ours))


@triton.jit(do_not_specialize=["num_chunks"])
def _moe_scan_kernel(
    count_ptr,
    total_ptr,
    num_chunks,
    EP: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (EP / COLS): counts of each chunk become the counts of all chunks before it; total_ptr[e] their sum."""
    pdl_wait(PDL)
    pdl_launch(PDL)
    e = tl.program_id(0) * COLS + tl.arange(0, COLS)
    running = tl.zeros([COLS], tl.int32)
    for first in range(0, num_chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)
        at = count_ptr + chunk[:, None] * EP + e[None, :]
        live = (chunk < num_chunks)[:, None]
        counts = tl.load(at, mask=live, other=0)
        tl.store(at, running[None, :] + tl.cumsum(counts, 0) - counts, mask=live)
        running += tl.sum(counts, 0)
    tl.store(total_ptr + e, running)


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "first_expert", "num_counters"],
    do_not_specialize_on_alignment=["ids_ptr", "weight_ptr"],
)
def _moe_place_kernel(
    ids_ptr, weight_ptr, before_ptr, total_ptr, expert_ptr, start_ptr, rows_ptr, num_tiles_ptr, pair_ptr, row_ptr,
    counter_ptr, num_pairs, num_experts, first_expert, num_counters,
    EP: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, FUSED: tl.constexpr,
    DROP_ZERO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks): rows of this chunk's pairs and the tiles that begin with one of them.

    FUSED: one launch for at most PAIRS pairs, each program counts all of them itself. Otherwise before_ptr
    [chunks, EP] and total_ptr [EP] come from the two kernels above; FUSED writes total_ptr. Writes pair_ptr
    [row] = pair, row_ptr[pair] = row or -1, tiles (expert_ptr, start_ptr, rows_ptr), num_tiles_ptr [2] = their number
    and `order.in_turn`, and zeros to the arrival counters of the GEMM that follows.
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    chunk = tl.program_id(0)
    c = tl.arange(0, CHUNK)
    e = tl.arange(0, EP)
    p = chunk * CHUNK + c
    local, ours = _local_ids(ids_ptr, weight_ptr, p, num_pairs, first_expert, num_experts, DROP_ZERO)
    earlier = (local[None, :] == local[:, None]) & ours[None, :] & (c[None, :] < c[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    if FUSED:
        every = tl.arange(0, PAIRS)
        all_local, all_ours = _local_ids(
            ids_ptr, weight_ptr, every, num_pairs, first_expert, num_experts, DROP_ZERO
        )
        total = tl.histogram(all_local, EP, mask=all_ours)
        if PAIRS > CHUNK:
            before = tl.histogram(all_local, EP, mask=all_ours & (every < chunk * CHUNK))
            rank += tl.gather(before, local, 0)
        if chunk == 0:
            tl.store(total_ptr + e, total)
    else:
        total = tl.load(total_ptr + e)
        rank += tl.load(before_ptr + chunk * EP + local)
    tiles = (total + TILE - 1) // TILE
    first_row = tl.cumsum(total, 0) - total
    first_tile = tl.cumsum(tiles, 0) - tiles
    row = tl.gather(first_row, local, 0) + rank
    index = rank // TILE
    tile = tl.gather(first_tile, local, 0) + index
    count = tl.gather(total, local, 0)
    in_group = index % GROUP
    group = tl.minimum((count + TILE - 1) // TILE - (index - in_group), GROUP)
    word = local | (in_group << EXPERT_BITS) | ((group - 1) << (EXPERT_BITS + GROUP_BITS))
    tl.store(row_ptr + p, tl.where(ours, row, -1), mask=p < num_pairs)
    tl.store(pair_ptr + row, p, mask=ours)
    head = ours & (rank % TILE == 0)
    tl.store(expert_ptr + tile, word, mask=head)
    tl.store(start_ptr + tile, row, mask=head)
    tl.store(rows_ptr + tile, tl.minimum(count - rank, TILE), mask=head)
    if chunk == 0:
        num_tiles = tl.sum(tiles, 0)
        more = tl.sum(tl.maximum(tiles - 1, 0), 0)
        tl.store(num_tiles_ptr, num_tiles)
        tl.store(num_tiles_ptr + 1, ((more > 0) & (more * IN_TURN >= num_tiles)).to(tl.int32))
    for first in range(chunk * CHUNK, num_counters, tl.num_programs(0) * CHUNK):
        tl.store(counter_ptr + first + c, tl.zeros([CHUNK], tl.int32), mask=first + c < num_counters)


@triton.jit
def _moe_bounds_kernel(
    total_ptr, first_row_ptr, tiles_ptr, first_tile_ptr, num_experts, EP: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1): from rows an expert, their running sum [E + 1], tiles of TILE rows, and the running sum of those."""
    pdl_wait(PDL)
    pdl_launch(PDL)
    e = tl.arange(0, EP)
    live = e < num_experts
    total = tl.load(total_ptr + e, mask=live, other=0)
    tiles = (total + TILE - 1) // TILE
    tl.store(tiles_ptr + e, tiles, mask=live)
    tl.store(first_row_ptr + e + 1, tl.cumsum(total, 0), mask=live)
    tl.store(first_tile_ptr + e + 1, tl.cumsum(tiles, 0), mask=live)
    tl.store(first_row_ptr + e, tl.zeros([EP], tl.int32), mask=e == 0)
    tl.store(first_tile_ptr + e, tl.zeros([EP], tl.int32), mask=e == 0)


@triton.jit
def _moe_gather_kernel(
    x_ptr, row_ptr, out_ptr, words, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid (pairs, ceil(words / BLOCK)): out[row of the pair] = x[token of the pair], as 4- or 1-byte words."""
    pdl_wait(PDL)
    pdl_launch(PDL)
    pair = tl.program_id(0)
    row = tl.load(row_ptr + pair).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (at < words) & (row >= 0)
    value = tl.load(x_ptr + (pair // TOP_K).to(tl.int64) * words + at, mask=mask, other=0)
    tl.store(out_ptr + row * words + at, value, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["row_ptr"])
def _moe_clear_kernel(row_ptr, y_ptr, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (pairs, ceil(H / BLOCK)): y[pair] = 0 where the pair has no row."""
    pdl_wait(PDL)
    pdl_launch(PDL)
    pair = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    nobodys = tl.load(row_ptr + pair) < 0
    tl.store(y_ptr + pair * H + h, tl.zeros([BLOCK], tl.bfloat16), mask=(h < H) & nobodys)


@triton.jit(do_not_specialize=["factor", "num_rows"], do_not_specialize_on_alignment=["weight_ptr"])
def _moe_reduce_kernel(
    y_ptr, row_ptr, weight_ptr, shared_ptr, out_ptr, num_rows, H, stride_out, factor,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, BY_ROW: tl.constexpr, SHARED: tl.constexpr, UNROLL: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, ceil(H / BLOCK)): out[t] = factor * sum_k weight[t, k] * y[pair or row] + shared[t].

    Summed in fp32 in the order of k, rounded once; weight_ptr None: weights of 1. Pairs without a row (row_ptr < 0)
    contribute nothing, whatever their weight. BY_ROW: y is indexed by the pair's row, which must be below num_rows,
    else by the pair itself.
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = h < H
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, TOP_K, UNROLL):
        for j in tl.static_range(UNROLL):
            k = first + j
            pair = t * TOP_K + k
            row = tl.load(row_ptr + pair, mask=k < TOP_K, other=-1)
            ours = row >= 0
            if BY_ROW:
                ours = ours & (row < num_rows)
            if weight_ptr is not None:
                weight = tl.load(weight_ptr + pair, mask=ours, other=0.0)
            at = tl.where(ours, row.to(tl.int64), 0) if BY_ROW else pair
            value = tl.load(y_ptr + at * H + h, mask=live & ours, other=0.0).to(tl.float32)
            if weight_ptr is not None:
                acc += weight * value
            else:
                acc += value
    acc = acc * factor
    if SHARED:
        acc += tl.load(shared_ptr + t * H + h, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * stride_out + h, to_bf16(acc, INTERPRET), mask=live)
