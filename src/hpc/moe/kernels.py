"""The two grouped products of the fused MoE in Triton: any GPU from SM80 on, and Triton's interpreter on a CPU.

e4m3 operands are widened to fp16, exactly, and multiplied with fp32 accumulation; BF16 ones are multiplied as they are.
Both kernels walk the tile list of `route.py`; the number of tiles is read on the device, the grid is fixed. A pointer
that is None takes its part of the formula away when the kernel is compiled.
"""

import triton
import triton.language as tl

from hpc.common.triton_helpers import e4m3_bytes_to_fp16, pdl_launch, pdl_wait, round_to_bf16, to_bf16
from hpc.moe import order

EXPERT_MASK = tl.constexpr((1 << order.EXPERT_BITS) - 1)  # of a word of the tile list


@triton.jit
def e4m3_bytes(x, HARDWARE: tl.constexpr):
    """fp32 to the bits of the nearest e4m3 value, ties to even, saturated at 448; NaN stays NaN.

    Without the conversion instruction (before SM89, interpreted): normal values round in the bits of fp32, values
    below 2^-6 on the grid of 2^-9.
    """
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        size = tl.minimum(tl.abs(x), 448.0)
        raw = size.to(tl.uint32, bitcast=True)
        normal = ((raw + ((raw >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
        # adding 2^23 leaves the nearest integer in the low bits
        small = (tl.minimum(size, 1.0) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFFFF
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(x == x, code, 0x7F)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _operand(x, BF16: tl.constexpr, INTERPRET: tl.constexpr):
    wide = x if BF16 else e4m3_bytes_to_fp16(x)
    return wide.to(tl.float32) if INTERPRET else wide


@triton.jit
def bf16_value(x, INTERPRET: tl.constexpr):
    """fp32 rounded to the nearest bf16 value, as fp32."""
    return round_to_bf16(x) if INTERPRET else x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def activate(gate, up, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BF16_MUL: tl.constexpr,
             INTERPRET: tl.constexpr):  # fmt: skip
    """act(gate) * up in fp32 from bf16 values; see `reference.activation`. LIMIT and ALPHA are 0 for none."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if ACT == "gelu":
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ALPHA > 0:
        act = gate / (1.0 + tl.exp(-gate * ALPHA))
        up = up + 1.0
    else:
        act = gate / (1.0 + tl.exp(-gate))
    if BF16_MUL:
        return bf16_value(bf16_value(act, INTERPRET) * up, INTERPRET)
    else:
        return act * up


@triton.jit(
    do_not_specialize=["num_rows", "top_k"],
    do_not_specialize_on_alignment=["x_scale_ptr", "w_scale_ptr", "act_scale_ptr", "bias_ptr", "weight_ptr"],
)
def _moe_gate_up_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, act_scale_ptr, bias_ptr, weight_ptr, expert_ptr, start_ptr, rows_ptr,
    num_tiles_ptr, pair_ptr, a_ptr, a_scale_ptr, num_rows, top_k, H, I, stride_a, x_scale_cols, w_scale_rows,
    w_scale_cols,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_SCALES: tl.constexpr,
    ACT_GROUPS: tl.constexpr, BF16: tl.constexpr, BF16_MUL: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (programs): a = quantise(silu(gate) * up), [gate | up] = bf16(x[token] w13^T * scale * weight[pair] + bias).

    A work item is a tile of rows times 128 columns of gate and the same 128 of up. x_ptr, w_ptr, a_ptr hold e4m3 bits,
    or BF16 numbers, which have no scales; rows of a are `stride_a` apart. BLOCK_SCALES: w_scale_ptr has one scale for
    each 128x128 weights and x_scale_ptr [tokens, x_scale_cols] one for each 128 columns of a row, else w_scale_ptr one
    an expert. ACT_GROUPS: so has a_scale_ptr [ceil(I / 128), num_rows]. BLOCK_K divides 128.
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    column_blocks = (I + 127) // 128
    work = tl.load(num_tiles_ptr) * column_blocks
    r = tl.arange(0, BLOCK_T)
    kk = tl.arange(0, BLOCK_K)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        tile = item // column_blocks
        i = item % column_blocks * 128 + tl.arange(0, 128)
        expert = (tl.load(expert_ptr + tile) & EXPERT_MASK).to(tl.int64)
        start = tl.load(start_ptr + tile)
        live = r < tl.load(rows_ptr + tile)
        pair = tl.load(pair_ptr + start + r, mask=live, other=0)
        token = (pair // top_k).to(tl.int64)
        gate_at = w_ptr + (expert * (2 * I) + i)[:, None] * H + kk[None, :]
        up_at = gate_at + I.to(tl.int64) * H
        x_at = x_ptr + token[:, None] * H + kk[None, :]
        gate = tl.zeros([BLOCK_T, 128], tl.float32)
        up = tl.zeros([BLOCK_T, 128], tl.float32)
        for k in range(0, H, BLOCK_K):
            inner = k + kk < H
            x = _operand(tl.load(x_at + k, mask=live[:, None] & inner[None, :], other=0), BF16, INTERPRET)
            w_mask = (i < I)[:, None] & inner[None, :]
            wg = _operand(tl.load(gate_at + k, mask=w_mask, other=0), BF16, INTERPRET)
            wu = _operand(tl.load(up_at + k, mask=w_mask, other=0), BF16, INTERPRET)
            if BLOCK_SCALES:
                xs = tl.load(x_scale_ptr + token * x_scale_cols + k // 128, mask=live, other=0.0)
                ws_at = w_scale_ptr + expert * (w_scale_rows * w_scale_cols) + k // 128
                gs = tl.load(ws_at + i // 128 * w_scale_cols, mask=i < I, other=0.0)
                us = tl.load(ws_at + (i + I) // 128 * w_scale_cols, mask=i < I, other=0.0)
                gate += tl.dot(x, tl.trans(wg)) * (xs[:, None] * gs[None, :])
                up += tl.dot(x, tl.trans(wu)) * (xs[:, None] * us[None, :])
            else:
                gate = tl.dot(x, tl.trans(wg), gate)
                up = tl.dot(x, tl.trans(wu), up)
        if not (BLOCK_SCALES or BF16):
            scale = tl.load(w_scale_ptr + expert)
            gate = gate * scale
            up = up * scale
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + pair, mask=live, other=0.0)
            gate = gate * weight[:, None]
            up = up * weight[:, None]
        if bias_ptr is not None:
            bias_at = bias_ptr + expert * (2 * I) + i
            gate += tl.load(bias_at, mask=i < I, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_at + I, mask=i < I, other=0.0).to(tl.float32)[None, :]
        gate = bf16_value(gate, INTERPRET)
        up = bf16_value(up, INTERPRET)
        value = activate(gate, up, ACT, LIMIT, ALPHA, BF16_MUL, INTERPRET)
        row = (start + r).to(tl.int64)
        if ACT_GROUPS:
            amax = tl.max(tl.where((i < I)[None, :], tl.abs(value), 0.0), 1)
            s = amax / 448.0
            value = value / (s + 1e-8)[:, None]
            tl.store(a_scale_ptr + item % column_blocks * num_rows + row, s, mask=live)
        elif not BF16:
            value = value * tl.load(act_scale_ptr)
        codes = to_bf16(value, INTERPRET) if BF16 else e4m3_bytes(value, HARDWARE)
        at = a_ptr + row[:, None] * stride_a + i[None, :]
        tl.store(at, codes, mask=live[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["w_scale_ptr", "bias_ptr"])
def _moe_down_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, expert_ptr, start_ptr, rows_ptr, num_tiles_ptr, pair_ptr, y_ptr,
    num_rows, H, I, stride_a, w_scale_rows, w_scale_cols,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_SCALES: tl.constexpr,
    ACT_GROUPS: tl.constexpr, BF16: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (programs): y[pair] = bf16(a[row] w2^T * scale + bias), a tile of rows times BLOCK_H columns a work item.

    Operands and scales as in `_moe_gate_up_kernel`.
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    column_blocks = (H + BLOCK_H - 1) // BLOCK_H
    work = tl.load(num_tiles_ptr) * column_blocks
    r = tl.arange(0, BLOCK_T)
    kk = tl.arange(0, BLOCK_K)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        tile = item // column_blocks
        h = item % column_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
        expert = (tl.load(expert_ptr + tile) & EXPERT_MASK).to(tl.int64)
        start = tl.load(start_ptr + tile)
        live = r < tl.load(rows_ptr + tile)
        row = (start + r).to(tl.int64)
        w_at = w_ptr + (expert * H + h)[:, None] * I + kk[None, :]
        a_at = a_ptr + row[:, None] * stride_a + kk[None, :]
        acc = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
        for k in range(0, I, BLOCK_K):
            inner = k + kk < I
            a = _operand(tl.load(a_at + k, mask=live[:, None] & inner[None, :], other=0), BF16, INTERPRET)
            w = _operand(tl.load(w_at + k, mask=(h < H)[:, None] & inner[None, :], other=0), BF16, INTERPRET)
            if BLOCK_SCALES:
                s = tl.load(a_scale_ptr + k // 128 * num_rows + row, mask=live, other=0.0)
                ws_at = w_scale_ptr + expert * (w_scale_rows * w_scale_cols) + k // 128
                ws = tl.load(ws_at + h // 128 * w_scale_cols, mask=h < H, other=0.0)
                acc += tl.dot(a, tl.trans(w)) * (s[:, None] * ws[None, :])
            elif ACT_GROUPS:
                s = tl.load(a_scale_ptr + k // 128 * num_rows + row, mask=live, other=0.0)
                acc += tl.dot(a, tl.trans(w)) * s[:, None]
            else:
                acc = tl.dot(a, tl.trans(w), acc)
        if not (BLOCK_SCALES or BF16):
            acc = acc * tl.load(w_scale_ptr + expert)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * H + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        pair = tl.load(pair_ptr + start + r, mask=live, other=0).to(tl.int64)
        at = y_ptr + pair[:, None] * H + h[None, :]
        tl.store(at, to_bf16(acc, INTERPRET), mask=live[:, None] & (h < H)[None, :])
