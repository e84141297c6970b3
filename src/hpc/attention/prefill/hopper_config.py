"""Compile-time facts of the SM90 prefill kernels."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from hpc.common.facts import KernelFacts


@dataclass(frozen=True, repr=False)
class Config(KernelFacts):
    """Compile-time facts of one kernel; derived sizes are properties, so the cache key holds only what varies."""

    D: int  # head dim of q, k and v
    P: int  # page size in tokens
    PACK: int  # query heads of a tile
    HQ: int
    HKV: int
    STAGES: int  # of K and of V
    FP8: bool
    CAUSAL: bool
    WINDOW: bool
    CAP: bool
    SINKS: bool
    LSE: bool
    PDL: bool
    BN: int = 128  # keys of a block; 64 with a head dim of 256
    OVERLAP: bool = False  # of a tile's end and the next one's first scores in BF16; FP8 has it always
    SPLIT: bool = False  # a CTA has a part of a tile's keys; without SINKS, with LSE

    @property
    def NH(self) -> int:
        """Tiles side by side over the query heads."""
        return self.HQ // self.PACK

    @property
    def G(self) -> int:
        return self.HQ // self.HKV

    @property
    def QT(self) -> int:
        """Tokens of a consumer's 64 rows."""
        return 64 // self.PACK

    @property
    def QSTAGES(self) -> int:
        """Tiles of Q in shared memory: two where the next tile's first scores start before this one is stored."""
        return 2 if self.FP8 or self.OVERLAP else 1

    @property
    def BYTES(self) -> int:
        return 1 if self.FP8 else 2

    @property
    def PB(self) -> int:
        """Tokens of a TMA box."""
        return min(self.P, self.BN)

    @property
    def NP(self) -> int:
        """Boxes along the tokens of a block."""
        return self.BN // self.PB

    @property
    def DB(self) -> int:
        """Elements of a TMA box along the head dim: the 128 bytes of a swizzle span at most."""
        return min(self.D, 128 // self.BYTES)

    @property
    def KH(self) -> int:
        """Boxes along the head dim."""
        return self.D // self.DB

    @property
    def OH(self) -> int:
        """Boxes of the bf16 output along the head dim."""
        return self.O_COLS // min(self.D, 64)

    @property
    def O_TMA(self) -> bool:
        """Whether full tiles leave through shared memory: there is no room beside Q, K and V of a head dim of 256, and
        what a part gives is fp32."""
        return self.D <= 128 and not self.SPLIT

    @property
    def OUT(self):
        return gl.float32 if self.SPLIT else gl.bfloat16

    @property
    def ONE_LOOP(self) -> bool:
        """Whether BF16 has one loop over a tile's blocks, masked under a branch."""
        return self.OVERLAP or self.SPLIT

    @property
    def O_TILES(self) -> int:
        """Tiles of the output in shared memory, and their width; a stand-in where there are none."""
        return 2 if self.O_TMA else 1

    @property
    def O_COLS(self) -> int:
        return self.D if self.O_TMA else 64

    @property
    def T(self):
        return gl.float8e4nv if self.FP8 else gl.bfloat16

    @property
    def TILE(self):
        """[rows, D] operand in shared memory; pieces of 128 bytes along D follow one another."""
        return gl.NVMMASharedLayout(self.DB * self.BYTES, 8 * self.BYTES, rank=2)

    @property
    def KV_BOX(self):
        return gl.NVMMASharedLayout(self.DB * self.BYTES, 8 * self.BYTES, rank=4)

    @property
    def Q_BOX(self):
        return gl.NVMMASharedLayout(self.DB * self.BYTES, 8 * self.BYTES, rank=3)

    @property
    def O_TILE(self):
        return gl.NVMMASharedLayout(min(self.D, 64) * 2, 16, rank=2)

    @property
    def O_BOX(self):
        return gl.NVMMASharedLayout(min(self.D, 64) * 2, 16, rank=3)

    @property
    def REGS(self) -> int:
        """Registers a thread of a consumer. The pool is what the launch took: 12 warps of 168, 504 a thread of each
        quarter, or, with the transposer, 16 of 128, 512; consumer 0 gets what consumer 1 and the others leave."""
        return 224 if self.FP8 else 240

    @property
    def TRANSPOSER_REGS(self) -> int:
        """Of FP8: 2 * 224 + 40 + 24 = 512."""
        return 40

    @property
    def PRODUCER_REGS(self) -> int:
        """Small pages keep more page ids: 2 * 240 + 24 = 504, or 224 + 240 + 40."""
        return 24 if self.FP8 or self.NP <= 2 else 40
