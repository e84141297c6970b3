"""Old against new: what stands out of the noise, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc.bench import Env, Row, Writer
from hpc.bench.compare import Comparison, compare, load, pool

ENV = Env("NVIDIA H200", "580", "2.11", "3.6", "0.1", "old", False, "2026-01-02T03:04:05Z", "a")
ROW = Row("attention.decode", "one", "hpc", 20.0, 19.9, 20.1, 15.0, "read", 1.7e-3, 3e-3, "a")


def row(provider: str = "hpc", time: float | None = 20.0, spread: float = 0.1, **more: object) -> Row:
    low, high = (None, None) if time is None else (time - spread, time + spread)
    return replace(ROW, provider=provider, time_us=time, time_p20_us=low, time_p80_us=high, **more)  # type: ignore[arg-type]


def judge(old: list[Row], new: list[Row], **options: object) -> Comparison:
    after = replace(ENV, commit="new", run_id="b")
    moved = [replace(entry, run_id="b") for entry in new]
    return compare(pool([ENV], old), pool([after], moved), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("time", "spread", "verdict"),
    [
        (20.0, 0.1, "same"),
        (20.5, 0.1, "same"),  # apart, but below the threshold
        (22.0, 2.5, "same"),  # 10 % slower, but the ranges meet
        (21.0, 0.1, "slower"),
        (18.0, 0.1, "faster"),
        (18.0, 2.5, "same"),
        (None, 0.0, "lost"),
    ],
)
def test_a_change_must_exceed_threshold_and_noise(time: float | None, spread: float, verdict: str) -> None:
    found = judge([row()], [row(time=time, spread=spread, note="wrong: rms 1" if time is None else "")])
    assert [change.verdict for change in found.changes] == [verdict]
    assert bool(found.regressions) is (verdict in ("slower", "lost"))
    if verdict == "lost":
        assert found.regressions[0].why == "wrong: rms 1"
    if verdict == "slower":
        assert found.regressions[0].why == "19.9..20.1 to 20.9..21.1 us"


def test_threshold_is_the_callers() -> None:
    assert judge([row()], [row(time=21.0)], threshold=0.1).regressions == ()
    assert judge([row()], [row(time=20.3)], threshold=0.01).regressions[0].verdict == "slower"


def test_a_larger_error_is_a_regression() -> None:
    assert judge([row()], [row(time=10.0, rms_rel=2.5e-2)]).regressions[0].verdict == "less exact"
    assert judge([row()], [row(rms_rel=1.8e-3)]).regressions == ()


def test_rivals_are_not_judged_but_tell_the_drift() -> None:
    found = judge([row(), row("fa3", 30.0)], [row(), row("fa3", 33.0)])
    assert [change.provider for change in found.changes] == ["hpc"]
    assert found.drift == pytest.approx(1.1)
    assert judge([row()], [row()]).drift is None


def test_repeats_of_one_commit_are_pooled() -> None:
    """A second run of the same commit that came out slower widens the range, so the difference is noise."""
    again = replace(ENV, run_id="a2")
    old = pool([ENV, again], [row(), replace(row(time=21.2), run_id="a2")])
    assert (old[0].repeats, old[0].p20_us, old[0].p80_us, old[0].time_us) == (2, 19.9, 21.3, 20.6)
    new = pool([replace(ENV, commit="new", run_id="b")], [replace(row(time=21.25), run_id="b")])
    assert compare(old, new).regressions == ()
    assert compare(pool([ENV], [row()]), new).regressions


@pytest.mark.parametrize(
    "changed", [{"commit": "other"}, {"dirty": True}, {"commit": ""}, {"gpu": "NVIDIA H100"}]
)
def test_only_repeats_are_pooled(changed: dict[str, object]) -> None:
    """Of another commit, of changed sources, of unknown sources: the last row alone counts."""
    last = replace(ENV, run_id="a2", **changed)  # type: ignore[arg-type]
    pools = pool([ENV, last], [row(), replace(row(time=30.0), run_id="a2")])
    assert pools[-1].repeats == 1 and pools[-1].time_us == 30.0
    assert len(pools) == (2 if "gpu" in changed else 1), "another GPU is another entry"


def test_rows_on_one_side_only_are_listed_and_harmless() -> None:
    found = judge([row(case="gone")], [row(case="new")])
    assert [change.verdict for change in found.changes] == ["new", "gone"]
    assert found.compared == 0 and found.regressions == ()
    assert (found.old_gpus, found.new_gpus) == (("NVIDIA H200",), ("NVIDIA H200",))


def test_load_takes_a_file_or_a_folder(tmp_path: Path) -> None:
    for name in ("H200/a.jsonl", "H200/b.jsonl"):
        with Writer(tmp_path / name, ENV) as writer:
            writer.write(row())
    assert len(load(tmp_path)[1]) == 2 and len(load(tmp_path / "H200" / "a.jsonl")[1]) == 1
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no result files"):
        load(tmp_path / "empty")
