"""In which order the SM90 kernels walk the tile list, in pure Python: what `route` writes and `hopper_order` reads.

Tiles of an expert need the same weights. Up to GROUP successive ones are a group, and items of a group are numbered by
column block first, then by tile: programs that take items in turn read a block of weights from DRAM once, for all tiles
of the group at a time. GROUP tiles of 128 rows keep the rows that such programs read in the L2 beside the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

EXPERT_BITS = 12  # plan.MAX_EXPERTS
GROUP = 16  # tiles
GROUP_BITS = 4
IN_TURN = 8  # equal runs of stages give way when one in so many tiles is not the first of its expert


def pack(expert: int, index: int, count: int) -> int:
    """The tile list's word of an expert's tile `index`, of `count`. A lone tile's is the expert itself."""
    first = index // GROUP * GROUP
    size = min(count - first, GROUP)
    return expert | (index - first) << EXPERT_BITS | (size - 1) << (EXPERT_BITS + GROUP_BITS)


def unpack(word: int) -> tuple[int, int, int]:
    """(expert, index within the group, tiles of the group)."""
    index = word >> EXPERT_BITS & (GROUP - 1)
    return word & ((1 << EXPERT_BITS) - 1), index, (word >> (EXPERT_BITS + GROUP_BITS)) + 1


def place(item: int, blocks: int, words: Sequence[int]) -> tuple[int, int]:
    """(tile, column block) of an item where a tile has `blocks` column blocks."""
    slot, local = divmod(item, blocks)
    _, index, size = unpack(words[slot])
    block, tile = divmod(index * blocks + local, size)
    return slot - index + tile, block


def in_turn(words: Sequence[int], experts: int) -> bool:
    """Whether programs that otherwise take equal runs take items in turn, as far as these go round; `experts` have
    rows."""
    return len(words) > experts and (len(words) - experts) * IN_TURN >= len(words)


def stages(
    program: int, programs: int, items: int, units: int, whole: bool
) -> Iterator[tuple[int, int, int]]:
    """(item, first, past-the-last stage) of a program of the gate-up product's equal runs: with `whole`, items in turn
    as often as all programs get one, then an equal run of what is left."""
    base = items - items % programs if whole else 0
    for item in range(program, base, programs):
        yield item, 0, units
    left = (items - base) * units
    per = -(-left // programs)
    at, end = min(program * per, left), min((program + 1) * per, left)
    while at < end:
        item, begin = divmod(at, units)
        stop = min(units, begin + end - at)
        yield base + item, begin, stop
        at += stop - begin
