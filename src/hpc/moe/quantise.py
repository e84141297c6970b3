"""Activations of the fused MoE from BF16 to e4m3, scales of experts to block scales. Triton; runs on any GPU and
interpreted."""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait
from hpc.moe.kernels import e4m3_bytes


@triton.jit(do_not_specialize_on_alignment=["scale_ptr"])
def _moe_quantise_kernel(
    x_ptr, scale_ptr, q_ptr, H, columns, GROUPS: tl.constexpr, DYNAMIC: tl.constexpr, HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, ceil(H / (128 GROUPS))): e4m3 bits of a token's columns.

    DYNAMIC: s = max(max|x|, 1e-10) / 448 over 128 columns, to scale_ptr [tokens, columns], and q = e4m3(x / s).
    Else q = e4m3(x * (1 / scale_ptr[0])).
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    h = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    if DYNAMIC:
        s = tl.maximum(tl.max(tl.abs(x), 1), 1e-10) / 448.0
        tl.store(scale_ptr + t * columns + g, s, mask=g < columns)
        x = x / s[:, None]
    else:
        x = x * (1.0 / tl.load(scale_ptr))
    tl.store(q_ptr + t * H + h, e4m3_bytes(x, HARDWARE), mask=h < H)


@triton.jit(do_not_specialize_on_alignment=["up_ptr", "down_ptr"])
def _moe_expand_kernel(
    up_ptr, down_ptr, up_blocks_ptr, down_blocks_ptr, up_blocks, down_blocks, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (experts, ceil(blocks / BLOCK)): an expert's one scale in the place of each of its blocks'."""
    pdl_wait(PDL)
    pdl_launch(PDL)
    e = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ones = tl.full([BLOCK], 1.0, tl.float32)
    tl.store(up_blocks_ptr + e * up_blocks + at, ones * tl.load(up_ptr + e), mask=at < up_blocks)
    tl.store(down_blocks_ptr + e * down_blocks + at, ones * tl.load(down_ptr + e), mask=at < down_blocks)
