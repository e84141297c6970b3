"""FlashInfer's fused MoE with its CUTLASS kernels for Hopper: one scale a tensor, or DeepSeek's block scales.

Its first product gives up before gate, so the halves of w13 and of their block scales change places beforehand.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hpc.bench.providers import CannotRun, Provider
from hpc.bench.rivals import flashinfer
from hpc.common import arch
from hpc.common.operator import Tolerance
from hpc.testing.buffers import bit_view

if TYPE_CHECKING:
    from hpc.bench.rivals.moe import MoeRivalInputs

BLOCK = 128
E4M3_MAX = 448.0
ALIGNMENT = 16  # TMA takes rows of whole 16 bytes
MODULE = "fused_moe_90"
# 154 generated sources and 28 written ones in 0.6.15; the benchmark would stand still meanwhile
BUILD = "get_cutlass_fused_moe_module('90') of flashinfer.fused_moe.core builds it, 182 files; or flashinfer-jit-cache"
NOTE = (
    "one scale a tensor: x is e4m3 beforehand, as its API wants, and tactics are tuned for the batch; "
    "block scales: quantisation of BF16 x included"
)


def provider(adapt: Callable[[Any], MoeRivalInputs], tolerance: Tolerance) -> Provider:
    """For an operator whose inputs `adapt` turns into `MoeRivalInputs`."""
    return Provider("flashinfer", lambda inputs: prepare(adapt(inputs)), available, tolerance, NOTE)


def available() -> str | None:
    """Why it cannot run here, or None."""
    reason = flashinfer.available()
    if reason is not None:
        return reason
    return _not_built() if arch.is_hopper("cuda") else "needs a Hopper GPU"


def _not_built() -> str | None:
    """Why the kernels' module cannot be loaded without a build. One built ahead of time is loaded directly; one that
    FlashInfer has built itself passes through ninja, which finds nothing to do."""
    env = importlib.import_module("flashinfer.jit.env")
    if (env.FLASHINFER_AOT_DIR / MODULE / f"{MODULE}.so").exists():
        return None
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return f"FLASHINFER_DISABLE_JIT is set, and there is no {MODULE} built ahead of time"
    if not (env.FLASHINFER_JIT_DIR / MODULE / f"{MODULE}.so").exists():
        return f"its module {MODULE} is not built: {BUILD}"
    return None if shutil.which("ninja") else f"its module {MODULE} is built, but not loaded without ninja"


def prepare(inputs: MoeRivalInputs) -> Callable[[], torch.Tensor]:
    """Lay everything out, tune or compile by a first call; the returned call gives ``[T, H]`` bfloat16."""
    _refuse(inputs)
    library = importlib.import_module("flashinfer")
    run = importlib.import_module("flashinfer.fused_moe").cutlass_fused_moe
    blocks = inputs.act_scale is None
    x, scales = (inputs.x, _block_scales(inputs)) if blocks else _tensor_scales(inputs)
    out = torch.empty_like(inputs.x, dtype=torch.bfloat16)
    given = (x, inputs.topk_ids.int(), inputs.topk_weights.float(), _up_first(inputs.w13), inputs.w2)
    buckets = (x.shape[0],)

    def call(tune: bool = False) -> torch.Tensor:
        # a tactic is found by the buckets that it was tuned with
        with library.autotune(tune, tuning_buckets=buckets):
            run(*given, torch.bfloat16, scales, output=out, use_deepseek_fp8_block_scale=blocks)
        return out

    try:
        call(tune=not blocks)  # its profiler passes over block scales, whose tiles follow from the shape
    except RuntimeError as error:
        if blocks and not _has_nvcc():
            raise CannotRun("compiles the products of block scales by shape, and finds no nvcc") from error
        raise
    return call


def _refuse(inputs: MoeRivalInputs) -> None:
    if inputs.obstacle is not None:
        raise CannotRun(inputs.obstacle)
    hidden, inter = inputs.w2.shape[1:]
    multiple = ALIGNMENT if inputs.act_scale is not None else BLOCK
    if hidden % multiple or inter % multiple:
        raise CannotRun(f"needs multiples of {multiple}, has H, I = {hidden}, {inter}")
    ids = inputs.topk_ids.sort(-1).values
    # its map of large batches finds one place of a token among an expert's rows; a second would be read unwritten
    if bool((ids[:, 1:] == ids[:, :-1]).any()):
        raise CannotRun("takes an expert once a token only")
    if int(ids.min()) < 0 or int(ids.max()) >= inputs.w2.shape[0]:
        raise CannotRun("compared with local experts only")


def _tensor_scales(inputs: MoeRivalInputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(e4m3 x, [scale of the first product per expert, factor of the activations, scale of the second product per
    expert, scale of x]); the scales of products hold those of their inputs."""
    assert inputs.x_scale is not None and inputs.act_scale is not None
    x_scale, act_scale = inputs.x_scale.float().reshape(()), inputs.act_scale.float().reshape(())
    x = (inputs.x.float() / x_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    first, second = inputs.w13_scale.float() * x_scale, inputs.w2_scale.float() * act_scale
    return x, [first, 1.0 / act_scale, second, x_scale]


def _block_scales(inputs: MoeRivalInputs) -> list[torch.Tensor]:
    return [_up_first(inputs.w13_scale.float()), inputs.w2_scale.float().contiguous()]


def _up_first(rows: torch.Tensor) -> torch.Tensor:
    """A copy of ``[E, 2 R, C]`` with the halves of its rows exchanged; by bits, as not every device flips float8."""
    bits, _ = bit_view(rows)
    experts, both, cols = bits.shape
    return bits.view(experts, 2, both // 2, cols).flip(1).view(experts, both, cols).view(rows.dtype)


def _has_nvcc() -> bool:
    """As DeepGEMM's compiler inside FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME")
    given = os.environ.get("TRTLLM_DG_NVCC_COMPILER") or (home and os.path.join(home, "bin", "nvcc"))
    return shutil.which(given or "nvcc") is not None
