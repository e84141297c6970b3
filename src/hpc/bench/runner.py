"""Run cases of one operator with several providers: check first, then time all of them interleaved."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from hpc.bench.providers import CannotRun, Provider
from hpc.bench.results import Env, Row, Writer, current_env
from hpc.bench.roofline import Rates, floor_us, rates
from hpc.bench.timer import Call, Clock, Timing, make_clock, num_input_sets, time_interleaved
from hpc.common import arch
from hpc.common.operator import Case, Floor, Operator, Tolerance
from hpc.testing.accuracy import Accuracy, measure
from hpc.testing.buffers import fill_nan

Stage = Literal["inputs", "check", "time", "row"]


@dataclass(frozen=True)
class Event:
    """Progress of a run: what is being done, for which case (``index`` of ``total``) and provider."""

    stage: Stage
    case: str
    index: int
    total: int
    provider: str = ""
    row: Row | None = None


@dataclass
class _Entry:
    """One provider on one case, while the case runs."""

    provider: Provider
    calls: list[Call]
    accuracy: Accuracy | None = None
    note: str = ""


def run(
    op: Operator,
    cases: Sequence[Case],
    providers: Sequence[str] | None = None,
    device: torch.device | str = "cuda",
    json_path: str | Path | None = None,
    progress: Callable[[Event], None] | None = None,
    *,
    budget_ms: float = 80.0,
    seed: int = 0,
    chained: bool = False,
    environment: Env | None = None,
    clock: Clock | None = None,
) -> list[Row]:
    """Check and time every provider on every case.

    Args:
        op: an operator; see ``hpc.common.operator``. Two optional methods are used when present:
            ``rotate(inputs, seed)``, a further input set that shares what stays in cache between calls of a
            model (lengths, page table, task map) and has fresh big tensors; and ``chain(inputs)``, a call
            that stands for the kernel before the operator.
        cases: what to run, in order.
        providers: names from ``op.providers()``; None for all that are available here.
        device: where to run; a GPU is timed by graph replay, another device by the host's clock.
        json_path: result file to append to; None writes nothing.
        progress: called with an :class:`Event` at each step.
        budget_ms: device time per provider and case, capture aside.
        seed: of the first input set.
        chained: time what the operator adds behind ``op.chain(inputs)`` instead of the call alone.
        environment: the ``env`` line; described afresh when None.
        clock: only for tests.

    Returns:
        One row per case and provider. A provider that cannot run, or whose result is off by more than the
        tolerance, has no time and says why in ``note``; it never stops the run.

    Raises:
        ValueError: a provider name that the operator does not have.
    """
    device = torch.device(device)
    chosen = select(op, providers)
    environment = environment or current_env(device)
    clock = clock or make_clock(device)
    bench = _Bench(op, chosen, device, clock, rates(device), budget_ms, seed, chained, environment.run_id)
    rows: list[Row] = []
    writer = Writer(json_path, environment) if json_path is not None else None
    try:
        for index, case in enumerate(cases):
            tell = _teller(progress, case.name, index, len(cases))
            for row in bench.case(case, tell):
                rows.append(row)
                if writer is not None:
                    writer.write(row)
                tell("row", row.provider, row)
            _release(device)
    finally:
        if writer is not None:
            writer.close()
    return rows


class Tell(Protocol):
    """Reports a stage of the case at hand."""

    def __call__(self, stage: Stage, provider: str = "", row: Row | None = None) -> None: ...


def _teller(progress: Callable[[Event], None] | None, case: str, index: int, total: int) -> Tell:
    def tell(stage: Stage, provider: str = "", row: Row | None = None) -> None:
        if progress is not None:
            progress(Event(stage, case, index, total, provider, row))

    return tell


def select(op: Operator, names: Sequence[str] | None) -> list[Provider]:
    """Providers by name, in the operator's order; None means those available on this machine."""
    known = op.providers()
    if names is None:
        return [provider for provider in known.values() if provider.available() is None]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{op.name} has no provider {', '.join(unknown)}; it has {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def _release(device: torch.device) -> None:
    """Give gigabytes of inputs and graph pools back before the next case."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _reason(error: BaseException) -> str:
    """First line of an exception, short enough for a table."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    if isinstance(error, CannotRun):
        return first
    return f"{type(error).__name__}: {first}"[:300]


@dataclass
class _Bench:
    """What stays the same over the cases of a run."""

    op: Operator
    providers: list[Provider]
    device: torch.device
    clock: Clock
    rates: Rates | None
    budget_ms: float
    seed: int
    chained: bool
    run_id: str

    def case(self, case: Case, tell: Tell) -> list[Row]:
        """All rows of one case."""
        entries = [_Entry(provider, []) for provider in self.providers]
        floor = self.op.floor(case)
        timings: dict[str, Timing] = {}
        tell("inputs")
        try:
            sets = self._input_sets(case, floor)
            reference = self.op.reference(sets[0])
        except Exception as error:
            for entry in entries:
                entry.note = f"inputs or reference failed: {_reason(error)}"
        else:
            for entry in entries:
                tell("check", entry.provider.name)
                self._check(entry, sets, reference, self.op.tolerance(case))
            del reference
            tell("time")
            timings = self._time(entries, sets)
        return [self._row(case, floor, entry, timings.get(entry.provider.name)) for entry in entries]

    def _input_sets(self, case: Case, floor: Floor) -> list[Any]:
        first = self.op.make_inputs(case, self.device, self.seed)
        count = 1
        if arch.is_cuda(self.device):
            l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
            count = num_input_sets(floor.bytes, l2_bytes)
        rotate = getattr(self.op, "rotate", None)
        if rotate is None:
            return [first, *(self.op.make_inputs(case, self.device, self.seed + i) for i in range(1, count))]
        return [first, *(rotate(first, self.seed + i) for i in range(1, count))]

    def _check(self, entry: _Entry, sets: Sequence[Any], reference: torch.Tensor, default: Tolerance) -> None:
        """Eager and replayed result of the first input set; when both are right, the other sets' calls."""
        reason = entry.provider.available()
        if reason is not None:
            entry.note = reason
            return
        try:
            tolerance = entry.provider.limits(sets[0], default)
            call = entry.provider.prepare(sets[0])
            entry.accuracy = measure(call().reshape(reference.shape), reference)
            if entry.accuracy.within(tolerance):
                entry.accuracy = self._replayed(call, reference)
            if not entry.accuracy.within(tolerance):
                limits = f"limits rms {tolerance.rms:.1e}, max {tolerance.max:.1e}"
                entry.note = f"wrong: {entry.accuracy} ({limits})"
                return
            entry.calls = [call, *(entry.provider.prepare(inputs) for inputs in sets[1:])]
            entry.note = entry.provider.note
        except Exception as error:
            entry.note = _reason(error)
            entry.calls = []

    def _replayed(self, call: Call, reference: torch.Tensor) -> Accuracy:
        """Accuracy of the result as a replayed graph computes it, the last replay over a poisoned output."""
        results: list[torch.Tensor] = []
        graph = self.clock.capture([lambda: results.append(call())])
        self.clock.replay(graph)
        self.clock.synchronize()
        fill_nan(results[-1])
        self.clock.synchronize()
        self.clock.replay(graph)
        self.clock.synchronize()
        return measure(results[-1].reshape(reference.shape), reference)

    def _time(self, entries: Sequence[_Entry], sets: Sequence[Any]) -> dict[str, Timing]:
        ready = {entry.provider.name: entry for entry in entries if entry.calls}
        if not ready:
            return {}

        def failed(name: str, error: Exception) -> None:
            ready[name].note = f"timing failed: {_reason(error)}"

        make_chain = getattr(self.op, "chain", None) if self.chained else None
        return time_interleaved(
            {name: entry.calls for name, entry in ready.items()},
            self.clock,
            budget_ms=self.budget_ms,
            chain=[make_chain(inputs) for inputs in sets] if make_chain is not None else None,
            on_error=failed,
        )

    def _row(self, case: Case, floor: Floor, entry: _Entry, timing: Timing | None) -> Row:
        bound, kind = floor_us(floor, self.rates)
        accuracy = entry.accuracy
        return Row(
            op=self.op.name,
            case=case.name,
            provider=entry.provider.name,
            time_us=timing.median_us if timing else None,
            time_p20_us=timing.p20_us if timing else None,
            time_p80_us=timing.p80_us if timing else None,
            floor_us=bound,
            floor_kind=kind,
            rms_rel=accuracy.rms_rel if accuracy else None,
            max_rel=accuracy.max_rel if accuracy else None,
            run_id=self.run_id,
            note=entry.note,
        )
