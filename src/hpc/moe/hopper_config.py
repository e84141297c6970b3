"""Compile-time facts of the SM90 kernels of the fused MoE."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from hpc.common.facts import KernelFacts


@dataclass(frozen=True, repr=False)
class UpConfig(KernelFacts):
    """The gate-up kernel. A tile is 64 columns of gate and the same of up, for N rows; HALVES tiles make an item."""

    H: int
    I: int
    N: int  # rows (tokens) of a tile: 8 to 256
    KS: int  # blocks of 128 along H in a stage
    STAGES: int
    WARPS: int  # of the consumer: 4 or 8
    PWARPS: int  # of the producer
    BLOCK: bool  # 128x128 block scales
    BF16_MUL: bool
    SPLIT: bool  # programs take equal runs of stages, across items; else whole items in turn
    PDL: bool
    FRESH: int = (
        128  # columns of H in a fresh accumulator: 32, 64, 128; one scale a tensor also KS * 128 and more
    )
    ACT: str = "silu"  # of the gate; LIMIT and ALPHA as in `kernels.activate`, 0 for none
    LIMIT: float = 0.0
    ALPHA: float = 0.0
    PAIR: bool = False  # both tiles of 128 columns in one pass: `hopper_pair`
    LAG: int = 2  # stages that gathered rows may be late when they are handed over
    PRODUCER_REGS: int = 56
    PAIR_REGS: int = 224  # of either warpgroup there

    @property
    def SPANS(self) -> int:
        """Fresh accumulators for the 128 columns of a box."""
        return max(1, 128 // self.FRESH)

    @property
    def GROUP(self) -> int:
        """Products in flight at a time, a power of two: what fits beside the sums in 160 registers a thread; block
        scales take registers too."""
        registers = 128 * self.N // (32 * self.WARPS)
        fits = max(1, ((128 if self.BLOCK else 160) - registers) // registers)
        return min(self.KS * self.SPANS, 1 << fits.bit_length() - 1)

    @property
    def HALVES(self) -> int:
        """Tiles of an item: block scales need all 128 columns of a group of the activations together."""
        return 2 if self.BLOCK or self.PAIR else 1

    @property
    def RT(self) -> int:
        """Items along I."""
        return -(-self.I // (64 * self.HALVES))

    @property
    def KB(self) -> int:
        return -(-self.H // 128)

    @property
    def KU(self) -> int:
        """Stages of a tile."""
        return -(-self.KB // self.KS)

    @property
    def UNITS(self) -> int:
        """Stages of an item."""
        return self.KU * self.HALVES

    @property
    def W_BOX(self):
        return gl.NVMMASharedLayout(128, 8, rank=5)

    @property
    def TILE(self):
        return gl.NVMMASharedLayout(128, 8, rank=2)

    @property
    def MMA(self):
        return gl.NVMMADistributedLayout([3, 0], [self.WARPS, 1], [16, self.N, 32])

    @property
    def GATHER(self):
        """Rows of x by 16-byte pieces."""
        return gl.BlockedLayout([1, 16], [4, 8], [self.PWARPS, 1], [1, 0])

    @property
    def PAIR_MMA(self):
        """[64, 128] of one warpgroup, tokens first."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])

    @property
    def QUARTER_MMA(self):
        """[64, 64] of one warpgroup, tokens first."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])

    @property
    def PARTS(self) -> int:
        """Of the 256 weight rows of a pair's item, each with sums of its own: halves, or quarters."""
        return 4 if self.FRESH == 64 else 2

    @property
    def PAIR_OUT(self):
        """[64, 64 or 32] with 16 columns of the activations, 16 bytes, in a thread; a warp keeps its tokens."""
        columns, rows, warps = [[0, 1], [0, 2], [0, 4], [0, 8]], [[1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
        if self.PARTS == 4:
            return gl.DistributedLinearLayout(columns, [[0, 16], [8, 0], *rows], warps, [], [64, 32])
        return gl.DistributedLinearLayout([*columns, [8, 0]], [[0, 16], [0, 32], *rows], warps, [], [64, 64])

    @property
    def OUT(self):
        """[64, N] with eight columns of the activations, 8 bytes, in a thread."""
        return gl.BlockedLayout([8, 1], [8, 4], [1, self.WARPS], [0, 1])


@dataclass(frozen=True, repr=False)
class DownConfig(KernelFacts):
    """The down kernel. A tile is 128 columns of the output, or 256, for N rows."""

    H: int
    I: int
    N: int
    BK: int  # bytes of a row in a box: 64 or 128
    KS: int  # boxes along I in a stage
    STAGES: int
    WARPS: int
    BLOCK: bool
    SPREAD: bool  # items in turn, so that the programs share an expert's weights; else equal runs of items
    PDL: bool
    PAIR: bool = False  # 256 columns of the output: `hopper_pair`
    PRODUCER_REGS: int = 40
    PAIR_REGS: int = 232  # of either warpgroup there

    @property
    def RT(self) -> int:
        return -(-self.H // (256 if self.PAIR else 128))

    @property
    def KB(self) -> int:
        return -(-self.I // self.BK)

    @property
    def KU(self) -> int:
        return -(-self.KB // self.KS)

    @property
    def W_BOX(self):
        return gl.NVMMASharedLayout(self.BK, 8, rank=3)

    @property
    def TILE(self):
        return gl.NVMMASharedLayout(self.BK, 8, rank=2)

    @property
    def MMA(self):
        return gl.NVMMADistributedLayout([3, 0], [self.WARPS, 1], [16, self.N, 32])

    @property
    def PAIR_MMA(self):
        """[64, 128] of one warpgroup, tokens first."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])

    @property
    def PAIR_OUT(self):
        """[64, 128] with eight columns of the output, 16 bytes, in a thread; a warp keeps its tokens."""
        columns = [[0, 1], [0, 2], [0, 4]]
        return gl.DistributedLinearLayout(
            [*columns, [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
            [64, 128],
        )  # fmt: skip

    @property
    def OUT(self):
        """[128, N] with eight columns of the output, 16 bytes, in a thread."""
        return gl.BlockedLayout([8, 1], [16, 2], [1, self.WARPS], [0, 1])
