"""Search for plans that beat an operator's analytic choice on this machine, and keep only those that honestly do.

A point is everything that the lookup of a plan may depend on: discrete axes and a size. All cases of a point are
measured, since a plan is chosen without knowing which of them it meets. The search has two rounds. The first times
every legal plan beside the analytic one, interleaved, after its result was checked against float64. The best of them
by geometric mean meet the analytic plan again in a second round of their own: the winner of many noisy times is
partly the luckiest, and only times of the second round count. A plan is kept if its mean gain there reaches
`min_gain`, it is faster beyond noise in some case, and slower beyond noise in none.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from hpc.bench import runner
from hpc.bench.providers import Provider
from hpc.bench.results import Row
from hpc.bench.timer import Call, Clock
from hpc.common import arch, registry
from hpc.common.compiling import compile_all
from hpc.common.operator import Case, Operator
from hpc.common.plan_table import Axes, Entry

ANALYTIC = "hpc/analytic"
MIN_GAIN = 0.02
FINALISTS = 3

# progress(what, done, total): what is done now, over the cases of both rounds
Report = Callable[[str, int, int], None]


class Tuning(Protocol):
    """What `tuning.py` of an operator's folder offers as `TUNING`."""

    folder: Path
    """Where the tables lie: `configs` of the operator's folder."""

    def cases(self) -> list[Case]:
        """What to measure: the shapes that serving meets, each with the inputs that may want different plans."""
        ...

    def key(self, inputs: Any) -> Any:
        """The plan key of a call, a frozen dataclass."""
        ...

    def point(self, key: Any) -> tuple[Axes, int]:
        """The discrete axes and the size by which the table is looked up."""
        ...

    def analytic(self, key: Any) -> Any:
        """The plan without a table."""
        ...

    def candidates(self, key: Any) -> Iterable[Any]:
        """Plans worth a measurement, frozen dataclasses; illegal ones are left out by `is_legal`."""
        ...

    def is_legal(self, plan: Any, key: Any) -> str | None:
        """None, or why the plan cannot run the call."""
        ...

    def prepare(self, inputs: Any, plan: Any) -> Call:
        """The call to time, with this plan; what users do once is done here."""
        ...

    def compile(self, case: Case, plan: Any, target: str) -> None:
        """Compile what `prepare` would launch for `target` ("sm90"), without a GPU, into Triton's cache."""
        ...


@dataclass(frozen=True)
class Finding:
    """The outcome for one point.

    Attributes:
        axes, size: the point.
        cases: names of its cases.
        analytic, best: plans; `best` is None where the analytic choice stays.
        gain: analytic time / best time, geometric mean of the second round.
        times_us: case -> (analytic, best) of the second round.
        tried: legal plans that were timed beside the analytic one.
        failed: plan -> why it has no time.
        note: why there is no result at all.
    """

    axes: Axes
    size: int
    cases: tuple[str, ...]
    analytic: Any
    best: Any | None
    gain: float
    times_us: Mapping[str, tuple[float, float]]
    tried: int
    failed: Mapping[str, str]
    note: str = ""

    def entry(self) -> Entry:
        """For the table."""
        axes = tuple(self.axes.items())
        if self.best is None:
            return Entry(axes, self.size, None)
        analytic_us, time_us = (sum(times[place] for times in self.times_us.values()) for place in (0, 1))
        return Entry(axes, self.size, asdict(self.best), time_us, analytic_us, self.gain)


def tunable() -> list[str]:
    """Operators whose folder has a `tuning.py`."""
    return [name for name in registry.names() if load(name) is not None]


def load(name: str) -> Tuning | None:
    """`TUNING` of an operator, or None if it has no plans to search."""
    package = registry.OPERATORS[name].rpartition(".")[0]
    try:
        module = importlib.import_module(f"{package}.tuning")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.tuning":
            raise
        return None
    return cast(Tuning, module.TUNING)


@dataclass
class _Point:
    axes: Axes
    size: int
    analytic: Any
    plans: dict[str, Any]  # name -> plan
    cases: list[Case]


