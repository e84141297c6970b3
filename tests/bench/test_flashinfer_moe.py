"""FlashInfer's fused MoE against a stand-in that computes from the arguments as FlashInfer documents them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hpc.bench import CannotRun
from hpc.bench.rivals import flashinfer, flashinfer_moe, moe
from hpc.common import arch
from hpc.moe import cases, reference
from hpc.moe.cases import MoeCase
from hpc.testing import measure


def _rows_of_128(values: torch.Tensor) -> torch.Tensor:
    """BF16 values rounded to e4m3 with a scale for 128 columns of a row."""
    codes, scale = reference.quantise_input(values.to(torch.bfloat16), None)
    assert scale is not None
    return codes.double() * scale.double().repeat_interleave(128, 1)


def _weights(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return w.double() * reference.expand_blocks(scale.double(), *w.shape)


class _FlashInfer(ModuleType):
    """`flashinfer` and `flashinfer.fused_moe` in one; `contexts` lists the autotune contexts of the calls."""

    def __init__(self) -> None:
        super().__init__("flashinfer")
        self.contexts: list[tuple[bool, tuple[int, ...]]] = []
        self.entered: tuple[bool, tuple[int, ...]] | None = None
        self.error: RuntimeError | None = None

    @contextmanager
    def autotune(self, tune_mode: bool, *, tuning_buckets: tuple[int, ...]) -> Iterator[None]:
        self.entered = (tune_mode, tuning_buckets)
        yield
        self.entered = None

    def cutlass_fused_moe(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w31: torch.Tensor,
        w2: torch.Tensor,
        output_dtype: torch.dtype,
        quant_scales: list[torch.Tensor],
        *,
        output: torch.Tensor,
        use_deepseek_fp8_block_scale: bool,
    ) -> list[torch.Tensor]:
        assert self.entered is not None
        self.contexts.append(self.entered)
        if self.error is not None:
            raise self.error
        experts, hidden, inter = w2.shape
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert w31.dtype == w2.dtype == torch.float8_e4m3fn and w31.shape == (experts, 2 * inter, hidden)
        assert output.dtype == output_dtype == torch.bfloat16 and output.shape == x.shape
        assert all(s.dtype == torch.float32 and s.is_contiguous() for s in quant_scales)
        assert all(t.is_contiguous() for t in (x, ids, weights, w31, w2, output))
        one_expert = self._block if use_deepseek_fp8_block_scale else self._tensor
        total = torch.zeros(x.shape, dtype=torch.float64)
        for expert in range(experts):
            token, place = (ids == expert).nonzero(as_tuple=True)
            y = one_expert(expert, x[token.tolist()] if len(token) else x[:0], w31, w2, quant_scales)
            total.index_add_(0, token, y.to(torch.bfloat16).double() * weights[token, place, None].double())
        return [output.copy_(total)]

    @staticmethod
    def _gated(product: torch.Tensor) -> torch.Tensor:
        up, gate = product.to(torch.bfloat16).double().chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def _tensor(self, e: int, x: Any, w31: Any, w2: Any, scales: list[torch.Tensor]) -> torch.Tensor:
        first, act_factor, second, x_scale = scales
        assert x.dtype == torch.float8_e4m3fn and act_factor.ndim == x_scale.ndim == 0
        assert first.shape == second.shape == (len(w2),)
        gated = self._gated(x.double() @ w31[e].double().T * first[e].double())
        a = reference.to_fp8(gated * act_factor.double())
        return a @ w2[e].double().T * second[e].double()

    def _block(self, e: int, x: Any, w31: Any, w2: Any, scales: list[torch.Tensor]) -> torch.Tensor:
        first, second = scales
        assert x.dtype == torch.bfloat16
        for scale, w in ((first, w31), (second, w2)):
            assert scale.shape == (len(w), w.shape[1] // 128, w.shape[2] // 128)
        gated = self._gated(_rows_of_128(x) @ _weights(w31[e], first[e]).T)
        return _rows_of_128(gated) @ _weights(w2[e], second[e]).T


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> _FlashInfer:
    module = _FlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", module)
    return module


def _inputs(**fields: Any) -> Any:
    sizes = {"tokens": 21, "experts": 6, "hidden": 256, "inter": 128, "top_k": 3}
    return cases.make_inputs(MoeCase(**{**sizes, **fields}), "cpu", seed=1)


@pytest.mark.parametrize(
    ("case", "rms"),
    [
        # gate and up rounded to BF16 turn codes of the activations over, which counts for more where there are few
        ({}, 1e-2),
        ({"inter": 80}, 1e-2),
        ({"bf16_input": True}, 1e-2),
        ({"routing": "zipf", "tokens": 1}, 2.5e-2),
        ({"block": True}, moe.TOLERANCE.rms),
        ({"block": True, "inter": 256, "bf16_input": True}, 1.6e-2),
    ],
)
def test_the_call_is_the_operator(case: dict[str, Any], rms: float, library: _FlashInfer) -> None:
    inputs = _inputs(**case)
    call = flashinfer_moe.prepare(cases.rival_inputs(inputs))
    result = call()
    accuracy = measure(result, cases.reference(inputs))
    assert accuracy.within(moe.TOLERANCE) and accuracy.rms_rel <= rms
    assert call().data_ptr() == result.data_ptr()


@pytest.mark.parametrize("block", [False, True])
def test_tactics_are_tuned_once_and_for_this_batch(block: bool, library: _FlashInfer) -> None:
    call = flashinfer_moe.prepare(cases.rival_inputs(_inputs(block=block)))
    call()
    assert library.contexts == [(not block, (21,)), (False, (21,))]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"ranks": 2}, "only plain calls"),
        ({"block": True, "inter": 192}, "multiples of 128"),
        ({"routing": "one"}, "once a token"),
        ({"routing": "none", "top_k": 1}, "local experts"),
    ],
)
def test_what_it_cannot_run(case: dict[str, Any], why: str, library: _FlashInfer) -> None:
    with pytest.raises(CannotRun, match=why):
        flashinfer_moe.prepare(cases.rival_inputs(_inputs(**case)))
    assert not library.contexts


def test_rows_that_are_not_whole_16_bytes_are_refused(library: _FlashInfer) -> None:
    given = cases.rival_inputs(_inputs())
    with pytest.raises(CannotRun, match="multiples of 16"):
        flashinfer_moe.prepare(replace(given, w13=given.w13[:, :144], w2=given.w2[:, :, :72]))


def test_products_that_cannot_be_compiled_say_so(
    library: _FlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.error = RuntimeError("Assertion failed")
    monkeypatch.setenv("TRTLLM_DG_NVCC_COMPILER", "/nowhere/nvcc")
    with pytest.raises(CannotRun, match="no nvcc"):
        flashinfer_moe.prepare(cases.rival_inputs(_inputs(block=True)))
    with pytest.raises(RuntimeError, match="Assertion failed"):
        flashinfer_moe.prepare(cases.rival_inputs(_inputs()))


def test_a_module_that_is_not_built_is_never_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = SimpleNamespace(FLASHINFER_AOT_DIR=tmp_path / "aot", FLASHINFER_JIT_DIR=tmp_path / "jit")
    monkeypatch.setitem(sys.modules, "flashinfer.jit.env", env)  # type: ignore[arg-type]
    monkeypatch.setattr(flashinfer, "available", lambda: None)
    monkeypatch.setattr(arch, "is_hopper", lambda device: True)
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)

    def build(folder: Path) -> None:
        (folder / "fused_moe_90").mkdir(parents=True)
        (folder / "fused_moe_90" / "fused_moe_90.so").touch()

    assert "not built" in (flashinfer_moe.available() or "")
    build(tmp_path / "jit")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "without ninja" in (flashinfer_moe.available() or "")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert flashinfer_moe.available() is None
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT" in (flashinfer_moe.available() or "")
    build(tmp_path / "aot")
    assert flashinfer_moe.available() is None
    monkeypatch.setattr(arch, "is_hopper", lambda device: False)
    assert flashinfer_moe.available() == "needs a Hopper GPU"
