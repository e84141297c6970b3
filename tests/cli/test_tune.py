"""`hpc tune` around the search, on the CPU, with plans whose time is made up: a busy machine changes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hpc.bench import runner as bench_runner
from hpc.bench import timer, tune
from hpc.cli import app
from hpc.common import operator, plan_table, registry

runner = CliRunner()
ON_CPU = ["--device", "cpu", "--budget-ms", "1"]


@dataclass(frozen=True)
class Plan:
    delay_us: int = 400


class Sleeper(timer.HostClock):
    """Operator, tuning and clock in one: x -> 2 x, and a call moves the clock by what its plan says."""

    name = "fake.sleep"
    functions = ()
    candidates_us = (300, 100)
    broken = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_us = 0.0

    def mark(self):
        return self.now_us * 1e-6

    def cases(self, tag: str = "") -> list[operator.Case]:
        return [operator.Case("small", frozenset(), 8), operator.Case("large", frozenset(), 16)]

    def make_inputs(self, case, device, seed):
        return torch.ones(case.params, device=device)

    def reference(self, inputs):
        return 2.0 * inputs.double()

    def tolerance(self, case):
        return operator.Tolerance(1e-6, 1e-6)

    def floor(self, case):
        return operator.Floor(4 * case.params, 0.0, "bf16")

    def key(self, inputs):
        return inputs.numel()

    def point(self, key):
        return {"op": "sleep"}, key

    def analytic(self, key):
        return Plan()

    def candidates(self, key):
        return [Plan(delay) for delay in self.candidates_us]

    def is_legal(self, plan, key):
        return None

    def prepare(self, inputs, plan):
        if self.broken:
            raise RuntimeError("no such kernel")

        def call():
            self.now_us += plan.delay_us
            return 2.0 * inputs

        return call


@pytest.fixture
def sleeper(monkeypatch, tmp_path) -> Sleeper:
    chosen = Sleeper(tmp_path / "configs")
    monkeypatch.setattr(registry, "names", lambda: ["fake.sleep"])
    monkeypatch.setattr(registry, "get", lambda name: chosen)
    monkeypatch.setattr(tune, "load", lambda name: chosen)
    monkeypatch.setattr(bench_runner, "make_clock", lambda device: chosen)
    return chosen


def test_a_better_plan_is_written_and_shown(sleeper) -> None:
    result = runner.invoke(app, ["tune", "fake.sleep", *ON_CPU], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "delay_us=100" in result.stdout and "wrote" in result.stdout
    table = plan_table.parse((sleeper.folder / "cpu.json").read_text())
    assert table.gpu == "cpu" and [(e.size, e.plan) for e in table.entries] == [
        (8, {"delay_us": 100}),
        (16, {"delay_us": 100}),
    ]
    assert all(entry.gain == pytest.approx(4.0) for entry in table.entries)


def test_dry_run_writes_nothing_and_json_is_one_document(sleeper) -> None:
    result = runner.invoke(app, ["tune", "--dry-run", "--json", "--case", "small", *ON_CPU])
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)
    assert report["written"] is None and not sleeper.folder.exists()
    (point,) = report["points"]
    assert point["best"] == {"delay_us": 100} and point["times"]["small"]["analytic_us"] == pytest.approx(400)


def test_where_the_analytic_choice_wins_no_table_is_left(sleeper) -> None:
    assert runner.invoke(app, ["tune", *ON_CPU]).exit_code == 0
    sleeper.candidates_us = (800,)
    result = runner.invoke(app, ["tune", *ON_CPU], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "nothing to write" in result.stdout and not (sleeper.folder / "cpu.json").exists()


def test_a_failing_analytic_plan_gives_code_1(sleeper) -> None:
    sleeper.broken = True
    result = runner.invoke(app, ["tune", *ON_CPU], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "no such kernel" in result.stdout


def test_list_runs_nothing(sleeper) -> None:
    sleeper.broken = True
    result = runner.invoke(app, ["tune", "--list"])
    assert result.exit_code == 0 and "case  small" in result.stdout


@pytest.mark.parametrize("arguments", [["nobody"], ["--case", "zzz", *ON_CPU]])
def test_bad_requests_are_usage_errors(sleeper, arguments) -> None:
    assert runner.invoke(app, ["tune", *arguments]).exit_code == 2


def test_an_operator_without_plans_says_so(sleeper, monkeypatch) -> None:
    monkeypatch.setattr(tune, "load", lambda name: None)
    result = runner.invoke(app, ["tune", "sleep"])
    assert result.exit_code == 2 and "sleep has no plans to search" in " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_says_so(sleeper) -> None:
    result = runner.invoke(app, ["tune"])
    assert result.exit_code == 2 and "no GPU here" in result.output