class _WithPlans:
    """The operator with one provider per plan in the place of its own."""

    def __init__(self, op: Operator, tuning: Tuning, plans: Mapping[str, Any]) -> None:
        self._op = op

        def provider(name: str, plan: Any) -> Provider:
            return Provider(name, lambda inputs: tuning.prepare(inputs, plan))

        self._providers = {name: provider(name, plan) for name, plan in plans.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def providers(self) -> Mapping[str, Provider]:
        return self._providers


def search(
    op: Operator,
    tuning: Tuning,
    cases: Sequence[Case],
    device: torch.device | str,
    *,
    budget_ms: float = 20.0,
    min_gain: float = MIN_GAIN,
    seed: int = 0,
    progress: Report | None = None,
    clock: Clock | None = None,
) -> list[Finding]:
    """Search the plans of every point that the cases belong to.

    Args:
        op: the operator, for inputs, reference and tolerance.
        tuning: its plans.
        cases: from ``tuning.cases()``, or some of them. A point whose cases are only partly here is judged by these.
        device: where to measure.
        budget_ms: device time per plan and case of the first round; the second takes four times as much.
        min_gain: least mean gain, 0.02 for 2 %.
        seed: of the inputs.
        progress: called before each step.
        clock: only for tests.

    Returns:
        One finding per point, in the order of the cases.
    """
    points = _points(op, tuning, cases, torch.device(device), seed)
    if torch.device(device).type == "cuda":
        compile_plans(tuning, points, "sm{}{}".format(*arch.capability(torch.device(device))), progress)
    total = 2 * sum(len(point.cases) for point in points)
    run = _Search(op, tuning, torch.device(device), seed, clock, progress, total)
    return [run.point(point, budget_ms, min_gain) for point in points]


def compile_plans(tuning: Tuning, points: Sequence[_Point], target: str, progress: Report | None) -> None:
    """Compile every plan in parallel processes, so that the GPU does not wait for one compiler.

    A plan that does not compile fails again where it is measured, which says why.
    """
    jobs = [
        (f"{point.cases[0].name}: compile {name}", (point.cases[0], plan, target))
        for point in points
        for name, plan in {ANALYTIC: point.analytic, **point.plans}.items()
    ]
    compile_all(tuning.compile, jobs, progress)


@dataclass
class _Search:
    """What stays the same over the points, and how far the search is."""

    op: Operator
    tuning: Tuning
    device: torch.device
    seed: int
    clock: Clock | None
    progress: Report | None
    total: int
    done: int = 0

    def point(self, point: _Point, budget_ms: float, min_gain: float) -> Finding:
        """Both rounds of one point; the second is left out where nothing looks better."""
        analytic = {ANALYTIC: point.analytic}
        first = second = self.measure(point, {**analytic, **point.plans}, budget_ms)
        finalists = _ranked(first, point, min_gain)[:FINALISTS]
        if finalists:
            second = self.measure(
                point, {**analytic, **{name: point.plans[name] for name in finalists}}, 4.0 * budget_ms
            )
        else:
            self.done += len(point.cases)
        return _finding(point, first, second, finalists, min_gain)

    def measure(self, point: _Point, plans: Mapping[str, Any], budget_ms: float) -> list[Row]:
        """Rows of every plan on every case of the point."""
        wrapped = cast(Operator, _WithPlans(self.op, self.tuning, plans))
        rows: list[Row] = []
        for case in point.cases:
            rows += runner.run(
                wrapped, [case], None, self.device, None, self.tell, budget_ms=budget_ms, seed=self.seed,
                clock=self.clock,
            )  # fmt: skip
            self.done += 1
        return rows

    def tell(self, event: runner.Event) -> None:
        """Pass a step of the runner on."""
        if self.progress is not None and event.stage != "row":
            what = f"{event.case}: {event.stage} {event.provider}".rstrip()
            self.progress(what, self.done, self.total)


def _points(
    op: Operator, tuning: Tuning, cases: Sequence[Case], device: torch.device, seed: int
) -> list[_Point]:
    points: dict[Any, _Point] = {}
    for case in cases:
        key = tuning.key(op.make_inputs(case, device, seed))
        axes, size = tuning.point(key)
        found = points.get((tuple(axes.items()), size))
        if found is not None:
            found.cases.append(case)
            continue
        analytic = tuning.analytic(key)
        legal = [
            plan
            for plan in dict.fromkeys(tuning.candidates(key))
            if plan != analytic and tuning.is_legal(plan, key) is None
        ]
        plans = {f"hpc/{difference(plan, analytic)}": plan for plan in legal}
        points[tuple(axes.items()), size] = _Point(axes, size, analytic, plans, [case])
    return list(points.values())


def difference(plan: Any, analytic: Any) -> str:
    """What a plan changes: "stages=4 up.warps=8"."""
    if type(plan) is not type(analytic):
        return repr(plan)
    ours, theirs = _flat(asdict(plan)), _flat(asdict(analytic))
    changed = [
        f"{name}={value}" for name, value in ours.items() if name not in theirs or value != theirs[name]
    ]
    return " ".join(changed) or "nothing"


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"up": {"warps": 8}} as {"up.warps": 8}."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        )
    return found


