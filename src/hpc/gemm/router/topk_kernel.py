"""Expert choice from router logits, in Triton: sum of partials, scores, groups, top-k, weights."""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait
from hpc.gemm.router.kernels import _sum_splits

_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _ordered(x):
    """fp32 to an int32 of the same order; -0.0 and 0.0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(ordered):
    """The fp32 of an `_ordered` int32."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _packed(x, ids, mask):
    """int64 that sorts by value, then lower id first; masked entries lowest."""
    return tl.where(mask, (_ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64), _LOWEST)


@triton.jit
def _largest(x):
    """Maximum of a 2-D block."""
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def _group_choice(
    choice, mask, g, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr
):
    """1 for the experts of the best groups: by their best expert, or by the sum of their best two."""
    low = tl.where(mask, choice, float("-inf"))
    rank = tl.max(low, axis=1)
    if SUM_OF_TWO:
        j = tl.arange(0, low.shape[1])[None, :]
        first = tl.min(tl.where(low == rank[:, None], j, low.shape[1]), axis=1)
        rank += tl.max(tl.where(j == first[:, None], float("-inf"), low), axis=1)
    packed = _packed(rank, g, g < NUM_GROUPS)
    allowed = g < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(packed, axis=0)
        allowed = allowed | (packed == best)
        packed = tl.where(packed == best, _LOWEST, packed)
    return allowed.to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _router_topk_kernel(
    part_ptr, bias_ptr, weights_ptr, ids_ptr, zero_ptr, num_tokens, n_end, splits, routed_scaling,
    MAX_SPLITS: tl.constexpr, TOP_K: tl.constexpr, TOP_K_2: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUPS_2: tl.constexpr, SIZE: tl.constexpr, SIZE_2: tl.constexpr,
    SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, ZERO_EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token a program. Grid: (num_tokens).

    part_ptr fp32 [splits, num_tokens, n_end] holds partial logits. Experts lie in a [groups, experts of a group] block,
    padded to powers of two. Without a bias the choice is by logit, which scores only follow; with one, by score + bias.
    TOP_K times the largest of int64 keys (value, lower id first) is taken: equal inputs give equal ids.
    """
    pdl_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUPS_2)
    j = tl.arange(0, SIZE_2)
    ids = g[:, None] * SIZE + j[None, :]
    mask = (g[:, None] < NUM_GROUPS) & (j[None, :] < SIZE)
    if BIAS:
        bias = tl.load(bias_ptr + ids, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    stride_split = num_tokens.to(tl.int64) * n_end
    logits = _sum_splits(part_ptr, token * n_end + ids, stride_split, splits, mask, MAX_SPLITS)
    logits = tl.where(logits == logits, logits, float("-inf"))
    top = _largest(tl.where(mask, logits, float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        total = 1.0
    else:
        scores = tl.where(mask, tl.exp(logits - top), 0.0)
        total = tl.sum(tl.sum(scores, axis=1), axis=0)
        total = tl.where(total > 0.0, total, 1.0)
        scores = scores / total
    scores = tl.where(scores == scores, scores, 0.0)  # infinite logits
    choice = logits
    if BIAS:
        choice = scores + bias
    if NUM_GROUPS > 1:
        allowed = _group_choice(choice, mask, g, NUM_GROUPS, TOP_GROUPS, BIAS)
        choice = tl.where(allowed[:, None] > 0, choice, float("-inf"))

    packed = _packed(choice, ids, mask)
    slot = tl.arange(0, TOP_K_2)
    chosen = tl.zeros([TOP_K_2], tl.int32)
    weights = tl.zeros([TOP_K_2], tl.float32)
    for i in tl.static_range(TOP_K):
        best = _largest(packed)
        hit = packed == best
        chosen = tl.where(slot == i, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32), chosen)
        weights = tl.where(slot == i, tl.sum(tl.sum(tl.where(hit, scores, 0.0), axis=1), axis=0), weights)
        packed = tl.where(hit, _LOWEST, packed)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = weights * routed_scaling
    if ZERO_EXPERTS > 0:
        zero = chosen >= n_end - ZERO_EXPERTS
        tl.store(zero_ptr + token, tl.sum(tl.where(zero, weights, 0.0), axis=0))
        weights = tl.where(zero, 0.0, weights)
        chosen = tl.where(zero, -1, chosen)
    tl.store(weights_ptr + (token * TOP_K + slot), weights, mask=slot < TOP_K)
    tl.store(ids_ptr + (token * TOP_K + slot), chosen, mask=slot < TOP_K)
