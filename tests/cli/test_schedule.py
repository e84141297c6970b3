"""`hpc schedule`: what it draws is the whole of the work, once."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from hpc.attention.decode import plan
from hpc.attention.decode.timeline import Machine, dynamic_timeline, static_timeline
from hpc.cli import app, distribution

runner = CliRunner()
DISTRIBUTIONS = ["1x128K+31x4K", "1x16K+15x64", "64x0.5K", "3x0+1x1+2x65", "1x4K"]


def segments(schedule: dict) -> list[tuple[int, int, int]]:
    return sorted((s["request"], s["t0"], s["t1"]) for row in schedule["rows"] for s in row)


def assert_covers_once(schedule: dict, lens: list[int], window: int | None = None) -> None:
    expected = [plan.tile_range(length, 1, window) for length in lens]
    found: dict[int, list[tuple[int, int]]] = {}
    for request, t0, t1 in segments(schedule):
        found.setdefault(request, []).append((t0, t1))
    assert sorted(found) == list(range(len(lens)))
    for request, (low, high) in enumerate(expected):
        pieces = found[request]
        assert pieces[0][0] == low
        assert pieces[-1][1] == high
        assert all(left[1] == right[0] for left, right in pairwise(pieces))


@pytest.mark.parametrize("kv", DISTRIBUTIONS)
@pytest.mark.parametrize("heads", ["8/1", "64/8"])
@pytest.mark.parametrize("ctas", ["1", "2"])
def test_json_covers_every_tile_once(kv: str, heads: str, ctas: str) -> None:
    result = runner.invoke(app, ["schedule", "--kv", kv, "--heads", heads, "--ctas-per-sm", ctas, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    lens = distribution.parse(kv)
    assert report["kv_lens"] == lens
    for kind in ("dynamic", "static"):
        assert_covers_once(report[kind], lens)
        assert report[kind]["tail_us"] == max(s["end_us"] for row in report[kind]["rows"] for s in row)
        starts = [[s["start_us"] for s in row] for row in report[kind]["rows"]]
        assert all(row == sorted(row) for row in starts)


def test_json_covers_a_window() -> None:
    result = runner.invoke(app, ["schedule", "--kv", "2x16K+3x100", "--window", "1000", "--json"])
    report = json.loads(result.stdout)
    assert_covers_once(report["dynamic"], report["kv_lens"], window=1000)
    assert_covers_once(report["static"], report["kv_lens"], window=1000)


def test_dynamic_beats_static_where_one_request_is_long() -> None:
    lens = distribution.parse("1x128K+31x4K")
    dynamic, static = dynamic_timeline(lens, Machine()), static_timeline(lens, Machine())
    assert dynamic.balance < 1.1
    assert static.tail_us > 2 * dynamic.tail_us
    assert dynamic.tiles == static.tiles == 131072 // 64 + 31 * 64


def test_picture_names_tail_and_shows_every_bin() -> None:
    result = runner.invoke(
        app,
        ["schedule", "--kv", "1x64K+15x4K", "--heads", "64/8", "--static", "--ctas-per-sm", "1"],
        env={"COLUMNS": "120"},
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum("█" in line and " us " in line for line in lines) == 32  # 16 bins and 16 slots
    assert any(line.startswith("dynamic: tail ") for line in lines)
    assert any(line.startswith("static: tail ") for line in lines)


def test_many_bins_are_grouped_by_the_slowest() -> None:
    result = runner.invoke(app, ["schedule", "--kv", "64x4K", "--rows", "10"], env={"COLUMNS": "100"})
    lines = [line for line in result.stdout.splitlines() if "█" in line and " us " in line]
    assert len(lines) == 10
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_trace_and_png(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    trace, png = tmp_path / "t.csv", tmp_path / "out.png"
    trace.write_text(
        "ContextTokens,GeneratedTokens\n" + "\n".join(f"{n},{n // 2}" for n in range(1, 5000, 37))
    )
    result = runner.invoke(
        app, ["schedule", "--trace", str(trace), "--requests", "24", "--png", str(png), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["kv_lens"]) == 24
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "--kv or --trace"),
        (["--kv", "4K", "--trace", "x"], "--kv or --trace"),
        (["--kv", "4Q"], "4Q"),
        (["--kv", "4K", "--heads", "8"], "--heads"),
        (["--kv", "4K", "--heads", "8/3"], "multiple"),
        (["--kv", "4K", "--dtype", "int8"], "--dtype"),
        (["--kv", "4K", "--ctas-per-sm", "3"], "--ctas-per-sm"),
        (["--kv", "4K", "--sms", "0"], "--sms"),
        (["--trace", "/does/not/exist"], "/does/not/exist"),
        (["--kv", "4K", "--png", "/does/not/exist/a.png"], "/does/not/exist/a.png"),
    ],
)
def test_bad_requests_are_named_without_traceback(arguments: list[str], fault: str) -> None:
    result = runner.invoke(app, ["schedule", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert fault in result.output
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
