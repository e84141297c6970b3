"""SGLang's DeepGEMM runner as a rival, with a stand-in that computes from what the runner is given."""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hpc.bench import CannotRun
from hpc.bench.rivals import deepgemm, moe
from hpc.common import arch
from hpc.moe import cases, reference
from hpc.testing import measure

LAYERS = "sglang.srt.layers"


@dataclass
class RunnerConfig:
    """The options that the provider sets; the defaults are SGLang's."""

    num_experts: int
    num_local_experts: int
    hidden_size: int
    intermediate_size_per_partition: int
    top_k: int
    num_fused_shared_experts: int
    params_dtype: torch.dtype
    activation: str
    inplace: bool = True
    routed_scaling_factor: float | None = None


@dataclass
class Weights:
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    use_fp8: bool
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    block_shape: list[int]


class TopK(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: Any


class Dispatched(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: TopK


class Library:
    """`deep_gemm` with its setting of the process, and SGLang's runner on it."""

    def __init__(self) -> None:
        self.early = False
        self.compiling: list[tuple[int, int]] = []
        self.fail = False

    def set_pdl(self, value: bool) -> None:
        self.early = value

    def get_pdl(self) -> bool:
        return self.early

    def update_deep_gemm_config(self, gpu_id: int, server_args: Any) -> None:
        assert server_args.chunked_prefill_size >= 1
        self.compiling.append((gpu_id, server_args.base_gpu_id))

    def runner(self, backend: str, config: RunnerConfig) -> Any:
        """`MoeRunner`: rows of 128 codes with their scales in both products."""
        assert backend == "deep_gemm" and config.activation == "silu" and not config.inplace
        assert config.num_experts == config.num_local_experts and config.num_fused_shared_experts == 0

        def run(given: Dispatched, weights: Weights) -> Any:
            assert self.early and weights.use_fp8 and weights.block_shape == [128, 128]
            if self.fail:
                raise RuntimeError("no compiler")
            x, (scale, ids, logits) = given.hidden_states, given.topk_output
            assert x.dtype == torch.bfloat16 and x.is_contiguous() and logits is None
            assert given.hidden_states_scale is None
            assert ids.dtype == torch.int32 and ids.is_contiguous() and scale.dtype == torch.float32
            assert ids.shape == (len(x), config.top_k)
            experts, hidden, inter = weights.w2_weight.shape
            assert (experts, hidden, inter) == (
                config.num_experts, config.hidden_size, config.intermediate_size_per_partition
            )  # fmt: skip
            for w, s in ((weights.w13_weight, weights.w13_scale), (weights.w2_weight, weights.w2_scale)):
                assert w.dtype == torch.float8_e4m3fn and s.dtype == torch.float32 and s.is_contiguous()
                assert s.shape == (experts, w.shape[1] // 128, w.shape[2] // 128)
            total = torch.zeros(x.shape, dtype=torch.float64)
            for expert in range(experts):
                token, place = (ids == expert).nonzero(as_tuple=True)
                gate_up = product(x[token], weights.w13_weight[expert], weights.w13_scale[expert])
                gate, up = gate_up.double().chunk(2, -1)
                a = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
                y = product(a, weights.w2_weight[expert], weights.w2_scale[expert])
                total.index_add_(0, token, y.double() * scale[token, place, None].double())
            return SimpleNamespace(hidden_states=total.to(x.dtype))

        return SimpleNamespace(run=run)


def product(a: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes, a_scale = reference.quantise_input(a, None)
    assert a_scale is not None
    left = codes.double() * a_scale.double().repeat_interleave(128, 1)
    right = w.double() * reference.expand_blocks(scale.double(), *w.shape)
    return (left @ right.T).to(torch.bfloat16)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    modules: dict[str, dict[str, Any]] = {
        "deep_gemm": {"set_pdl": fake.set_pdl, "get_pdl": fake.get_pdl},
        f"{LAYERS}.deep_gemm_wrapper": {"ENABLE_JIT_DEEPGEMM": True},
        f"{LAYERS}.deep_gemm_wrapper.compile_utils": {"update_deep_gemm_config": fake.update_deep_gemm_config},
        f"{LAYERS}.moe.moe_runner.base": {"MoeRunnerConfig": RunnerConfig},
        f"{LAYERS}.moe.moe_runner.runner": {"MoeRunner": fake.runner},
        f"{LAYERS}.moe.moe_runner.deep_gemm": {"DeepGemmMoeQuantInfo": Weights},
        f"{LAYERS}.moe.token_dispatcher.standard": {"StandardDispatchOutput": Dispatched},
        f"{LAYERS}.moe.topk": {"StandardTopKOutput": TopK},
        f"{LAYERS}.moe.utils": {"MoeRunnerBackend": SimpleNamespace(DEEP_GEMM="deep_gemm")},
        moe.SGLANG: {},
        "sglang": {},
    }  # fmt: skip
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(moe, "without_a_server", lambda: None)
    return fake


def _inputs(**fields: Any) -> Any:
    sizes = {"tokens": 21, "experts": 6, "hidden": 256, "inter": 128, "top_k": 3, "block": True}
    return cases.make_inputs(cases.MoeCase(**{**sizes, **fields}), "cpu", seed=1)


@pytest.mark.parametrize("case", [{}, {"routing": "one"}, {"tokens": 1}, {"bf16_input": True, "inter": 256}])
def test_the_call_is_the_operator(case: dict[str, Any], library: Library) -> None:
    inputs = _inputs(**case)
    call = moe.sglang_deepgemm(cases.rival_inputs(inputs))
    result = call()
    assert measure(result, cases.reference(inputs)).within(moe.TOLERANCE)
    assert result.shape == inputs.x.shape and torch.equal(call(), result)


def test_kernels_are_compiled_on_demand(library: Library) -> None:
    moe.sglang_deepgemm(cases.rival_inputs(_inputs()))
    ((own, first),) = library.compiling
    assert own != first


def test_the_setting_of_the_process_is_put_back(library: Library) -> None:
    call = moe.sglang_deepgemm(cases.rival_inputs(_inputs()))
    call()
    assert not library.early
    library.fail = True
    with pytest.raises(RuntimeError, match="no compiler"):
        call()
    assert not library.early


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"block": False}, "block scales only"),
        ({"inter": 192}, "multiples of 128"),
        ({"ranks": 2}, "only plain calls"),
        ({"routing": "none"}, "local experts"),
    ],
)
def test_what_it_cannot_run(case: dict[str, Any], why: str, library: Library) -> None:
    with pytest.raises(CannotRun, match=why):
        moe.sglang_deepgemm(cases.rival_inputs(_inputs(**case)))
    assert not library.compiling


def test_ids_that_belong_to_no_expert_are_left_out(library: Library) -> None:
    inputs = _inputs()
    given = cases.rival_inputs(inputs)
    ids = given.topk_ids.clone()
    ids[:, 0] = -1
    inputs = replace(inputs, topk_ids=ids)
    result = moe.sglang_deepgemm(replace(given, topk_ids=ids))()
    assert measure(result, cases.reference(inputs)).within(moe.TOLERANCE)


def test_where_it_is_available(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = {p.name: p for p in moe.providers(cases.rival_inputs)}["deepgemm"]
    monkeypatch.setattr(arch, "gpu_available", lambda: True)
    monkeypatch.setattr(arch, "is_hopper", lambda device: True)
    assert provider.available() is None
    wrapper = sys.modules[moe.SGLANG_DEEPGEMM]
    monkeypatch.setattr(wrapper, "ENABLE_JIT_DEEPGEMM", False)
    assert "SGLANG_ENABLE_JIT_DEEPGEMM" in (provider.available() or "")
    monkeypatch.setattr(arch, "is_hopper", lambda device: False)
    assert provider.available() == "needs a Hopper GPU"
    monkeypatch.setattr(deepgemm, "available", lambda: "not installed")
    assert provider.available() == "not installed"
