"""What engines run for an FP8 MoE today: SGLang's and vLLM's Triton kernels, vLLM's way through DeepGEMM, FlashInfer.

DeepGEMM's products alone are beside them as a yardstick.

They take BF16 activations and quantise them inside, so their times include that; notes say where not. One scale a
tensor: x in BF16 holds the e4m3 values themselves, which the scale 1 turns back into the same codes. Block scales: x
times its scales, rounded to BF16 and quantised anew, so that codes differ by a step here and there.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpc.bench.providers import CannotRun, Provider
from hpc.bench.rivals import deepgemm, flashinfer_moe
from hpc.common import arch
from hpc.common.operator import Tolerance

BLOCK = [128, 128]
SGLANG = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
VLLM = "vllm.model_executor.layers.fused_moe"
# requantised activations of block scales differ by a step of e4m3, and so does what each library rounds in between
TOLERANCE = Tolerance(rms=4e-2, max=2e-1)


@dataclass(frozen=True)
class MoeRivalInputs:
    """One call in the form that these libraries share.

    Attributes:
        x: BF16 ``[T, H]``, before quantisation.
        w13, w2: float8_e4m3fn ``[E, 2 I, H]`` and ``[E, H, I]``.
        w13_scale, w2_scale: float32 ``[E]``, or block scales without padding.
        x_scale, act_scale: float32 ``[1]``, static scales of the two quantisations; None with block scales.
        topk_ids: int32 ``[T, K]``; topk_weights: float32 ``[T, K]``.
        obstacle: why this call is none of theirs, or None.
    """

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    x_scale: torch.Tensor | None
    act_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    obstacle: str | None = None

    @property
    def block_shape(self) -> list[int] | None:
        return BLOCK if self.act_scale is None else None


def providers(adapt: Callable[[Any], MoeRivalInputs]) -> list[Provider]:
    """The rivals of an operator whose inputs `adapt` turns into `MoeRivalInputs`."""
    note = "quantisation of BF16 x included"
    return [
        Provider("sglang triton", lambda i: sglang(adapt(i)), lambda: _missing("sglang", SGLANG), TOLERANCE, note),
        Provider("vllm triton", lambda i: vllm(adapt(i), False), lambda: _missing("vllm", VLLM), TOLERANCE, note),
        Provider("vllm deepgemm", lambda i: vllm(adapt(i), True), _no_deep_gemm, TOLERANCE, note),
        flashinfer_moe.provider(adapt, TOLERANCE),
        deepgemm.provider(adapt, TOLERANCE),
    ]  # fmt: skip


def _missing(package: str, module: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"not installed: pip install {package}"
    if not arch.gpu_available():
        return "needs a GPU"
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{module} does not import: {type(error).__name__}: {error}"
    return None


def _no_deep_gemm() -> str | None:
    return _missing("vllm", VLLM) or _missing("deep_gemm", "deep_gemm")


def _check(inputs: MoeRivalInputs) -> None:
    if inputs.obstacle is not None:
        raise CannotRun(inputs.obstacle)


def without_a_server() -> None:
    """SGLang's layers ask for the options of the server that they run in and for its tensor-parallel group. Where there
    is no server, they find default options and a group of one, as in SGLang's own kernel benchmarks."""
    context = importlib.import_module("sglang.srt.runtime_context")
    arguments = importlib.import_module("sglang.srt.server_args")
    try:
        context.get_server_args()
    except ValueError:  # "dummy": no model is looked for
        context.publish(arguments.ServerArgs(model_path="dummy"), role="scheduler")
    parallel: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    if parallel._TP is None:
        parallel._TP = types.SimpleNamespace(world_size=1)


def sglang(inputs: MoeRivalInputs) -> Callable[[], torch.Tensor]:
    """SGLang's Triton MoE with the configuration it finds for the shape: tuned for few, else its default."""
    _check(inputs)
    without_a_server()
    run = importlib.import_module(SGLANG).fused_experts_impl
    options = {
        "use_fp8_w8a8": True, "w1_scale": inputs.w13_scale, "w2_scale": inputs.w2_scale, "a1_scale": inputs.x_scale,
        "a2_scale": inputs.act_scale, "block_shape": inputs.block_shape, "filter_expert": False,
    }  # fmt: skip
    given = (inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, inputs.topk_ids)

    def call() -> torch.Tensor:
        return run(*given, **options)  # type: ignore[no-any-return]

    return call


def vllm(inputs: MoeRivalInputs, deep_gemm: bool) -> Callable[[], torch.Tensor]:
    """vLLM's fused experts by Triton, or where it allows through DeepGEMM's grouped product."""
    _check(inputs)
    if deep_gemm and inputs.block_shape is None:
        raise CannotRun("DeepGEMM takes block scales only")
    run = importlib.import_module(VLLM).fused_experts
    config = importlib.import_module(f"{VLLM}.config").fp8_w8a8_moe_quant_config(
        w1_scale=inputs.w13_scale, w2_scale=inputs.w2_scale, a1_scale=inputs.x_scale, a2_scale=inputs.act_scale,
        block_shape=inputs.block_shape,
    )  # fmt: skip
    given = (inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, inputs.topk_ids)
    more = {"allow_deep_gemm": True} if deep_gemm else {}

    def call() -> torch.Tensor:
        return run(*given, quant_config=config, **more)  # type: ignore[no-any-return]

    return call
