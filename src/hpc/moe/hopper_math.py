"""The activation of the SM90 kernels, in as few instructions as its roundings allow.

Left to the compiler, one activation of a tile is some 25 instructions, two of them a conversion to bf16 on the unit of
special functions: 128 x 128 of them kept an SM busy for a tenth of the products' time at H = 4096.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def round_bf16(x):
    """fp32 rounded to bf16, two at a time: the conversion of a pair runs at half the rate of an addition, that of one
    number at a sixteenth."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 t;
            cvt.rn.bf16x2.f32 t, $3, $2;
            shl.b32 $0, t, 16;
            and.b32 $1, t, 0xffff0000;
        }
        """,
        "=r,=r,r,r",
        args=[x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def inverse(x):
    """1 / x to 1 ulp, subnormal results as 0."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", args=[x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def sigmoid(x):
    """1 / (1 + e^-x), the exponential to 2 ulp of its argument's rounding."""
    e = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        args=[x * -1.4426950408889634],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return inverse(1.0 + e)


@gluon.jit
def gated(gate, up, scale, C: gl.constexpr):
    """act(gate) * up as fp32."""
    if not C.BLOCK:
        gate = gate * scale
        up = up * scale
    gate = round_bf16(gate)
    up = round_bf16(up)
    if C.LIMIT > 0:
        gate = gl.minimum(gate, C.LIMIT)
        up = gl.minimum(gl.maximum(up, -C.LIMIT), C.LIMIT)
    if C.ACT == "gelu":
        act = 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476))
    elif C.ALPHA > 0:
        act = gate * sigmoid(gate * C.ALPHA)
        up = up + 1.0
    else:
        act = gate * sigmoid(gate)
    if C.BF16_MUL:
        return round_bf16(round_bf16(act) * up)
    else:
        return act * up
