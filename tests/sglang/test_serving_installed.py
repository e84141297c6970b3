"""benchmarks/serving where SGLang is installed: its parser takes the arguments, its loader the weights."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.sglang
BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield lambda name: importlib.import_module(f"serving.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "serving"]:
        del sys.modules[name]


@pytest.mark.parametrize("model", ["hy3_tp8", "qwen3_8b"])
def test_sglang_takes_the_arguments_of_every_set(model: str, serving: Any) -> None:
    sets = serving("sets")
    arguments = importlib.import_module("sglang.srt.server_args")
    importlib.import_module("hpc.integrations.sglang").register()
    parser = argparse.ArgumentParser()
    arguments.ServerArgs.add_cli_args(parser)
    folder = sets.model_folder(model, 2)
    for name in sets.SETS:
        for batches in ([1, 64], None, []):
            words = sets.arguments(
                folder, name, fp8=True, context=2304, tokens=70000, most=64, batches=batches, memory=0.8
            )
            for kind in (None, *sets.DRAFTS):
                drafts = sets.draft_arguments(kind, model, 1, 3, "fa3") if kind else []
                parsed = parser.parse_args([*words, *drafts])
                assert parsed.kv_cache_dtype == "fp8_e4m3" and parsed.max_total_tokens % 4096 == 0
                assert parsed.speculative_algorithm == (kind and kind.upper())
                assert parsed.speculative_num_draft_tokens == (sets.draft_rows(kind, 3) if kind else None)


def test_weights_take_the_place_of_sglangs(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the hook registry; the same names give the same weights, and products of unit inputs stay near one."""
    loader = importlib.import_module("sglang.srt.model_loader.loader")
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    monkeypatch.setattr(hooks, "_hooks", type(hooks._hooks)(list))
    monkeypatch.setattr(hooks, "_patched", set())
    monkeypatch.setattr(loader, "initialize_dummy_weights", loader.initialize_dummy_weights)
    serving("weights").register()
    hooks.apply_hooks()
    found = []
    for _ in range(2):
        layer = torch.nn.Linear(1024, 64, bias=False)
        layer.weight = torch.nn.Parameter(
            torch.empty(64, 1024, dtype=torch.float8_e4m3fn), requires_grad=False
        )
        layer.weight_scale = torch.nn.Parameter(torch.empty(3), requires_grad=False)
        layer.k_scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        loader.initialize_dummy_weights(torch.nn.ModuleDict({"qkv_proj": layer}))
        found.append(layer)
    assert torch.equal(*(layer.weight.view(torch.uint8) for layer in found))
    assert float(found[0].k_scale) == -1.0 and len(set(found[0].weight_scale.tolist())) == 1
    product = torch.randn(32, 1024) @ (found[0].weight.float() * found[0].weight_scale[0]).T
    assert 0.8 < float(product.std()) < 1.2
