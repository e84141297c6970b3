"""Joins the parts of split calls.

Part s of a row holds o_s, its output alone, and lse_s. With w_s = exp(lse_s - max lse) the row is

    o = sum_s w_s o_s / (sum_s w_s + exp(sink - max lse)),    lse = max lse + log(that sum)

summed in an order that only their number decides, so bits repeat. A part without a visible key has lse_s = -inf and is
not read. The lse is stored whether anyone asked for it or not: without the store, the compiler sums in another order.
"""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait, to_bf16

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=["rows", "splits"],
    do_not_specialize_on_alignment=["o_ptr", "lse_ptr", "part_lse_ptr", "sinks_ptr"],
)
def _prefill_combine_kernel(
    o_ptr, lse_ptr, part_o_ptr, part_lse_ptr, sinks_ptr, rows, splits, stride_o_tok, stride_o_head,
    HQ: tl.constexpr, DV: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows / BLOCK_R)); a row is a token and a head, rows = tokens * HQ; splits <= BLOCK_S. All parts of a
    row are under way at once.

    o bf16 [tokens, HQ, DV] with strides, lse [tokens, HQ], part_o [tokens * splits, HQ, DV],
    part_lse [tokens * splits, HQ], sinks [HQ], all fp32 and contiguous but o.
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = r < rows
    token = (r // HQ).to(tl.int64)
    head = r % HQ
    s = tl.arange(0, BLOCK_S)
    offs_v = tl.arange(0, BLOCK_DV)
    cols = offs_v < DV
    row = (token[:, None] * splits + s[None, :]) * HQ + head[:, None]
    there = live[:, None] & (s < splits)[None, :]
    part_lse = tl.load(part_lse_ptr + row, mask=there, other=float("-inf"))
    top = tl.max(part_lse, 1)
    empty = top == float("-inf")
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0)
        top = tl.where(empty, sink, tl.maximum(top, sink))
    else:
        top = tl.where(empty, 0.0, top)
    weight = tl.exp2((part_lse - top[:, None]) * LOG2E)
    total = tl.sum(weight, 1)
    if SINKS:
        total += tl.exp2((sink - top) * LOG2E)
    total = tl.where(empty, 1.0, total)
    at = row[:, :, None] * DV + offs_v[None, None, :]
    o = tl.load(part_o_ptr + at, mask=(weight > 0.0)[:, :, None] & cols[None, None, :], other=0.0)
    out = to_bf16(tl.sum(o * weight[:, :, None], 1) / total[:, None], INTERPRET)
    at_o = token * stride_o_tok + head.to(tl.int64) * stride_o_head
    tl.store(o_ptr + at_o[:, None] + offs_v[None, :], out, mask=live[:, None] & cols[None, :])
    lse = tl.where(empty, float("-inf"), top + tl.log2(total) * LN2)
    tl.store(lse_ptr + token * HQ + head, lse, mask=live)
