"""The ring of stages between the warps that load and those that multiply, as all SM90 kernels of the MoE use it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hpc.common.gluon import barrier, fence_async_shared, mbarrier


@gluon.jit
def advance(stage, phase, C: gl.constexpr):
    """The next stage of the ring and its phase."""
    stage += 1
    if stage == C.STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def hand_over(full_bars, late, done, C: gl.constexpr):
    """After the copies of a stage began: hand over the one LAG stages before, whose rows have arrived by now.

    Returns (the next stage to hand over, stages begun).
    """
    async_copy.commit_group()
    async_copy.wait_group(C.LAG)
    fence_async_shared()
    barrier()
    mbarrier.arrive(full_bars.index(late), count=1, pred=done >= C.LAG)
    if done >= C.LAG:
        late += 1
        if late == C.STAGES:
            late = 0
    done += 1
    return late, done


@gluon.jit
def hand_over_rest(full_bars, late, done, C: gl.constexpr):
    """Hand over the last LAG stages."""
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    for _ in range(gl.minimum(done, C.LAG)):
        mbarrier.arrive(full_bars.index(late), count=1)
        late += 1
        if late == C.STAGES:
            late = 0
