"""Small Triton functions that several kernels share. All of them run on a GPU and in Triton's interpreter.

The interpreter truncates fp32 to bf16 and knows no e4m3 arithmetic, so conversions that must be right on a CPU are
spelled in integers here; the constexpr ``INTERPRET`` removes them from what a GPU runs.
"""

import triton
import triton.language as tl


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the preceding kernel of the stream has finished and its writes are visible (SM90 and later).

    Belongs once, at the top of a kernel, before the first load of anything another kernel wrote.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_launch(PDL: tl.constexpr):
    """Let the next kernel of the stream start early; it must call ``pdl_wait`` before it reads our results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def round_to_bf16(x):
    """fp32 rounded to the nearest bf16 value (ties to even), as fp32. NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000
    return tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x, INTERPRET: tl.constexpr):
    """fp32 to bf16, nearest even."""
    if INTERPRET:
        return round_to_bf16(x).to(tl.bfloat16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def e4m3_bytes_to_fp16(x):
    """uint8 that holds e4m3 bits to fp16, exactly: shift into place (the exponent bias differs by 8), times 2^8."""
    bits = x.to(tl.uint16)
    widened = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = widened.to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def widen(x, INTERPRET: tl.constexpr):
    """Matrix operand as fp16 (from fp8) or bf16; as fp32 of the same value when interpreted."""
    if x.dtype == tl.uint8:
        x = e4m3_bytes_to_fp16(x)
    elif x.dtype != tl.bfloat16:
        x = x.to(tl.float16)
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def probability_operand(p, FP8: tl.constexpr, INTERPRET: tl.constexpr):
    """Probabilities rounded to the 16-bit type of the value operand."""
    if FP8:
        rounded = p.to(tl.float16)
        if INTERPRET:
            return rounded.to(tl.float32)
        else:
            return rounded
    else:
        if INTERPRET:
            return round_to_bf16(p)
        else:
            return p.to(tl.bfloat16)


@triton.jit
def to_e4m3_bytes(x, SOFT: tl.constexpr):
    """fp32 to the uint8 code of the nearest e4m3 value: ties to even, saturating at 448, every NaN 0x7F.

    SOFT spells the conversion in integers, for the interpreter and for GPUs below compute capability 8.9.
    """
    if SOFT:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # from 2^-6 on: keep three bits of mantissa, exponent bias 127 -> 7
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20).to(tl.int32) - 960
        # below: steps of 2^-9, which is the last bit of numbers around 2^14
        small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True).to(tl.int32) & 0xF
        code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
        code = tl.where(magnitude > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80).to(tl.int32))
        return code.to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
