"""The scratch of a fused MoE call and its passes, in pure Python: integers only."""

from __future__ import annotations

from dataclasses import dataclass

from hpc.moe.plan import Key, Plan, ceil_div, power_of_two

# Bytes: longer inputs run in chunks of tokens, so that scratch does not grow without end.
SCRATCH_LIMIT = 1 << 29
MIN_CHUNK_TOKENS = 1024
ALIGN = 256


@dataclass(frozen=True)
class Scratch:
    """Byte offsets of one call's scratch; every field begins on a multiple of ALIGN."""

    counts: int
    totals: int
    expert: int
    start: int
    rows: int
    num_tiles: int
    pair: int
    row: int
    counters: int
    num_counters: int
    act: int
    act_stride: int
    act_scale: int
    parts: int
    y: int
    xq: int
    xs: int
    ids: int
    weights: int
    up_scale: int
    down_scale: int
    size: int
    num_chunks: int
    max_tiles: int


def expert_bins(key: Key) -> int:
    """Bins of the index build's histogram."""
    return max(16, power_of_two(key.num_experts))


def block_sizes(key: Key) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, columns) of an expert's block scales of either product, without padding."""
    columns = ceil_div(key.hidden, 128)
    return (ceil_div(2 * key.inter, 128), columns), (columns, key.groups)


def layout(key: Key, plan: Plan) -> Scratch:
    """Where everything lies, and how much it takes."""
    pairs, bins = key.pairs, expert_bins(key)
    chunks = ceil_div(pairs, plan.chunk)
    # a tile is full or the last of its expert
    max_tiles = min(pairs, key.num_experts + pairs // plan.tile)
    act_stride = ceil_div(key.inter, 16) * 16
    num_counters = parts = 0
    if plan.up is not None and not plan.up.shared_order:
        halves = 2 if key.block_scales else 1
        num_counters = max_tiles * ceil_div(key.inter, 64 * halves)
        parts = 4 * 128 * plan.tile * halves * 2 * plan.up.per_sm * key.sms
    act_bytes = 2 if key.bf16_weights else 4 if plan.backend == "tiny" and key.block_scales else 1
    columns = ceil_div(key.hidden, 128)
    appended = 4 * pairs if key.shared_experts else 0
    up_blocks, down_blocks = (rows * cols if key.one_scale else 0 for rows, cols in block_sizes(key))
    sizes = {
        "counts": 0 if plan.fused_index else 4 * chunks * bins,
        "totals": 4 * bins,
        "expert": 4 * max_tiles,
        "start": 4 * max_tiles,
        "rows": 4 * max_tiles,
        "num_tiles": 8,
        "pair": 4 * pairs,
        "row": 4 * pairs,
        "counters": 4 * num_counters,
        "act": pairs * act_stride * act_bytes,
        "act_scale": 4 * pairs * key.groups if key.act_groups else 0,
        "parts": parts,
        "y": 2 * pairs * key.hidden if plan.backend != "tiny" and key.combined else 0,
        "xq": key.num_tokens * key.hidden if key.quantised_input else 0,
        "xs": 4 * key.num_tokens * columns if key.quantised_input and key.block_scales else 0,
        "ids": appended,
        "weights": appended,
        "up_scale": 4 * key.num_experts * up_blocks,
        "down_scale": 4 * key.num_experts * down_blocks,
    }
    offsets, at = {}, 0
    for name, size in sizes.items():
        offsets[name] = at
        at += ceil_div(size, ALIGN) * ALIGN
    return Scratch(
        **offsets,
        num_counters=num_counters,
        act_stride=act_stride,
        size=at,
        num_chunks=chunks,
        max_tiles=max_tiles,
    )


def chunk_tokens(num_tokens: int, top_k: int, hidden: int, inter: int) -> int:
    """Tokens of one pass: all of them, or as many as SCRATCH_LIMIT holds."""
    per_token = top_k * (2 * hidden + inter + inter // 32 + 16)
    limit = max(MIN_CHUNK_TOKENS, SCRATCH_LIMIT // per_token // 128 * 128)
    if num_tokens <= limit:
        return num_tokens
    passes = ceil_div(num_tokens, limit)
    return ceil_div(ceil_div(num_tokens, passes), 128) * 128
