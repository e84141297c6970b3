"""Gluon names that differ between Triton versions, and the inline PTX that several Hopper kernels use."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "barrier",
    "fence_async_shared",
    "mbarrier",
    "mma_v2",
    "pdl_launch",
    "pdl_wait",
    "split_e4m3_halves",
    "split_e4m3_pairs",
    "tma_load",
]

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7
tma_load = tma.async_copy_global_to_shared if hasattr(tma, "async_copy_global_to_shared") else tma.async_load


@gluon.jit
def split_e4m3_pairs(x):
    """int16 holding two e4m3 values -> (first, second) as f16, exact: one byte permute and two conversions a pair."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 t;
            .reg .b16 a, b;
            prmt.b32 t, $2, 0, 0x3120;
            mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
        }
        """,
        "=r,=r,r",
        args=[x],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def split_e4m3_halves(x):
    """int16 pairs, two neighbours a register -> the first and the second neighbour's two e4m3 values as f16, exact.

    Two conversions and no permute. The order along the contraction is that of `x` with (pair, byte) exchanged within
    two neighbours: both operands of a product must be split alike.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 a, b;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
        }
        """,
        "=r,=r,r",
        args=[x],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def pdl_wait(PDL: gl.constexpr):
    """Wait until the preceding kernel of the stream has finished and its writes are visible."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", args=[], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def pdl_launch(PDL: gl.constexpr):
    """Let the following kernel of the stream start; it waits for this one in its own `pdl_wait`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", args=[], dtype=gl.int32, is_pure=False, pack=1
        )
