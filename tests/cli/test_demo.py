"""`hpc demo`: passes where it should, and says so where it does not."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hpc.attention.decode import cases, demo
from hpc.cli import app

runner = CliRunner()
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


@pytest.mark.interpret
@without_gpu
def test_tiny_demo_passes_on_a_cpu() -> None:
    result = runner.invoke(app, ["demo", "--tiny", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] and report["kernels"] == "interpreted"
    paths = {(row["dtype"], row["path"]) for row in report["results"]}
    for dtype in ("fp8", "bf16"):
        assert (dtype, "public function (reference)") in paths
        assert (dtype, "interpreted kernels, dynamic schedule") in paths
        assert (dtype, "interpreted kernels, static split") in paths
    assert all(row["time_us"] is None for row in report["results"])


@pytest.mark.gpu
def test_tiny_demo_passes_on_a_gpu() -> None:
    result = runner.invoke(app, ["demo", "--tiny", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] and report["kernels"] == "compiled"
    timed = {row["path"] for row in report["results"] if row["time_us"] is not None}
    assert {"dynamic schedule", "static split", "schedule (once a step)"} <= timed


def report_of(rms: float) -> demo.Report:
    row = demo.Result("fp8", "dynamic schedule", rms, rms, ok=rms < cases.TOLERANCES["fp8"].rms)
    return demo.Report("cpu", demo.choose_batch(gpu=False), demo.INTERPRETED_SMS, False, [row])


def test_picture_table_and_verdict(monkeypatch, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "run", lambda tiny, seed, say: report_of(1e-3))
    png = tmp_path / "demo.png"
    result = runner.invoke(app, ["demo", "--png", str(png)], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "No GPU here" in result.stdout
    assert "dynamic schedule: tail" in result.stdout
    assert "passed" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_wrong_result_gives_code_1(monkeypatch) -> None:
    monkeypatch.setattr(demo, "run", lambda tiny, seed, say: report_of(2.5e-2))
    result = runner.invoke(app, ["demo"], env={"COLUMNS": "100"})
    assert result.exit_code == 1
    assert "FAIL" in result.stdout and "FAILED" in result.stdout


def test_what_is_left_out_is_said(monkeypatch) -> None:
    report = report_of(1e-3)
    report.left_out = "the interpreted kernels (needs numpy)"
    monkeypatch.setattr(demo, "run", lambda tiny, seed, say: report)
    result = runner.invoke(app, ["demo"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert "left out: the interpreted kernels (needs numpy)" in result.stdout


def test_broken_interpreter_is_one_line(monkeypatch) -> None:
    def refuse(tiny: bool, seed: int, say) -> None:
        raise demo.CannotRun("the interpreted kernels did not run: no module named triton")

    monkeypatch.setattr(demo, "run", refuse)
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "error: the interpreted kernels did not run" in result.output
    assert "Traceback" not in result.output


def test_tolerance_refuses_8_bit_probabilities() -> None:
    inputs = cases.make_tensors(demo.choose_batch(gpu=False, tiny=True).params("fp8"), "cpu", seed=0)
    expected, _ = cases.reference(inputs)
    assert demo.judge(inputs, "exact", expected.to(torch.bfloat16), expected).ok
    coarse = (expected / 16).to(torch.float8_e4m3fn).double() * 16
    assert not demo.judge(inputs, "coarse", coarse, expected).ok


@without_gpu
def test_a_broken_subprocess_is_reported_with_its_last_line(monkeypatch) -> None:
    monkeypatch.setattr(demo.sys, "executable", "false")
    with pytest.raises(demo.CannotRun):
        list(demo.interpreted(demo.choose_batch(gpu=False, tiny=True)))


def test_sdpa_comparison_computes_the_same() -> None:
    from hpc.attention.decode import demo_timing

    batch = demo.Batch((200, 3, 65), num_q_heads=8, num_kv_heads=2)
    inputs = cases.make_tensors(batch.params("bf16"), "cpu", seed=0)
    found = demo_timing._sdpa_call(inputs)().reshape(3, 8, 128)
    assert demo.judge(inputs, "sdpa", found, cases.reference(inputs)[0]).rms_rel < 5e-3
