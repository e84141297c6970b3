"""Compile-time facts of the SM90 router kernels."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from hpc.common.facts import KernelFacts


def _bits(count: int) -> range:
    return range(count.bit_length() - 1)


@dataclass(frozen=True, repr=False)
class SmallConfig(KernelFacts):
    """The register kernel for few tokens: a CTA takes 16 weight rows, MT tokens and WARPS * CHUNKS * 32 of K."""

    WARPS: int
    CHUNKS: int  # blocks of 32 along K a warp
    MT: int  # tokens: 8, 16, 32 or 64
    TERMS: int  # BF16 parts of the weight: 2 or 3
    PARTIAL: bool  # K is split over CTAs
    EARLY: bool  # weights into registers before the wait for the preceding kernel
    PDL: bool

    @property
    def ROWS(self) -> int:
        return 16

    @property
    def SPAN(self) -> int:
        """Elements of K a CTA."""
        return self.WARPS * self.CHUNKS * 32

    @property
    def MMA(self):
        return gl.NVMMADistributedLayout([2, 0], [self.WARPS, 1, 1], instr_shape=[1, 16, 8])

    @property
    def LA(self):
        return gl.DotOperandLayout(0, self.MMA, 2)

    @property
    def LB(self):
        return gl.DotOperandLayout(1, self.MMA, 2)

    def fragment(self, rows: int):
        """[WARPS, rows, 32] with 16 consecutive bytes of a row a lane, four lanes a row, eight rows a warp.

        Its elements are those of an m16n8k16 operand up to an order of K, the same for weights and tokens.
        """
        registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *([0, 8 << i, 0] for i in _bits(rows // 8))]
        lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
        warps = [[1 << i, 0, 0] for i in _bits(self.WARPS)]
        return gl.DistributedLinearLayout(registers, lanes, warps, [], [self.WARPS, rows, 32])

    @property
    def W_LOAD(self):
        return self.fragment(self.ROWS)

    @property
    def X_LOAD(self):
        return self.fragment(self.MT)

    @property
    def MERGE(self):
        """All warps' sums of an element in one thread; weight rows along lanes, as they lie in the output."""
        return gl.BlockedLayout([self.WARPS, 1, 1], [1, 16, 2], [1, 1, self.WARPS], [1, 2, 0])


@dataclass(frozen=True, repr=False)
class TileConfig(KernelFacts):
    """The wgmma kernel: a CTA takes BM tokens and BN = P0 + P1 weight rows, high and low parts stacked."""

    BM: int
    P0: int
    P1: int  # 0: one piece
    STAGES: int
    TERMS: int
    PARTIAL: bool
    EARLY: bool  # weights of the first stages before the wait
    PDL: bool

    @property
    def BK(self) -> int:
        return 64

    @property
    def PROMOTE(self) -> int:
        """Steps of K after which the accumulator is added to an fp32 sum outside the matrix unit; 0: never.

        The matrix unit's own additions lose more than a third part of the weight gains: see README.
        """
        return 4 if self.TERMS == 3 else 0

    @property
    def BN(self) -> int:
        return self.P0 + self.P1

    @property
    def WARPS(self) -> int:
        return 4 if self.BM == 64 else 8

    @property
    def REGISTERS(self) -> int | None:
        """Registers a thread at launch, as measured. Few where they suffice: other kernels' CTAs fit beside then."""
        if self.BM == 128:
            return 168
        return 80 if self.TERMS * self.BN == 64 else None

    @property
    def BOX(self) -> int:
        """Weight rows of a TMA box."""
        return self.P1 if self.P1 else self.P0

    @property
    def STAGE_BYTES(self) -> int:
        return (self.BM + self.TERMS * self.BN) * self.BK * 2

    @property
    def SMEM(self):
        return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def mma(self, n: int):
        return gl.NVMMADistributedLayout([3, 0], [self.WARPS, 1], instr_shape=[16, n, 16])

    @property
    def MMA0(self):
        return self.mma(2 * self.P0)

    @property
    def MMA1(self):
        return self.mma(2 * self.P1)

    @property
    def MMA3(self):
        return self.mma(self.P0)
