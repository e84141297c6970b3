"""The report: order, summary, marks, links, and that the same files give the same page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpc.bench import Env, Row, Writer
from hpc.bench import report as report_module
from hpc.bench.report import collect, image_names, markdown, roofline_name
from hpc.common import registry
from hpc.common.operator import Case, Floor

ENV = Env("NVIDIA H200", "580", "2.11", "3.6", "0.1", "abcdef0123456", False, "2026-01-02T03:04:05Z", "a")
ROW = Row("toy.op", "one", "hpc", 20.0, 19.9, 20.1, 15.0, "read", 1.7e-3, 3e-3, "a")


class Toy:
    def cases(self, tag: str) -> list[Case]:
        names = {"target": ["two", "one"], "bench": ["two", "one", "three", "four"]}[tag]
        return [Case(name, frozenset({tag})) for name in names]

    def floor(self, case: Case) -> Floor:
        return Floor(bytes=10**7, flops=1e9, kind="bf16")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "names", lambda: ["toy.op", "toy.untimed"])
    monkeypatch.setattr(registry, "get", lambda name: Toy())
    rows = [
        replace(ROW, case=case, provider=provider, time_us=time, note=note)
        for case, provider, time, note in [
            ("one", "hpc", 99.0, ""),
            ("one", "hpc", 20.0, ""),
            ("one", "fa3", 30.0, "page size 128"),
            ("two", "hpc", 20.0, ""),
            ("two", "fa3", 10.0, "page size 128"),
            ("three", "hpc", 20.0, ""),
            ("three", "fa3", None, "cannot run it"),
            ("forgotten", "hpc", 20.0, ""),
        ]
    ]
    for gpu, run_id in (("NVIDIA H200", "a"), ("NVIDIA H100", "b")):
        path = tmp_path / gpu[-4:] / "toy.op.jsonl"
        with Writer(path, replace(ENV, gpu=gpu, run_id=run_id, dirty=run_id == "b")) as writer:
            for row in rows:
                writer.write(replace(row, run_id=run_id))
        with Writer(path.with_name("a.unknown.jsonl"), replace(ENV, gpu=gpu, run_id=run_id)) as writer:
            writer.write(replace(ROW, op="a.unknown", run_id=run_id))
    return tmp_path


def test_order_is_gpu_registry_target_bench_rest(results: Path) -> None:
    sections = collect(results)
    assert [(s.gpu, s.op) for s in sections] == [
        (gpu, op) for gpu in ("NVIDIA H100", "NVIDIA H200") for op in ("toy.op", "a.unknown")
    ]
    assert [line.case for line in sections[0].lines] == ["two", "one", "three", "forgotten"]
    assert [part.title for part in sections[0].parts] == [
        "Cases with a target", "Further cases", "Cases that the bench no longer has",
    ]  # fmt: skip


def test_page_holds_summary_marks_reasons_and_origin(results: Path) -> None:
    text = markdown(collect(results), "report", "benchmarks/results")
    assert (
        "| [toy.op](#h200-toy-op) | 4 | 1 | 1 | 2 | 1.00x (0.50 to 1.50) | 75 % | 1.7e-03 |" in text
    )  # summary
    assert '<a id="h200-toy-op"></a>' in text
    assert "No results yet: toy.untimed." in text
    assert "▼ Lost, 1 of 4: two (fa3, 0.50x)." in text
    assert "| two | 15.0 | 20.0 | 10.0 | ▼ 0.50x | 75 % | 1.7e-03 | 1.7e-03 |" in text
    assert "- fa3 (three): cannot run it." in text
    assert "Not measured, 1 of 4 cases: four." in text
    assert "commit abcdef0123, 2026-01-02" in text and "with uncommitted changes" in text
    assert "| 99.0 |" not in text, "the newest row counts"
    assert text == markdown(collect(results), "report", "benchmarks/results")


def test_every_linked_image_is_drawn(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hpc.bench import plots

    sections = collect(results)
    text = markdown(sections, "report")
    linked = set(re.findall(r"\(report/([^)]+\.png)\)", text))
    drawn = {path.name for path in plots.write(sections, tmp_path / "report")}
    assert linked == drawn == {path.name for path in (tmp_path / "report").iterdir()}
    assert "H200-toy.op-roofline.png" in drawn
    assert not any("H100" in name and "roofline" in name for name in drawn), "its rates are not known"
    before = (tmp_path / "report" / "H200-toy.op-1.png").read_bytes()
    plots.write(sections, tmp_path / "report")
    assert (tmp_path / "report" / "H200-toy.op-1.png").read_bytes() == before, "the same rows, the same bytes"


def test_long_lists_are_cut_into_several_images(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "MOST_BARS", 1)
    section = collect(results)[0]
    assert [[line.case for line in lines] for lines in image_names(section).values()] == [
        ["two"], ["one"], ["three"], ["forgotten"],
    ]  # fmt: skip
    assert roofline_name(section) is None


def test_without_images_nothing_is_linked(results: Path) -> None:
    assert "![" not in markdown(collect(results), None)
