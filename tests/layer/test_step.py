"""One decode step of each model's layer, and that the checks fail where a stage is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hpc.cli import app
from hpc.layer import batching, demo, model
from hpc.layer.step import Step

LENS = (70, 1, 64, 200)
CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


def step_of(name: str) -> Step:
    return Step(model.load(name).small(), LENS, CPU, seed=3)


@pytest.mark.parametrize("name", model.names())
def test_every_stage_is_right(name: str) -> None:
    step = step_of(name)
    stages = demo.check(step, step.run())
    assert all(stage.ok for stage in stages), stages
    names = [stage.name for stage in stages if stage.name]
    attention = ["prologue", "decode"] if step.shape.has_attention else []
    assert names == [*attention, "router top-k", "MoE", "whole layer"]


def test_a_step_can_be_repeated() -> None:
    """Bit for bit: the prologue writes the same rows again."""
    step = step_of("hy3")
    assert torch.equal(step.run(), step.run())


def test_steps_follow_each_other_in_the_same_buffers() -> None:
    """Requests grow, one ends and another joins; rows behind each length are NaN until a step writes them."""
    batches = [batching.Batch((65, 9), frozenset((0, 1))), batching.Batch((66, 130), frozenset((1,)))]
    step = Step(model.load("hy3").small(), batching.capacity(batches), CPU, seed=3)
    addresses = (step.cache.seq_lens.data_ptr(), step.x.data_ptr(), step.task_map.data_ptr())
    for batch in batches:
        step.load(batch.lens, batch.joined)
        stages = demo.check(step, step.run())
        assert all(stage.ok for stage in stages), stages
    assert addresses == (step.cache.seq_lens.data_ptr(), step.x.data_ptr(), step.task_map.data_ptr())


def failing(step: Step, out: torch.Tensor) -> set[str]:
    return {f"{stage.name}/{stage.what}" for stage in demo.check(step, out) if not stage.ok}


def test_wrong_stages_are_found() -> None:
    """Each slip fails the check of its own stage."""
    step = step_of("hy3")
    out = step.run()
    step.attention[1] *= 1.05
    assert failing(step, out) == {"decode/attention"}
    step.attention[1] /= 1.05
    step.run()
    step.q_scale = step.q_scale * 1.2
    assert "prologue/queries" in failing(step, out)
    step.run()
    step.cache.vcache.view(torch.uint8)[step.cache.block_ids[0, 1].long(), 69 - 64] ^= 0x80
    assert "/keys and values in the cache" in failing(step, out)


def test_wrong_choices_and_weights_are_found() -> None:
    step = step_of("qwen3-30b-a3b")
    out = step.run()
    kept = step.topk_weights.clone()
    step.topk_weights = kept * 1.001
    assert "router top-k/weights of the chosen" in failing(step, out)
    step.topk_weights = kept
    ids = set(range(step.shape.experts)) - set(step.topk_ids[0].tolist())
    step.topk_ids = step.topk_ids.clone()
    step.topk_ids[0, -1] = ids.pop()
    assert "/score lost by the choice" in failing(step, out)


def test_a_missing_residual_is_found() -> None:
    step = step_of("qwen3-30b-a3b")
    step.run()
    assert failing(step, step.moe) == {"whole layer/against float64 without FP8"}


def test_zero_experts_count() -> None:
    """LongCat: tokens' zero experts enter through the shared output; leaving them out is wrong."""
    step = step_of("longcat-flash-lite")
    out = step.run()
    assert (
        step.zero_weight is not None
        and bool((step.zero_weight > 0).any())
        and bool((step.topk_ids < 0).any())
    )
    without = out.float() - step.zero_weight[:, None] * step.y.float()
    assert failing(step, without.to(torch.bfloat16)) == {"whole layer/against float64 without FP8"}


@without_gpu
def test_command_prints_stages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "step.png"
    result = CliRunner().invoke(
        app,
        ["demo", "--model", "hy3", "--tp", "8", "--requests", "2", "--png", str(png)],
        env={"COLUMNS": "120"},
    )
    assert result.exit_code == 0, result.output
    for text in (
        "hy3, one of 8 ranks",
        "No GPU here",
        "prologue",
        "router top-k",
        "MoE",
        "whole layer",
        "passed",
    ):
        assert text in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


@without_gpu
def test_command_as_json() -> None:
    result = CliRunner().invoke(
        app, ["demo", "--model", "longcat-flash-lite", "--requests", "2", "--steps", "1", "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] and report["ran"] == "reference" and "prologue" not in report["times_us"]


@pytest.mark.parametrize(
    "arguments", [["--model", "nothing"], ["--model", "hy3", "--tiny"], ["--model", "hy3", "--tp", "5"]]
)
def test_wrong_requests_are_one_line(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2 and "Traceback" not in result.output


@without_gpu
def test_a_wrong_stage_gives_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = demo.Stage("decode", "attention", 0.5, 0.5, ok=False)
    batches = [batching.Batch(LENS, frozenset())]
    report = demo.Report("cpu", False, model.load("hy3").small(), batches, [bad], {"schedule": 1.0})
    monkeypatch.setattr(demo, "run", lambda *_: report)
    result = CliRunner().invoke(app, ["demo", "--model", "hy3"], env={"COLUMNS": "120"})
    assert result.exit_code == 1 and "FAIL" in result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hy3", "qwen3-30b-a3b", "longcat-flash-lite"])
def test_real_shapes_on_a_gpu(name: str) -> None:
    report = demo.run(name, num_requests=8)
    assert report.ok, report.stages
    assert all(time > 0 for time in report.times_us.values())
