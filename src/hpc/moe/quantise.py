"""Activations of the fused MoE from BF16 to e4m3. Triton; runs on any GPU and interpreted."""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_launch, pdl_wait
from hpc.moe.kernels import e4m3_bytes


@triton.jit(do_not_specialize_on_alignment=["scale_ptr"])
def _moe_quantise_kernel(
    x_ptr, scale_ptr, q_ptr, H, columns, GROUPS: tl.constexpr, BLOCK_SCALES: tl.constexpr, HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, ceil(H / (128 GROUPS))): e4m3 bits of a token's columns.

    Block scales: s = max(max|x|, 1e-10) / 448 over 128 columns, to scale_ptr [tokens, columns], and q = e4m3(x / s).
    Else q = e4m3(x * (1 / scale_ptr[0])).
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    h = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    if BLOCK_SCALES:
        s = tl.maximum(tl.max(tl.abs(x), 1), 1e-10) / 448.0
        tl.store(scale_ptr + t * columns + g, s, mask=g < columns)
        x = x / s[:, None]
    else:
        x = x * (1.0 / tl.load(scale_ptr))
    tl.store(q_ptr + t * H + h, e4m3_bytes(x, HARDWARE), mask=h < H)


@triton.jit(do_not_specialize=["rows"])
def _moe_few_quantise_kernel(
    values_ptr, q_ptr, scale_ptr, rows, I: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows / ROWS), ceil(I / 128)): s = max|v| / 448 over 128 columns of a row, q = e4m3(v / (s + 1e-8)).

    values_ptr: fp32 [rows, I]; q_ptr: e4m3 bits [rows, I]; scale_ptr: fp32 [rows, groups]. The next kernel may start at
    once: it waits for this one, and needs nothing of it before.
    """
    pdl_launch(PDL)
    pdl_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * 128 + tl.arange(0, 128)
    live = (row < rows)[:, None] & (i < I)[None, :]
    at = row[:, None] * I + i[None, :]
    values = tl.load(values_ptr + at, mask=live, other=0.0)
    s = tl.max(tl.abs(values), 1) / 448.0
    tl.store(scale_ptr + row * tl.num_programs(1) + tl.program_id(1), s, mask=row < rows)
    tl.store(q_ptr + at, e4m3_bytes(values / (s + 1e-8)[:, None], HARDWARE), mask=live)
