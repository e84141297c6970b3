"""The fused MoE for a handful of tokens in two launches: no index, no tiles, every pair on its own. Triton.

With few pairs hardly two of them meet at an expert, and what counts is how soon the first weight byte is asked for and
how many SMs ask. So the first kernel cuts every pair's gate and up rows over the GPU, the second every token's output
columns; it reads its weights before the first has finished, and sums over the token's experts itself. Products are
fp32 multiply-adds of widened e4m3 values: exact up to fp32 rounding.
"""

import triton
import triton.language as tl

from hpc.common.triton_helpers import e4m3_bytes_to_fp16, pdl_launch, pdl_wait, to_bf16
from hpc.moe.kernels import activate, bf16_value, e4m3_bytes


@triton.jit
def _value(x, HARDWARE: tl.constexpr):
    """e4m3 bits to fp32, exactly."""
    if HARDWARE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        return e4m3_bytes_to_fp16(x).to(tl.float32)


@triton.jit(
    do_not_specialize=["num_experts", "first_expert"],
    do_not_specialize_on_alignment=["ids_ptr", "x_scale_ptr", "w_scale_ptr", "act_scale_ptr"],
)
def _moe_tiny_up_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, act_scale_ptr, ids_ptr, a_ptr, num_experts, first_expert,
    x_scale_cols, w_scale_rows, w_scale_cols,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BLOCK_SCALES: tl.constexpr, BF16_MUL: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    HARDWARE: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (I / ROWS, pairs): ROWS activations of a pair. ROWS divides 16, so a slice lies in one block of 128 rows.

    a_ptr: e4m3 bits [pairs, I]; with block scales fp32 values [pairs, I], not quantised yet.
    """
    pdl_wait(PDL)
    pdl_launch(PDL)
    pair = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = (tl.load(ids_ptr + pair) - first_expert).to(tl.int64)
    if (expert >= 0) & (expert < num_experts):
        token = pair // TOP_K
        kk = tl.arange(0, COLS)
        gate_at = w_ptr + (expert * (2 * I) + i)[:, None] * H + kk[None, :]
        gate = tl.zeros([ROWS, COLS], tl.float32)
        up = tl.zeros([ROWS, COLS], tl.float32)
        for k in tl.static_range(0, H, COLS):
            inside = k + kk < H
            x = _value(tl.load(x_ptr + token * H + k + kk, mask=inside, other=0), HARDWARE)
            wg = tl.load(gate_at + k, mask=inside[None, :], other=0)
            wu = tl.load(gate_at + (I * H + k), mask=inside[None, :], other=0)
            if BLOCK_SCALES:
                block = (k + kk) // 128
                x = x * tl.load(x_scale_ptr + token * x_scale_cols + block, mask=inside, other=0.0)
                first = tl.program_id(0) * ROWS
                scales = w_scale_ptr + expert * (w_scale_rows * w_scale_cols) + block
                xg = x * tl.load(scales + first // 128 * w_scale_cols, mask=inside, other=0.0)
                xu = x * tl.load(scales + (first + I) // 128 * w_scale_cols, mask=inside, other=0.0)
            else:
                xg = x
                xu = x
            gate += _value(wg, HARDWARE) * xg[None, :]
            up += _value(wu, HARDWARE) * xu[None, :]
        g = tl.sum(gate, 1)
        u = tl.sum(up, 1)
        if not BLOCK_SCALES:
            scale = tl.load(w_scale_ptr + expert)
            g = g * scale
            u = u * scale
        g = bf16_value(g, INTERPRET)
        u = bf16_value(u, INTERPRET)
        value = activate(g, u, ACT, LIMIT, ALPHA, BF16_MUL, INTERPRET)
        at = a_ptr + pair * I + i
        if BLOCK_SCALES:
            tl.store(at, value)
        else:
            tl.store(at, e4m3_bytes(value * tl.load(act_scale_ptr), HARDWARE))


@triton.jit(
    do_not_specialize=["num_experts", "first_expert", "factor"],
    do_not_specialize_on_alignment=["ids_ptr", "weight_ptr", "w_scale_ptr"],
)
def _moe_tiny_down_kernel(
    a_ptr, w_ptr, w_scale_ptr, ids_ptr, weight_ptr, shared_ptr, out_ptr, num_experts, first_expert, w_scale_rows,
    w_scale_cols, stride_out, factor,
    H: tl.constexpr, I: tl.constexpr, IP: tl.constexpr, TOP_K: tl.constexpr, COLS: tl.constexpr,
    BLOCK_SCALES: tl.constexpr, SHARED: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (H / COLS, tokens): COLS outputs of a token, summed over its experts in the order of top-k.

    IP: I rounded up to a power of two, at least 128. COLS divides 64.
    """
    t = tl.program_id(1)
    h = tl.program_id(0) * COLS + tl.arange(0, COLS)
    i = tl.arange(0, IP)
    inside = i < I
    # The weights of all experts are on their way before the activations are waited for.
    weights = ()
    for k in tl.static_range(TOP_K):
        expert = (tl.load(ids_ptr + t * TOP_K + k) - first_expert).to(tl.int64)
        ours = (expert >= 0) & (expert < num_experts)
        at = w_ptr + (tl.where(ours, expert, 0) * H + h)[:, None] * I + i[None, :]
        weights = weights + (tl.load(at, mask=ours & inside[None, :], other=0),)
    pdl_wait(PDL)
    pdl_launch(PDL)
    acc = tl.zeros([COLS], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = t * TOP_K + k
        expert = (tl.load(ids_ptr + pair) - first_expert).to(tl.int64)
        ours = (expert >= 0) & (expert < num_experts)
        expert = tl.where(ours, expert, 0)
        weight = tl.load(weight_ptr + pair, mask=ours, other=0.0)
        a = tl.load(a_ptr + pair * I + i, mask=ours & inside, other=0)
        if BLOCK_SCALES:
            groups = tl.reshape(a, [IP // 128, 128])
            s = tl.max(tl.abs(groups), 1) / 448.0
            q = _value(e4m3_bytes(groups / (s + 1e-8)[:, None], HARDWARE), HARDWARE)
            g = tl.arange(0, IP // 128)
            at = (
                w_scale_ptr
                + expert * (w_scale_rows * w_scale_cols)
                + tl.program_id(0) * COLS // 128 * w_scale_cols
            )
            s = s * tl.load(at + g, mask=ours & (g * 128 < I), other=0.0)
            a_value = tl.reshape(q * s[:, None], [IP])
            y = tl.sum(_value(weights[k], HARDWARE) * a_value[None, :], 1)
        else:
            a_value = _value(a, HARDWARE)
            y = tl.sum(_value(weights[k], HARDWARE) * a_value[None, :], 1)
            y = y * tl.load(w_scale_ptr + expert)
        acc += tl.where(ours & (weight != 0.0), weight * bf16_value(y, INTERPRET), 0.0)
    acc = acc * factor
    if SHARED:
        acc += tl.load(shared_ptr + t * H + h).to(tl.float32)
    tl.store(out_ptr + t.to(tl.int64) * stride_out + h, to_bf16(acc, INTERPRET))
