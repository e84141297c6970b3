"""Compile-time facts of the SM90 decode kernel for many query rows."""

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
    STAGES: int  # of K and of V as they come
    FP8: bool
    STATIC: bool
    WINDOW: bool
    CAP: bool
    SINKS: bool
    LSE: bool
    PDL: bool
    PREFETCH: bool = True  # old tiles before griddepcontrol.wait
    FUSED: bool = False  # the last CTA of a split request merges its chunks
    FAN: int = 16  # as `hopper_config`
    NARROW: int = 8

    @property
    def ROWS(self) -> int:
        return self.S * self.G

    @property
    def M(self) -> int:
        """Rows of the matrix instruction, and of a consumer."""
        return 64

    @property
    def CONSUMERS(self) -> int:
        return 2 if self.ROWS > self.M else 1

    @property
    def R(self) -> int:
        """Rows that a merge holds: where all fit 32, twice as many chunks at a time."""
        return 32 if self.ROWS <= 32 else self.M

    @property
    def CTAS(self) -> int:
        """Of a bin and kv head."""
        return -(-self.ROWS // (self.M * self.CONSUMERS))

    @property
    def RB(self) -> int:
        """Row blocks of a bin and kv head, each with a merge of its own."""
        return self.CTAS * self.CONSUMERS

    @property
    def WARPS(self) -> int:
        """Of a consumer: a warpgroup."""
        return 4

    @property
    def BYTES(self) -> int:
        return 1 if self.FP8 else 2

    @property
    def STEP(self) -> int:
        """Tokens of one step of the loop."""
        return 128

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
    def QW(self) -> int:
        """16-bit words of a query row: e4m3 counts in pairs."""
        return self.D * self.BYTES // 2

    @property
    def KV(self):
        return gl.float8e4nv if self.FP8 else gl.bfloat16

    @property
    def WORD(self):
        return gl.int16 if self.FP8 else gl.bfloat16

    @property
    def HALF(self):
        """Of probabilities, and of the values that they meet."""
        return gl.float16 if self.FP8 else gl.bfloat16

    @property
    def CONVERTED(self) -> int:
        """Stages of V as f16; a stand-in where V needs no conversion."""
        return 2 if self.FP8 else 1

    @property
    def C_TOKENS(self) -> int:
        return self.STEP if self.FP8 else 16

    @property
    def V_STAGES(self) -> int:
        """Stages of V as the products read it."""
        return self.CONVERTED if self.FP8 else self.STAGES

    @property
    def K_BOX(self):
        return gl.NVMMASharedLayout(self.DBK * self.BYTES, 8 * self.BYTES, rank=4)

    @property
    def V_BOX(self):
        return gl.NVMMASharedLayout(self.DBV * self.BYTES, 8 * self.BYTES, rank=4)

    @property
    def K_TILE(self):
        """[rows, D] operand in shared memory; pieces of 128 bytes along D follow one another."""
        return gl.NVMMASharedLayout(self.DBK * self.BYTES, 8 * self.BYTES, rank=2)

    @property
    def V_TILE(self):
        return gl.NVMMASharedLayout(self.DBV * self.BYTES, 8 * self.BYTES, rank=2)

    @property
    def Q_WORDS(self):
        return gl.NVMMASharedLayout(self.DBK * self.BYTES, 16, rank=2)

    @property
    def C_TILE(self):
        return gl.NVMMASharedLayout(128, 16, rank=2)

    @property
    def MMA(self):
        """Of scores [M, STEP]."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.STEP, 32 // self.BYTES])

    @property
    def MMO(self):
        """Of the output [M, DV]; 16-bit operands."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.DV, 16])

    @property
    def Q_LOAD(self):
        """[M, QW] with 16 bytes a load."""
        lanes = self.QW // 8
        return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])

    @property
    def V_LOAD(self):
        """64 tokens of V as bytes, 16 a load. Eight lanes side by side read two tokens, 5 apart in their low bits: with
        the swizzle their loads of 16 bytes and their stores of 32 both meet all banks."""
        assert self.DV in (64, 128)
        rest = [[0, 64], [32, 0]] if self.DV == 128 else [[32, 0]]
        return gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], *rest],
            lane_bases=[[0, 16], [0, 32], [5, 0], [2, 0], [1, 0]],
            warp_bases=[[8, 0], [16, 0]],
            block_bases=[],
            shape=[64, self.DV],
        )

    @property
    def GATHER_CHUNKS(self) -> int:
        """Chunks loaded at a time by a merge: as many of a fan as, with their sum and the next queries, 176 registers a
        thread hold."""
        room = (176 - self.QW // 4) * 32 * self.WARPS // (self.R * self.DV) - 1
        return max(1, min(self.FAN, 1 << (room.bit_length() - 1)))

    @property
    def GATHER(self):
        """[chunks, R, DV] for the merge: a thread holds all chunks of its elements, 16-byte loads along DV."""
        along_d = min(32, self.DV // 4)
        lanes_r = 32 // along_d
        per_r = max(1, self.R // (lanes_r * self.WARPS))
        return gl.BlockedLayout(
            [self.GATHER_CHUNKS, per_r, 4], [1, lanes_r, along_d], [1, self.WARPS, 1], [2, 1, 0]
        )

    @property
    def CONVERTER_REGS(self) -> int:
        """Registers a thread. The pool is what the launch took, `choose.rows_plan`; consumers get what is left, 256
        and 208 for one and for two of them, 256 and 232 for BF16."""
        return 88 if self.CONSUMERS == 1 else 56

    @property
    def CONSUMER_REGS(self) -> int:
        """Of the second one."""
        return 208 if self.FP8 else 232

    @property
    def PRODUCER_REGS(self) -> int:
        return 40
