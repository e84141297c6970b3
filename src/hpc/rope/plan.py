"""How the prologue is cut into programs: pure arithmetic over sizes."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EARLY_TOKENS = 16  # new tokens a request up to which decode attention leaves them alone before its wait
FILL = 132 * 10  # programs of two warps that the multiprocessors of an H200 hold at once
WARP_FILL = 132 * 24  # likewise of one warp and 80 registers
CLEARERS = 8  # programs a request that zero unused scales of a quantise-only call


@dataclass(frozen=True)
class Key:
    """What the choice depends on."""

    num_tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    warp: bool = False  # the SM90 kernel can run it: `fits_warp`


@dataclass(frozen=True)
class Plan:
    """Heads (of any tokens) in a tile, the warps of a program, and its tiles of queries, 1 or 2.

    Two tiles, of other heads of the same tokens, share angles, weights and the search of the request.
    With `tokens` it is the SM90 kernel of one warp a program: so many tokens and `heads` heads of each a query program,
    `steps` times 512/D rows a program of keys and values, `registers` a thread at most.
    """

    heads: int
    num_warps: int
    unroll: int = 1
    tokens: int = 0
    steps: int = 1
    registers: int = 80


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def fits_warp(q_heads: int, head_dim: int, v_dim: int, rotary_dim: int, neox: bool, eps: float) -> bool:
    """Whether the SM90 kernel computes this call, if its tensors lie on 16 bytes: heads that a warp holds whole, and no
    root of numbers below 2^-101."""
    return (
        head_dim in (64, 128, 256) and v_dim == rotary_dim == head_dim and neox and eps >= 1e-20
        and q_heads % (512 // head_dim) == 0
    )  # fmt: skip


def is_legal(plan: Plan, key: Key) -> str | None:
    """Why a plan cannot run, or None."""
    if plan.tokens:
        if plan.tokens < 1 or plan.steps < 1 or plan.num_warps != 1 or plan.registers < 64:
            return "the SM90 kernel takes one warp of 64 registers, one token and one step at least"
        if plan.heads < 1 or key.q_heads % plan.heads or plan.heads % (512 // key.head_dim):
            return f"{plan.heads} heads: the SM90 kernel takes whole parts of all heads, in multiples of 512 / head_dim"
        return None if key.warp else "the SM90 kernel does not compute this call"
    if plan.heads < 1 or plan.heads & (plan.heads - 1):
        return f"{plan.heads} heads a program: not a power of two"
    if plan.num_warps not in (1, 2, 4, 8):
        return f"{plan.num_warps} warps: not 1, 2, 4 or 8"
    if plan.unroll not in (1, 2):
        return f"{plan.unroll} tiles of queries: not 1 or 2"
    widest = power_of_two(max(key.head_dim, key.v_dim))
    if plan.heads * widest > 64 * 32 * plan.num_warps:
        return (
            f"{plan.heads} heads of {widest} values need more than 64 registers a thread for the values alone"
        )
    return None


def choose(key: Key) -> Plan:
    """16 values a thread and tile; once all multiprocessors have their fill, the SM90 kernel or two tiles a program.

    Of the tiles of 4 to 64 heads of 128 and 1 to 8 warps, 8 heads by 2 warps were within 4 % of the fastest for FP8
    decode batches of 1, 16 and 64 (8/1 heads: 2.25, 1.84, 1.94 us; 64/8: 1.71, 2.28, 3.70 us). In prefill by these
    tiles a third of the instructions is angles, weights and the search of the request; the SM90 kernel does that once a
    token: 272 against 331 us (FP8, 64/8, 4x8K). A program there does eight times R heads, so that the last programs are
    short, and one token's where the machine is not full: 11.7 against 12.5 us with four (FP8, 8/1, 1x8K).
    """
    widest = power_of_two(max(key.head_dim, key.v_dim))
    heads = max(1, 8 * 128 // widest)
    busy = key.num_tokens * key.q_heads >= 2 * heads * FILL
    if busy and key.warp:
        row = 512 // key.head_dim
        part = max(h for h in range(row, 8 * row + 1, row) if key.q_heads % h == 0)
        tokens = max(1, 8 * row // part)
        few = key.num_tokens * key.q_heads < WARP_FILL * tokens * part
        return Plan(heads=part, num_warps=1, tokens=1 if few else tokens)
    return Plan(heads=heads, num_warps=2, unroll=2 if busy else 1)


def tile(heads: int, in_tile: int) -> tuple[int, int]:
    """(tokens, heads) of a tile of `in_tile` heads: as many heads of one token as waste the least of the tile."""
    best = min(
        (1 << n for n in range(in_tile.bit_length())),
        key=lambda block: (-(-heads // block) * block, -block),
    )
    return in_tile // best, best


def tiles(plan: Plan, q_heads: int, kv_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(tokens, heads) of a tile of queries and of one of keys or values."""
    return tile(-(-q_heads // plan.unroll), plan.heads), tile(kv_heads, plan.heads)


def programs(num_tokens: int, heads: int, tokens_in_tile: int, heads_in_tile: int) -> int:
    """Tiles that cover `num_tokens` x `heads`."""
    return -(-num_tokens // tokens_in_tile) * -(-heads // heads_in_tile)
