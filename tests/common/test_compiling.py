"""Jobs in parallel processes: all are done, failures are told by name, and one is enough to raise where asked."""

from __future__ import annotations

import pytest

from hpc.common.compiling import compile_all, compile_or_raise


def test_failures_are_told_and_the_others_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_WARMUP_JOBS", "2")
    steps: list[tuple[str, int, int]] = []
    jobs = [("one", ("1",)), ("word", ("x",)), ("two", ("2",))]
    failed = compile_all(int, jobs, lambda *step: steps.append(step))  # type: ignore[arg-type]
    assert [(name, type(error)) for name, error in failed] == [("word", ValueError)]
    assert sorted(name for name, _, _ in steps) == ["one", "two", "word"]
    assert [(done, total) for _, done, total in steps] == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(ValueError, match="'x'"):
        compile_or_raise(int, jobs[:2])  # type: ignore[arg-type]


def test_no_jobs() -> None:
    assert compile_all(int, []) == []  # type: ignore[arg-type]
