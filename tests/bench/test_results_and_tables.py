"""Result files, floors and tables."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hpc.bench import Env, Rates, Row, Writer, floor_us, latest, rates, read, result_path
from hpc.bench.providers import BOUND
from hpc.bench.results import current_env, git_state, gpu_slug, stamp_commit
from hpc.bench.table import notes, summarise, to_markdown, to_rich
from hpc.common.operator import Floor

ENV = Env("NVIDIA H200", "580.1", "2.11.0", "3.6.0", "0.1.0", "abc", False, "2026-01-02T03:04:05Z", "run1")
ROW = Row("attention.decode", "fp8 8/1 64x4K", "hpc", 18.25, 18.0, 18.5, 15.29, "read", 0.0017, 0.004, "run1")


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.jsonl"
    failed = replace(
        ROW, provider="fa3", time_us=None, time_p20_us=None, time_p80_us=None, note="needs a Hopper GPU"
    )
    with Writer(path, ENV) as writer:
        writer.write(ROW)
        assert len(path.read_text().splitlines()) == 2, "a row is on disk once written"
        writer.write(failed)
    with Writer(path, replace(ENV, run_id="run2")) as writer:
        writer.write(replace(ROW, time_us=17.0, run_id="run2"))
    environments, rows = read(path)
    assert [environment.run_id for environment in environments] == ["run1", "run2"]
    assert rows == [ROW, failed, replace(ROW, time_us=17.0, run_id="run2")]
    assert [row.time_us for row in latest(rows)] == [17.0, None]


def test_infinite_errors_are_stored_as_null(tmp_path: Path) -> None:
    with Writer(tmp_path / "x.jsonl", ENV) as writer:
        writer.write(replace(ROW, rms_rel=math.inf, max_rel=math.nan))
    text = (tmp_path / "x.jsonl").read_text()
    assert "Infinity" not in text and "NaN" not in text
    assert read(tmp_path / "x.jsonl")[1][0].rms_rel is None


def test_commit_is_filled_in_only_where_unknown(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for environment in (ENV, replace(ENV, commit="", run_id="run2")):
        with Writer(path, environment) as writer:
            writer.write(replace(ROW, run_id=environment.run_id))
    before = read(path)[1]
    assert stamp_commit(path, "def", dirty=True) == 1
    environments, rows = read(path)
    assert [(e.commit, e.dirty) for e in environments] == [("abc", False), ("def", True)] and rows == before


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"env": {}}\n\n{"op": \n')
    with pytest.raises(ValueError, match="line 3"):
        read(path)


def test_paths_and_env(tmp_path: Path) -> None:
    assert gpu_slug("NVIDIA H200") == "H200"
    assert gpu_slug("NVIDIA H100 80GB HBM3") == "H100-80GB-HBM3"
    assert result_path("attention.decode", "cpu", tmp_path) == tmp_path / "cpu" / "attention.decode.jsonl"
    environment = current_env("cpu")
    assert (
        environment.gpu == "cpu" and environment.hpc and environment.run_id.startswith(environment.date[:10])
    )
    assert git_state(tmp_path) == ("", False)


def test_floor_is_the_larger_of_reading_and_arithmetic() -> None:
    known = Rates(read=4e12, bf16=800e12, fp8=1600e12, source="table")
    assert floor_us(Floor(4 * 10**6, 8e6, "bf16"), known) == (pytest.approx(1.0), "read")
    assert floor_us(Floor(4 * 10**6, 8e9, "bf16"), known) == (pytest.approx(10.0), "bf16")
    assert floor_us(Floor(4 * 10**6, 8e9, "fp8"), known) == (pytest.approx(5.0), "fp8")
    assert floor_us(Floor(1, 1, "bf16"), None) == (None, "read")
    assert rates("cpu") is None


def _rows() -> list[Row]:
    def row(case: str, provider: str, time: float | None, note: str = "") -> Row:
        return replace(ROW, case=case, provider=provider, time_us=time, note=note)

    return [
        row("A", "fa3", 30.0),
        row("A", "hpc/static", 25.0),
        row("A", "hpc", 20.0),
        row("A", "flashinfer", 40.0),
        row("B", "fa3", 15.0),
        row("B", "hpc", 20.0),
        row("B", "flashinfer", None, "needs nvcc"),
        row("C", "hpc", None, "wrong: rms 1"),
        row("C", "flashinfer", None, "needs nvcc"),
    ]


def test_summary_compares_with_the_best_rival() -> None:
    a, b, c = summarise(_rows())
    assert (a.own, a.rival, a.speedup) == ("hpc", "fa3", pytest.approx(1.5))
    assert a.fraction_of_floor == pytest.approx(15.29 / 20.0)
    assert (b.rival, b.speedup) == ("fa3", pytest.approx(0.75))
    assert (c.own, c.rival, c.speedup, c.fraction_of_floor) == (None, None, None, None)
    assert c.rms_rel == ROW.rms_rel, "a wrong path still shows its error"


def test_markdown_table() -> None:
    lines = to_markdown(_rows()).splitlines()
    assert lines[0] == (
        "| case | floor | hpc | hpc/static | fa3 | flashinfer | best rival / hpc | of floor | rms error |"
    )
    assert lines[2] == "| A | 15.3 | 20.0 | 25.0 | 30.0 | 40.0 | 1.50x | 76 % | 1.7e-03 |"
    assert lines[3] == "| B | 15.3 | 20.0 | - | 15.0 | - | ▼ 0.75x | 76 % | 1.7e-03 |", "a lost row is marked"
    assert lines[4] == "| C | 15.3 | - | - | - | - | - | - | 1.7e-03 |"


def test_markdown_table_with_the_rivals_error() -> None:
    rows = [replace(row, rms_rel=2.5e-2) if row.provider == "fa3" else row for row in _rows()]
    lines = to_markdown(rows, rival_error=True).splitlines()
    assert lines[0].endswith("| rms error | of that rival |")
    assert lines[2].endswith("| 1.50x | 76 % | 1.7e-03 | 2.5e-02 |")
    assert lines[4].endswith("| - | - | 1.7e-03 | - |")


def test_notes_group_cases() -> None:
    assert notes(_rows()) == ["flashinfer (B, C): needs nvcc", "hpc (C): wrong: rms 1"]
    many = [replace(ROW, case=str(i), note="x") for i in range(5)]
    assert notes(many) == ["hpc (0, 1, 2 and 2 more): x"]


def test_rich_table_renders() -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(to_rich(_rows(), "decode"))
    text = console.export_text()
    assert "1.50x" in text and "0.75x" in text and "flashinfer" in text


def test_a_bound_is_no_rival() -> None:
    """What does half of the work may be faster: it is shown, and nobody loses to it."""
    rival = replace(ROW, provider="rival", time_us=30.0)
    bound = replace(ROW, provider="half", time_us=5.0, note=BOUND + "half of the work")
    (line,) = summarise([ROW, rival, bound])
    assert line.rival == "rival" and line.times_us["half"] == 5.0 and not line.lost
