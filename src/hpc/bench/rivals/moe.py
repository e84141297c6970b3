"""What engines run for an FP8 MoE today: SGLang's and vLLM's Triton kernels and ways through DeepGEMM, FlashInfer.

DeepGEMM's products alone are beside them as a yardstick.

They take BF16 activations and quantise them inside, so their times include that; notes say where not. One scale a
tensor: x in BF16 holds the e4m3 values themselves, which the scale 1 turns back into the same codes. Block scales: x
times its scales, rounded to BF16 and quantised anew, so that codes differ by a step here and there.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hpc.bench.providers import CannotRun, Provider
from hpc.bench.rivals import deepgemm, flashinfer_moe
from hpc.common import arch
from hpc.common.operator import Tolerance

BLOCK = [128, 128]
SGLANG_MOE = "sglang.srt.layers.moe"
SGLANG = f"{SGLANG_MOE}.moe_runner.triton_utils.fused_moe"
SGLANG_DEEPGEMM = "sglang.srt.layers.deep_gemm_wrapper"
VLLM = "vllm.model_executor.layers.fused_moe"
# a server needs shapes that do not depend on the routing, for its CUDA graphs
DEEPGEMM_NOTE = (
    "SGLang's DeepGEMM runner, quantisation of BF16 x included; it pads an expert's rows to 128, "
    "and its buffers hold the most rows that any routing gives"
)
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
        Provider("deepgemm", lambda i: sglang_deepgemm(adapt(i)), _no_sglang_deep_gemm, TOLERANCE, DEEPGEMM_NOTE),
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


def _no_sglang_deep_gemm() -> str | None:
    reason = _missing("sglang", SGLANG) or deepgemm.available()
    if reason is not None:
        return reason
    if not arch.is_hopper("cuda"):
        return "needs a Hopper GPU"
    if not importlib.import_module(SGLANG_DEEPGEMM).ENABLE_JIT_DEEPGEMM:
        return "SGLang does without DeepGEMM: it does not import, or SGLANG_ENABLE_JIT_DEEPGEMM is off"
    return None


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


def sglang_deepgemm(inputs: MoeRivalInputs) -> Callable[[], torch.Tensor]:
    """SGLang's runner for large batches: quantise, scatter to whole tiles an expert, grouped product, SiLU and
    quantisation, grouped product, weighted sum."""
    deepgemm.check(inputs)
    experts, top_k = inputs.w13.shape[0], inputs.topk_ids.shape[1]
    # an id beyond the experts would be counted beyond the end of its counters
    if int(inputs.topk_ids.max()) >= experts:
        raise CannotRun("compared with local experts only")
    without_a_server()
    _compile_on_demand()
    base = importlib.import_module(f"{SGLANG_MOE}.moe_runner.base")
    runner = importlib.import_module(f"{SGLANG_MOE}.moe_runner.runner")
    weights = importlib.import_module(f"{SGLANG_MOE}.moe_runner.deep_gemm")
    dispatch = importlib.import_module(f"{SGLANG_MOE}.token_dispatcher.standard")
    routing = importlib.import_module(f"{SGLANG_MOE}.topk")
    backend = importlib.import_module(f"{SGLANG_MOE}.utils").MoeRunnerBackend.DEEP_GEMM
    config = base.MoeRunnerConfig(
        num_experts=experts, num_local_experts=experts, hidden_size=inputs.w13.shape[2],
        intermediate_size_per_partition=inputs.w2.shape[2], top_k=top_k, num_fused_shared_experts=0,
        params_dtype=torch.bfloat16, activation="silu",
        inplace=False,  # it would let go of x
    )  # fmt: skip
    run = runner.MoeRunner(backend, config).run
    quantised = weights.DeepGemmMoeQuantInfo(
        w13_weight=inputs.w13, w2_weight=inputs.w2, use_fp8=True, w13_scale=inputs.w13_scale,
        w2_scale=inputs.w2_scale, block_shape=BLOCK,
    )  # fmt: skip
    chosen = routing.StandardTopKOutput(inputs.topk_weights, inputs.topk_ids, None)
    given = dispatch.StandardDispatchOutput(inputs.x, None, chosen)
    library = importlib.import_module("deep_gemm")

    def call() -> torch.Tensor:
        with _early_launches(library):
            return run(given, quantised).hidden_states  # type: ignore[no-any-return]

    return call


def _compile_on_demand() -> None:
    """The first process of a node compiles DeepGEMM's kernels for every number of rows, for minutes; be another."""
    compiling = importlib.import_module(f"{SGLANG_DEEPGEMM}.compile_utils")
    compiling.update_deep_gemm_config(1, types.SimpleNamespace(base_gpu_id=0, chunked_prefill_size=1))


@contextmanager
def _early_launches(library: Any) -> Iterator[None]:
    """Programmatic dependent launch, which SGLang's servers switch on; it would stay on for the other providers."""
    before = library.get_pdl()
    library.set_pdl(True)
    try:
        yield
    finally:
        library.set_pdl(before)


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
