"""The walk of an SM90 decode CTA through its bin: what the producer, the converter and the consumers all follow."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hpc.attention.decode import plan

_TILE = gl.constexpr(plan.TILE)
_ENTRY = gl.constexpr(plan.ENTRY_WORDS)
_LONGEST = gl.constexpr(plan.LONGEST)


@gluon.jit
def tiles_of(length, S: gl.constexpr, window, WINDOW: gl.constexpr):
    """First and past-the-end tile of a request, as `plan.tile_range`."""
    lo = 0
    if WINDOW:
        lo = gl.maximum(length - (S - 1) - window, 0) // _TILE
    return lo, gl.maximum((length + (_TILE - 1)) // _TILE, lo + 1)


@gluon.jit
def length_of(seq_ptr, b, batch, extra):
    return gl.maximum(gl.minimum(gl.load(seq_ptr + b, mask=b < batch, other=0), _LONGEST) + extra, 0)


@gluon.jit
def page_ids(block_ptr, stride_block, b, t, end, dead, C: gl.constexpr):
    """Page ids of the NP boxes of the step at tile t. Boxes without tokens below `end` get `dead`; their entries are
    not read."""
    row = block_ptr + b.to(gl.int64) * stride_block
    pages = ()
    NP: gl.constexpr = C.NP
    for j in gl.static_range(NP):
        token = t * _TILE + j * C.PB
        page = gl.load(row + token // C.P, mask=token < end, other=dead)
        pages = pages + (page,)  # type: ignore[assignment]
    return pages


@gluon.jit
def end_of(length, hi, max_tokens):
    """Past-the-end token of a chunk that stops at tile `hi`."""
    return gl.minimum(gl.minimum(length, max_tokens), hi * _TILE)


@gluon.jit
def first_work(
    map_ptr, seq_ptr, batch, extra, max_tokens, sig, window, num_splits, min_chunk, g, C: gl.constexpr
):
    """(request, tile, last request, its past-the-end tile or 0 for none, length of the first, whole, map is ours)."""
    if C.STATIC:
        b = g // num_splits
        length = gl.minimum(length_of(seq_ptr, b, batch, extra), max_tokens)
        lo, full = tiles_of(length, C.S, window, C.WINDOW)
        chunk = gl.maximum((full - lo + num_splits - 1) // num_splits, min_chunk)
        t = lo + (g % num_splits) * chunk
        b_end = b
        t_end = gl.where(t < full, gl.minimum(t + chunk, full), 0)
        ours = batch > 0
    else:
        entry = map_ptr + g * _ENTRY
        ours = gl.load(entry) == sig
        b = gl.load(entry + 1)
        t = gl.load(entry + 2)
        b_end = gl.load(entry + 3)
        t_end = gl.load(entry + 4)
        length = gl.load(entry + 5)
        if not ours:
            b = batch
            b_end = batch
            t_end = 0
    return b, t, b_end, t_end, length, ours
