"""The tile table of a prefill call, built on the device.

A tile is up to TILE_TOKENS new tokens of one request. Its weight is the number of BLOCK_N-key blocks it visits; the
table lists tiles by falling weight, so that whatever starts last is short. Weights grow along a request (a later token
sees more keys), hence the rank of a tile needs no sort: the tiles of request r heavier than x are its last ones, and
how many there are follows from its lengths,

    heavier(r, x) = T_r - max(0, ceil((x BLOCK_N - start_r + 1) / TILE_TOKENS) - 1)     if L_r > x BLOCK_N, else 0

with T_r tiles, L_r keys and start_r = L_r - n_r keys before the first new token. The rank of tile t of request b is the
sum over all r of heavier(r, x), plus the tiles of equal weight that come earlier in (request, tile) order.

Request number ``batch`` stands for the query rows behind the last request: no keys, so its rows become zeros.
"""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait

HEADER = tl.constexpr(8)  # int32 words before the first entry; word 0 is the number of tiles
ENTRY = tl.constexpr(8)  # int32 words of a tile: first row, tokens, request, first token, start, keys


@triton.jit
def _lengths(cu_ptr, seq_ptr, b, batch, tokens, capacity, PAGED: tl.constexpr):
    """(first query row, query rows, keys) of requests b, safe for any numbers that the device may hold."""
    row = tl.load(cu_ptr + b, mask=b <= batch, other=tokens)
    end = tl.load(cu_ptr + b + 1, mask=b < batch, other=tokens)
    row = tl.minimum(tl.maximum(row, 0), tokens)
    rows = tl.minimum(tl.maximum(end, row), tokens) - row
    rows = tl.where(b <= batch, rows, 0)
    if PAGED:
        keys = tl.load(seq_ptr + b, mask=b < batch, other=0)
        keys = tl.minimum(tl.maximum(keys, 0), capacity)
    else:
        keys = tl.where(b < batch, rows, 0)
    return row, rows, keys


@triton.jit
def _heavier(x, tiles, start, keys, most, TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
             WINDOW: tl.constexpr):  # fmt: skip
    """Tiles of a request with a weight above x."""
    count = tiles
    if CAUSAL:
        first = (x * BLOCK_N - start + TILE_TOKENS) // TILE_TOKENS - 1
        count = tiles - tl.minimum(tl.maximum(first, 0), tiles)
    count = tl.where(keys > x * BLOCK_N, count, 0)
    if WINDOW:
        count = tl.where(x < most, count, 0)
    return tl.where(x < 0, tiles, count)


@triton.jit(
    do_not_specialize=["batch", "tokens", "bound", "capacity", "most"],
    do_not_specialize_on_alignment=["cu_ptr", "seq_ptr", "table_ptr"],
)
def _prefill_schedule_kernel(
    cu_ptr, seq_ptr, table_ptr, batch, tokens, bound, capacity, most,
    TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(bound / BLOCK_T)): every program places BLOCK_T tiles. 4 warps.

    cu [batch + 1], seq [batch] int32 (not read unless PAGED), table int32 [HEADER + bound * ENTRY]. `capacity`: most
    keys of a request; `most`: weight at which a window cuts off; `bound` >= tokens // TILE_TOKENS + batch + 1.
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lanes = tl.arange(0, BLOCK_B)

    # The request of each tile: as many requests as end at or before it.
    b = tl.zeros([BLOCK_T], tl.int32)
    begin = tl.zeros([BLOCK_T], tl.int32)
    total = 0
    for b0 in range(0, batch + 1, BLOCK_B):
        r = b0 + lanes
        _, rows, _ = _lengths(cu_ptr, seq_ptr, r, batch, tokens, capacity, PAGED)
        tiles = (rows + TILE_TOKENS - 1) // TILE_TOKENS
        ends = total + tl.cumsum(tiles, 0)
        before = (ends[None, :] <= tile[:, None]) & (r <= batch)[None, :]
        b += tl.sum(before.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(before, ends[None, :], 0), 1))
        total += tl.sum(tiles, 0)
    placed = (tile < total) & (b <= batch)
    t = tile - begin
    row, rows, keys = _lengths(cu_ptr, seq_ptr, tl.minimum(b, batch), batch, tokens, capacity, PAGED)
    start = keys - rows
    end = keys
    if CAUSAL:
        end = tl.minimum(tl.maximum(start + tl.minimum((t + 1) * TILE_TOKENS, rows), 0), keys)
    weight = (end + BLOCK_N - 1) // BLOCK_N
    if WINDOW:
        weight = tl.minimum(weight, most)

    rank = tl.zeros([BLOCK_T], tl.int32)
    x = weight[:, None]
    for b0 in range(0, batch + 1, BLOCK_B):
        r = b0 + lanes
        _, other_rows, other_keys = _lengths(cu_ptr, seq_ptr, r, batch, tokens, capacity, PAGED)
        other_start = (other_keys - other_rows)[None, :]
        tiles = ((other_rows + TILE_TOKENS - 1) // TILE_TOKENS)[None, :]
        above = _heavier(
            x, tiles, other_start, other_keys[None, :], most, TILE_TOKENS, BLOCK_N, CAUSAL, WINDOW
        )
        equal = _heavier(
            x - 1, tiles, other_start, other_keys[None, :], most, TILE_TOKENS, BLOCK_N, CAUSAL, WINDOW
        )
        own = r[None, :] == b[:, None]
        earlier = tl.where(r[None, :] < b[:, None], equal - above, 0)
        earlier = tl.where(own, t[:, None] - (tiles - equal), earlier)
        rank += tl.sum(above + earlier, 1)

    entry = table_ptr + HEADER + rank * ENTRY
    write = placed & (rank >= 0) & (rank < bound)
    tl.store(entry, row + t * TILE_TOKENS, mask=write)
    tl.store(entry + 1, tl.minimum(rows - t * TILE_TOKENS, TILE_TOKENS), mask=write)
    tl.store(entry + 2, tl.minimum(b, batch), mask=write)
    tl.store(entry + 3, t * TILE_TOKENS, mask=write)
    tl.store(entry + 4, start, mask=write)
    tl.store(entry + 5, keys, mask=write)
    if tl.program_id(0) == 0:
        tl.store(table_ptr, tl.minimum(total, bound))
