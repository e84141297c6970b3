"""The search for plans, on a machine whose times are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import SquareOperator

from hpc.bench import tune
from hpc.bench.tune import Finding, search
from hpc.common.operator import Case


class NoisyClock:
    """Runs what it replays; a replay takes the sum of its calls' costs, times a random factor."""

    def __init__(self, noise: float = 0.001, seed: int = 0) -> None:
        self.now, self.noise, self.random = 0.0, noise, random.Random(seed)
        self.cost = 0.0

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Any:
        for call in calls:
            call()
        return list(calls)

    def replay(self, graph: Any) -> None:
        self.cost = 0.0
        for call in graph:
            call()
        self.now += self.cost * self.random.uniform(1.0 - self.noise, 1.0 + self.noise)

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        return None


@dataclass(frozen=True)
class Plan:
    stages: int = 2
    warps: int = 4


@dataclass(frozen=True)
class Nested:
    outer: int
    inner: Plan | None


@dataclass(frozen=True)
class Key:
    n: int


class FakeTuning:
    """Cost of a plan by case; a plan may be wrong or unable."""

    folder = Path("configs")

    def __init__(self, clock: NoisyClock, cost: Callable[[int, Plan], float], plans: Iterable[Plan]) -> None:
        self.clock, self.cost, self.plans = clock, cost, list(plans)

    def cases(self) -> list[Case]:
        return [Case(f"n {n}", frozenset(), n) for n in (8, 16)]

    def key(self, inputs: torch.Tensor) -> Key:
        return Key(inputs.numel())

    def point(self, key: Key) -> tuple[dict[str, int | bool | str], int]:
        return {"kind": "square"}, 16

    def analytic(self, key: Key) -> Plan:
        return Plan()

    def candidates(self, key: Key) -> list[Plan]:
        return [Plan(), *self.plans, *self.plans]

    def is_legal(self, plan: Plan, key: Key) -> str | None:
        return "too many" if plan.stages > 8 else None

    def prepare(self, inputs: torch.Tensor, plan: Plan) -> Callable[[], torch.Tensor]:
        if plan.stages == 7:
            raise RuntimeError("out of registers")

        def call() -> torch.Tensor:
            self.clock.cost += self.cost(inputs.numel(), plan)
            return inputs * inputs * (1.1 if plan.stages == 6 else 1.0)

        return call

    def compile(self, case: Case, plan: Plan, target: str) -> None:
        raise AssertionError("in a process of its own")


def found(cost: Callable[[int, Plan], float], *plans: Plan, noise: float = 0.001, **options: Any) -> Finding:
    clock = NoisyClock(noise)
    tuning = FakeTuning(clock, cost, plans)
    op = SquareOperator([])
    (finding,) = search(op, tuning, tuning.cases(), "cpu", budget_ms=2.0, clock=clock, **options)
    return finding


def test_the_fastest_plan_wins() -> None:
    finding = found(lambda n, plan: 100.0 / plan.stages, Plan(3), Plan(4), Plan(3, 8))
    assert finding.best == Plan(4) and finding.gain == pytest.approx(2.0, rel=0.01)
    assert finding.tried == 3, "the analytic plan and repetitions are left out"
    assert finding.cases == ("n 8", "n 16")
    entry = finding.entry()
    assert entry.plan == {"stages": 4, "warps": 4} and entry.size == 16
    assert entry.analytic_us == pytest.approx(100.0, rel=0.01) and entry.time_us == pytest.approx(
        50.0, rel=0.01
    )


def test_nothing_better_means_no_plan() -> None:
    finding = found(lambda n, plan: 50.0 if plan == Plan() else 50.5, Plan(3), Plan(4))
    assert finding.best is None and finding.entry().plan is None


def test_a_gain_below_the_least_does_not_count() -> None:
    assert found(lambda n, plan: 50.0 if plan == Plan() else 49.5, Plan(3)).best is None
    assert found(lambda n, plan: 50.0 if plan == Plan() else 49.5, Plan(3), min_gain=0.005).best == Plan(3)


