"""The drawn weights: two correct sets of kernels agree on them, and an error of one is seen. On a small decoder."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_model import HIDDEN, LAYERS, TOP_K, VOCABULARY, Kernels, Running, dequantised, model, norm

ROOT = Path(__file__).resolve().parents[2]
FAULTS: dict[str, dict[str, Any]] = {
    "wrong page": {"wrong_page": 2}, "dropped expert": {"dropped_expert": True}, "forgotten scale": {"scale": 2.0},
    "a position late": {"rope_shift": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def weights() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        weights = importlib.import_module("serving.weights")
        patch.setattr(weights, "CLUSTERS", 64)  # a twelfth of the hidden size, as in the models
        weights._codes.cache_clear()
        yield weights
        weights._codes.cache_clear()


@pytest.fixture(scope="module")
def drawn(weights: Any) -> Any:
    root = model()
    weights.fill(root)
    return weights, root


@pytest.fixture(scope="module")
def drawn_dense(weights: Any) -> Any:
    root = model(dense=True)
    weights.fill(root)
    return weights, root


def apart(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """(mean of 1 - cosine of the logits, share of equal choices)."""
    cosine = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)
    return float((1 - cosine).mean()), float((a.argmax(-1) == b.argmax(-1)).float().mean())


def check(root: torch.nn.Module, fp8_kv: bool, faults: dict[str, dict[str, Any]]) -> None:
    """Roundings elsewhere keep the cosine above 0.999 and the choices; each fault is at least four times as far."""
    state = dequantised(root)
    tokens = torch.randint(VOCABULARY, (128,), generator=torch.Generator().manual_seed(0))

    def logits(**kernels: Any) -> torch.Tensor:
        return Running(state, Kernels(fp8_kv=fp8_kv, **kernels)).logits(tokens)

    reference = logits()
    right, same = apart(reference, logits(other=True))
    assert right < 1e-3 and same >= 0.97
    for name, fault in faults.items():
        wrong, _ = apart(reference, logits(other=True, **fault))
        assert wrong > 4 * right, f"{name}: {wrong:.1e}, roundings alone {right:.1e}"


@pytest.mark.parametrize("fp8_kv", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fp8", "bf16"])
def test_roundings_agree_and_faults_show(fp8_kv: bool, drawn: Any) -> None:
    check(drawn[1], fp8_kv, FAULTS)


@pytest.mark.parametrize("fp8_kv", [True, False], ids=["fp8", "bf16"])
def test_roundings_agree_and_faults_show_in_a_dense_model(fp8_kv: bool, drawn_dense: Any) -> None:
    check(drawn_dense[1], fp8_kv, {name: fault for name, fault in FAULTS.items() if "expert" not in name})


def test_weights_of_a_dense_model(drawn_dense: Any) -> None:
    """Unit gain inside branches, the same share of the energy at the end of each, and a head of its own."""
    weights, root = drawn_dense
    state = root.state_dict()
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in state.values())
    end = math.sqrt(weights.BRANCHES / (2 * LAYERS)) / weights.BRANCH_OUTPUT
    gains = {
        "self_attn.qkv_proj": 1.0,
        "self_attn.o_proj": end,
        "mlp.gate_up_proj": 1.0,
        "mlp.down_proj": end,
    }
    for name, gain in gains.items():
        weight = state[f"model.layers.3.{name}.weight"].float()
        assert float(weight.std()) * math.sqrt(weight.shape[1]) == pytest.approx(gain, rel=0.02), name
    words, head = (state[name].float() for name in ("model.embed_tokens.weight", "lm_head.weight"))
    best = (norm(words) @ head.T).topk(3, -1).values
    assert float((best[:, 1] - best[:, 2]).mean()) > 2 * weights.LOGITS  # two successors ahead of all others


def test_choices_of_experts_have_margins_and_are_even(drawn: Any) -> None:
    weights, root = drawn
    state = dequantised(root)
    embedding, router = state["model.embed_tokens.weight"], state["model.layers.1.mlp.gate.weight"]
    logits = embedding @ router.T / math.sqrt(1 + weights.BRANCHES)
    best = logits.topk(TOP_K + 1, -1).values
    assert float((best[:, -2] - best[:, -1]).min()) > 1.0
    counts = logits.topk(TOP_K, -1).indices.flatten().bincount(minlength=router.shape[0])
    assert int(counts.min()) > 0.5 * float(counts.float().mean())


def test_scales_and_branches(drawn: Any) -> None:
    """Codes use the format's range, scales of experts differ by 25 % at most, ends of branches share their energy."""
    weights, root = drawn
    state = root.state_dict()
    for name in (name for name in state if re.search(r"w13_weight$|w2_weight$", name)):
        codes, scale = state[name].float(), state[f"{name}_scale"]
        assert 30 < float(codes.std()) < 34 and float(codes.abs().max()) > 100
        assert float(scale.max() / scale.min()) < 1.7 and len(set(scale.tolist())) > 1
    gain = math.sqrt(weights.BRANCHES / (2 * LAYERS)) / weights.BRANCH_OUTPUT
    down = dequantised(root)["model.layers.2.self_attn.o_proj.weight"]
    product = torch.randn(64, down.shape[1], generator=torch.Generator().manual_seed(1)) @ down.T
    assert product.shape[1] == HIDDEN and 0.8 * gain < float(product.std()) < 1.2 * gain