def _times(rows: Sequence[Row], name: str) -> dict[str, Row]:
    """Case -> row of a plan, where it has a time."""
    return {row.case: row for row in rows if row.provider == name and row.time_us}


def _gain(rows: Sequence[Row], name: str) -> float | None:
    """Geometric mean of analytic time / plan time; None unless the plan has a time in every case."""
    base, mine = _times(rows, ANALYTIC), _times(rows, name)
    if not base or set(base) != set(mine):
        return None
    logs = [math.log(cast(float, base[case].time_us) / cast(float, mine[case].time_us)) for case in base]
    return math.exp(sum(logs) / len(logs))


def _ranked(rows: Sequence[Row], point: _Point, min_gain: float) -> list[str]:
    """Plans that look better than the analytic one, best first."""
    if len(_times(rows, ANALYTIC)) < len(point.cases):
        return []
    gains = {name: gain for name in point.plans if (gain := _gain(rows, name)) is not None}
    return sorted((name for name in gains if gains[name] >= 1.0 + min_gain), key=lambda name: -gains[name])


def _better(rows: Sequence[Row], name: str, min_gain: float) -> bool:
    """Mean gain reached, faster beyond noise somewhere, slower beyond noise nowhere."""
    gain = _gain(rows, name)
    if gain is None or gain < 1.0 + min_gain:
        return False
    base, mine = _times(rows, ANALYTIC), _times(rows, name)
    faster = [_below(mine[case], base[case]) for case in base]
    return any(faster) and not any(_below(base[case], mine[case]) for case in base)


def _below(a: Row, b: Row) -> bool:
    """The range of a lies below that of b."""
    return a.time_p80_us is not None and b.time_p20_us is not None and a.time_p80_us < b.time_p20_us


def _finding(
    point: _Point, first: Sequence[Row], second: Sequence[Row], finalists: Sequence[str], min_gain: float
) -> Finding:
    base = _times(second, ANALYTIC)
    note = ""
    if len(_times(first, ANALYTIC)) < len(point.cases):
        note = next((row.note for row in first if row.provider == ANALYTIC and not row.time_us), "no time")
        note = f"the analytic plan has no time: {note}"
    good = [name for name in finalists if _better(second, name, min_gain)]
    best = max(good, key=lambda name: _gain(second, name) or 0.0, default=None)
    mine = _times(second, best) if best is not None else base
    times = {case: (cast(float, base[case].time_us), cast(float, mine[case].time_us)) for case in base}
    failed = {row.provider: row.note for row in first if row.provider != ANALYTIC and not row.time_us}
    return Finding(
        axes=point.axes,
        size=point.size,
        cases=tuple(case.name for case in point.cases),
        analytic=point.analytic,
        best=point.plans[best] if best is not None else None,
        gain=(_gain(second, best) or 1.0) if best is not None else 1.0,
        times_us=times,
        tried=len(point.plans) - len(failed),
        failed=failed,
        note=note,
    )
