"""Joins the parts of split calls.

Part s of a row holds o_s, its output alone, and lse_s. With w_s = exp(lse_s - max lse) the row is

    o = sum_s w_s o_s / (sum_s w_s + exp(sink - max lse)),    lse = max lse + log(that sum)

summed in the order of the parts, so bits repeat. A part without a visible key has lse_s = -inf and is not read.
"""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait, to_bf16

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["o_ptr", "lse_ptr", "part_o_ptr", "part_lse_ptr", "sinks_ptr"],
)
def _prefill_combine_kernel(
    o_ptr, lse_ptr, part_o_ptr, part_lse_ptr, sinks_ptr, rows, stride_o_tok, stride_o_head,
    HQ: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows / BLOCK_R)); a row is a token and a head, rows = tokens * HQ. 4 warps.

    o bf16 [tokens, HQ, DV] with strides, lse [tokens, HQ], part_o [tokens * SPLITS, HQ, DV],
    part_lse [tokens * SPLITS, HQ], sinks [HQ], all fp32 and contiguous but o.
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = r < rows
    token = (r // HQ).to(tl.int64)
    head = r % HQ
    offs_v = tl.arange(0, BLOCK_DV)
    cols = (offs_v < DV)[None, :]
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for s in tl.static_range(SPLITS):
        top = tl.maximum(
            top, tl.load(part_lse_ptr + (token * SPLITS + s) * HQ + head, mask=live, other=float("-inf"))
        )
    empty = top == float("-inf")
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0)
        top = tl.where(empty, sink, tl.maximum(top, sink))
        total = tl.exp2((sink - top) * LOG2E)
    else:
        top = tl.where(empty, 0.0, top)
        total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    for s in tl.static_range(SPLITS):
        row = (token * SPLITS + s) * HQ + head
        weight = tl.exp2((tl.load(part_lse_ptr + row, mask=live, other=float("-inf")) - top) * LOG2E)
        read = (live & (weight > 0.0))[:, None] & cols
        o = tl.load(part_o_ptr + row[:, None] * DV + offs_v[None, :], mask=read, other=0.0)
        acc += weight[:, None] * o
        total += weight
    total = tl.where(empty, 1.0, total)
    out = to_bf16(acc / total[:, None], INTERPRET)
    at = token * stride_o_tok + head.to(tl.int64) * stride_o_head
    tl.store(o_ptr + at[:, None] + offs_v[None, :], out, mask=live[:, None] & cols)
    if LSE:
        lse = tl.where(empty, float("-inf"), top + tl.log2(total) * LN2)
        tl.store(lse_ptr + token * HQ + head, lse, mask=live)