def test_a_plan_that_loses_one_of_its_cases_is_out() -> None:
    """Both cases share a point, so the plan would serve both: 40 % faster on one does not pay for the other."""
    finding = found(lambda n, plan: 50.0 if plan == Plan() else (30.0 if n == 8 else 52.0), Plan(3))
    assert finding.best is None


def test_equal_plans_with_noisy_times_are_not_kept() -> None:
    """The luckiest of many equal plans looks better in the first round and fails the second."""
    plans = [Plan(stages, warps) for stages in (2, 3, 4, 5, 8) for warps in (1, 2, 8)]
    for seed in range(5):
        clock = NoisyClock(0.15, seed)
        tuning = FakeTuning(clock, lambda n, plan: 50.0, plans)
        (finding,) = search(SquareOperator([]), tuning, tuning.cases(), "cpu", budget_ms=2.0, clock=clock)
        assert finding.best is None


def test_wrong_failing_and_illegal_plans_are_left_out() -> None:
    finding = found(lambda n, plan: 100.0 / plan.stages, Plan(3), Plan(6), Plan(7), Plan(9))
    assert finding.best == Plan(3) and finding.tried == 1
    assert "wrong" in finding.failed["hpc/stages=6"]
    assert finding.failed["hpc/stages=7"] == "RuntimeError: out of registers"
    assert "hpc/stages=9" not in finding.failed


def test_an_analytic_plan_that_fails_is_said_and_not_replaced() -> None:
    class Broken(FakeTuning):
        def analytic(self, key: Key) -> Plan:
            return Plan(7)

    clock = NoisyClock()
    tuning = Broken(clock, lambda n, plan: 10.0, [Plan(3)])
    (finding,) = search(SquareOperator([]), tuning, tuning.cases(), "cpu", budget_ms=2.0, clock=clock)
    assert finding.best is None and "out of registers" in finding.note


def test_progress_names_every_plan_and_runs_to_its_end() -> None:
    seen: list[tuple[str, int, int]] = []
    found(lambda n, plan: 100.0 / plan.stages, Plan(3), progress=lambda *step: seen.append(step))
    assert list(dict.fromkeys((done, total) for _, done, total in seen)) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert any(what == "n 8: check hpc/stages=3" for what, _, _ in seen)


def test_operators_without_plans_to_search_are_none() -> None:
    from hpc.common import registry

    assert set(tune.tunable()) <= set(registry.names())


def test_difference_names_what_changes() -> None:
    assert tune.difference(Plan(3, 8), Plan()) == "stages=3 warps=8"
    assert tune.difference(Plan(), Plan()) == "nothing"
    nested = (Nested(1, Plan(3, 8)), Nested(1, Plan(3, 4)), Nested(2, None))
    assert tune.difference(nested[0], nested[1]) == "inner.warps=8"
    assert tune.difference(nested[0], nested[2]) == "outer=1 inner.stages=3 inner.warps=8"
    assert tune.difference(nested[2], nested[0]) == "outer=2 inner=None"


def test_every_plan_of_a_point_is_compiled_once_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = FakeTuning(NoisyClock(), lambda n, plan: 10.0, [Plan(3), Plan(4)])
    points = tune._points(SquareOperator([]), tuning, tuning.cases(), torch.device("cpu"), 0)
    seen: list[Any] = []
    monkeypatch.setattr(tune, "compile_all", lambda function, jobs, progress: seen.append((function, jobs)))
    tune.compile_plans(tuning, points, "sm90", None)
    ((function, jobs),) = seen
    assert function == tuning.compile
    assert [name for name, _ in jobs] == [
        "n 8: compile hpc/analytic", "n 8: compile hpc/stages=3", "n 8: compile hpc/stages=4",
    ]  # fmt: skip
    assert [arguments for _, arguments in jobs] == [
        (tuning.cases()[0], plan, "sm90") for plan in (Plan(), Plan(3), Plan(4))
    ]
