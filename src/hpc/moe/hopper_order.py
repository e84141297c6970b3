"""Which expert, columns and rows an item is: `order` on the device.

All words of an item's slot are asked for at once. A lone tile of its expert, as most are while there are few rows,
needs no more; the others know their first row from the number of tiles between.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hpc.moe import order

EXPERT_BITS = gl.constexpr(order.EXPERT_BITS)
GROUP_BITS = gl.constexpr(order.GROUP_BITS)


@gluon.jit
def _turned(word, block, C: gl.constexpr):
    """(tiles to go on from the item's slot, column block) of an item in a group."""
    index = (word >> EXPERT_BITS) & ((1 << GROUP_BITS) - 1)
    size = (word >> (EXPERT_BITS + GROUP_BITS)) + 1
    local = index * C.RT + block
    block = local // size
    return local - block * size - index, block


@gluon.jit
def _expert(word):
    return word & ((1 << EXPERT_BITS) - 1)


@gluon.jit
def _lone(word):
    return word < (1 << EXPERT_BITS)


@gluon.jit
def weights_of(expert_ptr, item, C: gl.constexpr):
    """(expert, column block)."""
    slot = item // C.RT
    block = item - slot * C.RT
    word = gl.load(expert_ptr + slot)
    if not _lone(word):
        _, block = _turned(word, block, C)
    return _expert(word), block


@gluon.jit
def first_row(expert_ptr, start_ptr, item, C: gl.constexpr):
    """The first row alone."""
    slot = item // C.RT
    word = gl.load(expert_ptr + slot)
    start = gl.load(start_ptr + slot)
    if not _lone(word):
        step, _ = _turned(word, item - slot * C.RT, C)
        start += step * C.N
    return start


@gluon.jit
def operands_of(expert_ptr, start_ptr, item, C: gl.constexpr):
    """(expert, column block, first row)."""
    slot = item // C.RT
    block = item - slot * C.RT
    word = gl.load(expert_ptr + slot)
    start = gl.load(start_ptr + slot)
    if not _lone(word):
        step, block = _turned(word, block, C)
        start += step * C.N
    return _expert(word), block, start


@gluon.jit
def all_of(expert_ptr, start_ptr, rows_ptr, item, C: gl.constexpr):
    """(expert, column block, first row, rows)."""
    slot = item // C.RT
    block = item - slot * C.RT
    word = gl.load(expert_ptr + slot)
    start = gl.load(start_ptr + slot)
    rows = gl.load(rows_ptr + slot)
    if not _lone(word):
        step, block = _turned(word, block, C)
        start += step * C.N
        rows = gl.load(rows_ptr + slot + step)
    return _expert(word), block, start, rows


@gluon.jit
def in_list_order(expert_ptr, item, C: gl.constexpr):
    """(expert, tile, column block) where items are numbered by tile, whatever the group.

    For tiles of 128 rows, of which an expert's last may be half the work: by groups of two, some programs would get
    full tiles only (7 % at 171 rows of each of 24 experts).
    """
    tile = item // C.RT
    return _expert(gl.load(expert_ptr + tile)), tile, item - tile * C.RT
