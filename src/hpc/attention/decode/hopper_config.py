"""Compile-time facts of the SM90 decode kernel."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from hpc.attention.decode import plan
from hpc.common.facts import KernelFacts


@dataclass(frozen=True, repr=False)
class Config(KernelFacts):
    """Compile-time facts of one kernel; derived sizes are properties, so the cache key holds only what varies."""

    D: int  # head dim of q and k
    DV: int  # head dim of v
    P: int  # page size in tokens
    G: int  # query heads a kv head
    S: int  # query tokens a request
    HKV: int  # kv heads
    R: int  # query rows of a CTA: 8, 16 or 32
    WT: int  # warp groups along tokens
    WR: int  # warp groups along rows
    STAGES: int
    FP8: bool
    STATIC: bool
    WINDOW: bool
    CAP: bool
    SINKS: bool
    LSE: bool
    PDL: bool
    PREFETCH: bool = True  # old tiles before griddepcontrol.wait
    FUSED: bool = False  # the last CTA of a split request merges its chunks
    PRODUCER_REGS: int = 40
    FAN: int = 16  # chunks merged by one CTA at most
    NARROW: int = 8  # likewise where two levels do: 14.0 to 13.7 us (fp8 8/1 1x64K+15x4K), 32 at once 16.2

    @property
    def ROWS(self) -> int:
        return self.S * self.G

    @property
    def RB(self) -> int:
        return -(-self.ROWS // self.R)

    @property
    def CTAS(self) -> int:
        """Of a bin and kv head."""
        return self.RB

    @property
    def WARPS(self) -> int:
        return self.WT * self.WR

    @property
    def BYTES(self) -> int:
        return 1 if self.FP8 else 2

    @property
    def STEP(self) -> int:
        """Tokens of one step of the loop: at least 16 a warp group, the height of the matrix instruction."""
        return max(plan.TILE, 16 * self.WT)

    @property
    def PB(self) -> int:
        """Tokens of a TMA box."""
        return min(self.P, plan.TILE)

    @property
    def NP(self) -> int:
        """Boxes along the tokens of a step."""
        return self.STEP // self.PB

    @property
    def DBK(self) -> int:
        """Elements of a TMA box along the head dim: the 128 bytes of a swizzle span at most."""
        return min(self.D, 128 // self.BYTES)

    @property
    def DBV(self) -> int:
        return min(self.DV, 128 // self.BYTES)

    @property
    def KH(self) -> int:
        return self.D // self.DBK

    @property
    def VH(self) -> int:
        return self.DV // self.DBV

    @property
    def DPK(self) -> int:
        """16-bit words of a box row: e4m3 counts in pairs."""
        return self.DBK * self.BYTES // 2

    @property
    def DPV(self) -> int:
        return self.DBV * self.BYTES // 2

    @property
    def NV(self) -> int:
        """Accumulator pieces: even and odd elements apart for e4m3."""
        return self.VH * (2 if self.FP8 else 1)

    @property
    def KV(self):
        return gl.float8e4nv if self.FP8 else gl.bfloat16

    @property
    def WORD(self):
        return gl.int16 if self.FP8 else gl.bfloat16

    @property
    def HALF(self):
        return gl.float16 if self.FP8 else gl.bfloat16

    @property
    def K_BOX(self):
        return gl.NVMMASharedLayout(self.DBK * self.BYTES, 8 * self.BYTES, rank=4)

    @property
    def V_BOX(self):
        return gl.NVMMASharedLayout(self.DBV * self.BYTES, 8 * self.BYTES, rank=4)

    @property
    def K_TILE(self):
        return gl.NVMMASharedLayout(self.DBK * self.BYTES, 16, rank=3)

    @property
    def V_TILE(self):
        return gl.NVMMASharedLayout(self.DBV * self.BYTES, 16, rank=3)

    @property
    def MERGE(self):
        """[WT, DPV, R] with all warp groups of an element in one thread, and the threads spread over the elements."""
        per_thread = max(1, self.DPV * self.R // (32 * self.WARPS))
        along_d = self.DPV // per_thread
        lanes_d = min(32, along_d)
        lanes_r = 32 // lanes_d
        warps_r = max(1, min(self.WARPS, self.R // lanes_r))
        return gl.BlockedLayout(
            [self.WT, per_thread, 1], [1, lanes_d, lanes_r], [1, self.WARPS // warps_r, warps_r], [1, 2, 0]
        )

    @property
    def LATE_V(self) -> bool:
        """Load V half by half after the softmax: slower, but head dim 256 spills otherwise."""
        return self.DV > 128

    @property
    def GATHER_CHUNKS(self) -> int:
        """Chunks loaded at a time by a merge: as many of a fan as 64 registers a thread hold."""
        room = 64 * 32 * self.WARPS // (self.R * self.DV)
        return max(1, min(self.FAN, 1 << (room.bit_length() - 1)))

    @property
    def GATHER(self):
        """[chunks, R, DV] for the merge: a thread holds all chunks of its elements, 16-byte loads along DV."""
        along_d = min(32, self.DV // 4)
        lanes_r = 32 // along_d
        warps_r = max(1, min(self.WARPS, self.R // lanes_r))
        per_r = max(1, self.R // (lanes_r * warps_r))
        return gl.BlockedLayout(
            [self.GATHER_CHUNKS, per_r, 4],
            [1, lanes_r, along_d],
            [1, warps_r, self.WARPS // warps_r],
            [2, 1, 0],
        )
