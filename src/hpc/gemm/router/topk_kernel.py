# ruff: noqa: SIM108
"""Expert choice from router logits, in Triton: sum of partials, scores, groups, top-k, weights."""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait
from hpc.gemm.router.kernels import _sum_splits

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(x):
    """fp32 to an int32 of the same order, above the lowest; -0.0 and 0.0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(ordered):
    """The fp32 of an `_ordered` int32."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _two_best(a, b, c, d):
    """The largest two of (a >= b) and (c >= d)."""
    return tl.maximum(a, c), tl.maximum(tl.minimum(a, c), tl.maximum(b, d))


@triton.jit
def _allowed(choice, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr):
    """Whether a group of `choice` [groups, experts] is among the best: by its best expert or the sum of its best two.

    A group counts those before it; all are compared at once.
    """
    GROUPS: tl.constexpr = choice.shape[0]
    if SUM_OF_TWO:
        first, second = tl.reduce((choice, tl.full(choice.shape, float("-inf"), tl.float32)), 1, _two_best)
        rank = first + second
    else:
        rank = tl.max(choice, axis=1)
    g = tl.arange(0, GROUPS)
    key = tl.where(g < NUM_GROUPS, _ordered(rank), _LOWEST)
    before = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (g[None, :] < g[:, None]))
    return tl.sum(before.to(tl.int32), axis=1) < TOP_GROUPS


@triton.jit
def _clean(logits):
    """NaN counts as the lowest logit."""
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def _score(logits, top, share, SIGMOID: tl.constexpr):
    """Sigmoid, or softmax by the largest logit and one over the sum."""
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logits))
    else:
        score = tl.exp(logits - top) * share
    return tl.where(score == score, score, 0.0)  # infinite logits


@triton.jit
def _choose_row(
    part_ptr, bias, weights_ptr, ids_ptr, zero_ptr, token, num_tokens, n_end, splits, routed_scaling, ids, mask,
    MAX_SPLITS: tl.constexpr, TOP_K: tl.constexpr, TOP_K_2: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUPS_2: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr, ZERO_EXPERTS: tl.constexpr,
):  # fmt: skip
    stride_split = num_tokens.to(tl.int64) * n_end
    row = part_ptr + token * n_end
    logits = _clean(_sum_splits(row, ids, stride_split, splits, mask, MAX_SPLITS))
    top, share = 0.0, 1.0
    if not SIGMOID:
        top = _value(tl.max(tl.where(mask, _ordered(logits), _LOWEST), axis=0))
        top = tl.where(top > float("-inf"), top, 0.0)
        total = tl.sum(tl.where(mask, tl.exp(logits - top), 0.0), axis=0)
        share = 1.0 / tl.where(total > 0.0, total, 1.0)
    choice = logits
    if BIAS:
        choice = _score(logits, top, share, SIGMOID) + bias
    if NUM_GROUPS > 1:
        grouped = tl.reshape(tl.where(mask, choice, float("-inf")), (GROUPS_2, ids.shape[0] // GROUPS_2))
        allowed = _allowed(grouped, NUM_GROUPS, TOP_GROUPS, BIAS)
        choice = tl.reshape(tl.where(allowed[:, None], grouped, float("-inf")), ids.shape)

    key = tl.where(mask, _ordered(choice), _LOWEST)
    slot = tl.arange(0, TOP_K_2)
    chosen = tl.zeros([TOP_K_2], tl.int32)
    best_keys = tl.zeros([TOP_K_2], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        expert = tl.min(tl.where(key == best, ids, _HIGHEST), axis=0)
        chosen = tl.where(slot == i, expert, chosen)
        best_keys = tl.where(slot == i, best, best_keys)
        key = tl.where(ids == expert, _LOWEST, key)
    picked = slot < TOP_K
    if BIAS:  # a score + bias does not give the score back; the logits of the chosen are in the L1
        best_logits = _clean(_sum_splits(row, chosen, stride_split, splits, picked, MAX_SPLITS))
    else:
        best_logits = _value(best_keys)
    weights = tl.where(picked, _score(best_logits, top, share, SIGMOID), 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = weights * routed_scaling
    if ZERO_EXPERTS > 0:
        zero = chosen >= n_end - ZERO_EXPERTS
        tl.store(zero_ptr + token, tl.sum(tl.where(zero, weights, 0.0), axis=0))
        weights = tl.where(zero, 0.0, weights)
        chosen = tl.where(zero, -1, chosen)
    tl.store(weights_ptr + (token * TOP_K + slot), weights, mask=picked)
    tl.store(ids_ptr + (token * TOP_K + slot), chosen, mask=picked)


@triton.jit(do_not_specialize=["num_tokens", "splits", "rows"])
def _router_topk_kernel(
    part_ptr, bias_ptr, weights_ptr, ids_ptr, zero_ptr, num_tokens, n_end, splits, rows, routed_scaling,
    MAX_SPLITS: tl.constexpr, TOP_K: tl.constexpr, TOP_K_2: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUPS_2: tl.constexpr, SIZE: tl.constexpr, SIZE_2: tl.constexpr,
    SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, ZERO_EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`rows` tokens a program, one after the other. Grid: (num_tokens / rows).

    part_ptr fp32 [splits, num_tokens, n_end] holds partial logits. Groups of experts are padded to powers of two.
    Without a bias the choice is by logit, which scores only follow; with one, by score + bias. TOP_K times the largest
    int32 key is taken and, of those that have it, the lowest id: equal inputs give equal ids. With one warp a program
    both are an instruction across the warp (`redux`), and nothing passes through shared memory but ranks of groups.
    """
    pdl_launch(PDL)
    i = tl.arange(0, GROUPS_2 * SIZE_2)
    ids = i // SIZE_2 * SIZE + i % SIZE_2
    mask = (i // SIZE_2 < NUM_GROUPS) & (i % SIZE_2 < SIZE)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + ids, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    first = tl.program_id(0).to(tl.int64) * rows
    for token in range(first, tl.minimum(first + rows, num_tokens)):
        _choose_row(
            part_ptr, bias, weights_ptr, ids_ptr, zero_ptr, token, num_tokens, n_end, splits, routed_scaling, ids, mask,
            MAX_SPLITS, TOP_K, TOP_K_2, NUM_GROUPS, TOP_GROUPS, GROUPS_2, SIGMOID, BIAS, RENORMALIZE, ZERO_EXPERTS,
        )  # fmt: skip
