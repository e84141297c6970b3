"""The runner: wrong results get no time, missing rivals a reason, and files hold what was returned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_fakes import FakeClock, SquareOperator

from hpc.bench import CannotRun, Event, Provider, check, read, run
from hpc.common.operator import Tolerance


def _good(name: str = "hpc") -> Provider:
    return Provider(name, lambda x: lambda: x * x)


def _refuses(inputs: torch.Tensor) -> None:
    if inputs.numel() > 8:
        raise CannotRun("at most 8 elements")


def _partial(inputs: torch.Tensor):  # type: ignore[no-untyped-def]
    _refuses(inputs)
    return lambda: inputs * inputs


def _explodes(inputs: torch.Tensor):  # type: ignore[no-untyped-def]
    raise RuntimeError("illegal instruction\nlong trace")


def _stale(inputs: torch.Tensor):  # type: ignore[no-untyped-def]
    """Right when called eagerly, but its output is made once and never written again."""
    result = inputs * inputs
    return lambda: result


PROVIDERS = [
    _good(),
    _good("hpc/other"),
    Provider("off", lambda x: lambda: x * x * 1.01),
    Provider(
        "rounded", lambda x: lambda: (x * x).bfloat16(), tolerance=Tolerance(0.01, 0.01), note="in bf16"
    ),
    Provider("partial", _partial),
    Provider("explodes", _explodes),
    Provider("stale", _stale),
    Provider("absent", lambda x: lambda: x, available=lambda: "not installed: pip install absent"),
]


@pytest.fixture
def op() -> SquareOperator:
    return SquareOperator(PROVIDERS)


def test_each_provider_gets_a_time_or_a_reason(op: SquareOperator) -> None:
    names = [provider.name for provider in PROVIDERS]
    rows = run(op, op.cases("bench"), names, "cpu", budget_ms=2)
    assert [(row.case, row.provider) for row in rows] == [(c, n) for c in ("small", "large") for n in names]
    by_key = {(row.case, row.provider): row for row in rows}
    for case in ("small", "large"):
        timed = {name for name in names if by_key[case, name].time_us is not None}
        assert timed == {"hpc", "hpc/other", "rounded"} | ({"partial"} if case == "small" else set())
        assert "wrong" in by_key[case, "off"].note and by_key[case, "off"].rms_rel == pytest.approx(
            0.01, rel=1e-3
        )
        assert by_key[case, "rounded"].note == "in bf16"
        assert by_key[case, "explodes"].note == "RuntimeError: illegal instruction"
        assert "wrong" in by_key[case, "stale"].note
        assert by_key[case, "absent"].note == "not installed: pip install absent"
    assert by_key["large", "partial"].note == "at most 8 elements"
    assert all(row.floor_us is None for row in rows), "a CPU has no floor"


def test_default_providers_are_those_available(op: SquareOperator) -> None:
    rows = run(op, op.cases("bench")[:1], None, "cpu", budget_ms=1)
    assert "absent" not in {row.provider for row in rows} and len(rows) == len(PROVIDERS) - 1


def test_unknown_provider_is_named(op: SquareOperator) -> None:
    with pytest.raises(ValueError, match="no provider nobody; it has hpc, hpc/other"):
        run(op, op.cases("bench"), ["nobody"], "cpu")


def test_broken_inputs_become_rows(op: SquareOperator) -> None:
    op.reference = lambda inputs: (_ for _ in ()).throw(MemoryError("no room"))  # type: ignore[method-assign]
    rows = run(op, op.cases("bench")[:1], ["hpc"], "cpu")
    assert rows[0].time_us is None and rows[0].note == "inputs or reference failed: MemoryError: no room"


def test_progress_tells_every_step(op: SquareOperator) -> None:
    events: list[Event] = []
    rows = run(op, op.cases("bench"), ["hpc"], "cpu", progress=events.append, budget_ms=1)
    assert [event.stage for event in events] == ["inputs", "check", "time", "row"] * 2
    assert [event.row for event in events if event.stage == "row"] == rows
    assert [(event.index, event.total) for event in events[::4]] == [(0, 2), (1, 2)]


def test_result_file_holds_an_env_line_and_the_rows(op: SquareOperator, tmp_path: Path) -> None:
    path = tmp_path / "cpu" / "toy.jsonl"
    rows = run(op, op.cases("bench"), ["hpc", "off"], "cpu", json_path=path, budget_ms=1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(lines[0]) == ["env"] and len(lines) == 5
    times = ["time_us", "time_p20_us", "time_p80_us", "floor_us", "floor_kind"]
    assert list(lines[1]) == ["op", "case", "provider", *times, "rms_rel", "max_rel", "run_id"]
    environments, stored = read(path)
    assert environments[0].gpu == "cpu" and environments[0].run_id == rows[0].run_id == stored[0].run_id
    for kept, row in zip(stored, rows, strict=True):
        assert (kept.case, kept.provider, kept.note) == (row.case, row.provider, row.note)
        assert kept.time_us == (None if row.time_us is None else pytest.approx(row.time_us, rel=1e-4))


def test_rotated_inputs_come_from_the_operator(op: SquareOperator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache to exceed, further sets are made by ``rotate`` if there is one, else drawn afresh."""
    from types import SimpleNamespace

    from hpc.bench import runner

    monkeypatch.setattr(runner.arch, "is_cuda", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=64))
    bench = runner._Bench(op, [], torch.device("cpu"), FakeClock(), None, 1.0, 5, False, "run")
    case = op.cases("bench")[0]  # 32 bytes a set, 160 to exceed
    assert len(bench._input_sets(case, op.floor(case))) == 5 and op.seeds == [5, 6, 7, 8, 9]
    op.rotate = lambda inputs, seed: ("shared", seed)  # type: ignore[attr-defined]
    assert bench._input_sets(case, op.floor(case))[1:] == [("shared", seed) for seed in (6, 7, 8, 9)]


def test_check_reports_failures_and_exceptions(op: SquareOperator) -> None:
    seen: list[tuple[str, int, int]] = []
    rows = check(op, "cpu", lambda row, done, total: seen.append((row.case, done, total)))
    assert all(row.passed and row.note == "" for row in rows) and seen == [("small", 1, 2), ("large", 2, 2)]
    op.call = lambda inputs: inputs * inputs + 1e-3  # type: ignore[method-assign]
    assert not any(row.passed for row in check(op, "cpu"))
    op.call = lambda inputs: inputs.reshape(3, 5, 7)  # type: ignore[method-assign]
    assert all("RuntimeError" in row.note and row.rms_rel is None for row in check(op, "cpu"))
