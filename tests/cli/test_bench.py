"""`hpc bench` around the shared runner, with an operator made for the test, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hpc.bench import Provider
from hpc.cli import app
from hpc.common import operator, registry

runner = CliRunner()
ON_CPU = ["--device", "cpu", "--tag", "interpret", "--budget-ms", "1"]


class Square:
    """x -> x * x, with a path that is right and one that may be wrong."""

    name = "fake.square"
    functions = ()
    error = 0.0

    def cases(self, tag):
        return (
            [operator.Case(f"n {n}", frozenset({"interpret"}), n) for n in (16, 32)]
            if tag == "interpret"
            else []
        )

    def make_inputs(self, case, device, seed):
        return torch.arange(1, case.params + 1, dtype=torch.float32, device=device)

    def reference(self, inputs):
        return inputs.double() ** 2

    def tolerance(self, case):
        return operator.Tolerance(1e-6, 1e-6)

    def floor(self, case):
        return operator.Floor(4 * case.params, 0.0, "bf16")

    def providers(self):
        own = Provider("hpc", lambda inputs: lambda: inputs * inputs + self.error)
        rival = Provider("rival", lambda inputs: lambda: inputs**2)
        absent = Provider(
            "absent", lambda inputs: lambda: inputs, available=lambda: "absent is not installed"
        )
        return {provider.name: provider for provider in (own, rival, absent)}


@pytest.fixture
def square(monkeypatch) -> Square:
    chosen = Square()
    monkeypatch.setattr(registry, "names", lambda: ["fake.square"])
    monkeypatch.setattr(registry, "get", lambda name: chosen)
    return chosen


def test_table_shows_every_case_and_provider(square) -> None:
    result = runner.invoke(app, ["bench", *ON_CPU], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for word in ("n 16", "n 32", "hpc", "rival", "fake.square on cpu"):
        assert word in result.stdout


def test_json_lines_on_standard_output(square) -> None:
    result = runner.invoke(app, ["bench", "square", "--json", "-", *ON_CPU])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert "env" in lines[0]
    assert {(line["case"], line["provider"]) for line in lines[1:]} == {
        (case, provider) for case in ("n 16", "n 32") for provider in ("hpc", "rival")
    }
    assert all(line["time_us"] > 0 and line["rms_rel"] < 1e-6 for line in lines[1:])


def test_json_file_and_choice_of_cases_and_providers(square, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    result = runner.invoke(
        app, ["bench", "--json", str(path), "--case", "n 3*", "--providers", "hpc", *ON_CPU]
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert [(row["case"], row["provider"]) for row in rows] == [("n 32", "hpc")]


def test_repeats_are_rows_of_one_run(square, tmp_path) -> None:
    """The whole list again and again, so that the repeats of a case lie apart in time."""
    from hpc.bench import compare

    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--json", str(path), "--providers", "hpc", "--repeats", "3", *ON_CPU]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    environments, rows = compare.load(path)
    assert len(environments) == 1 and [row.case for row in rows] == ["n 16", "n 32"] * 3
    assert [entry.repeats for entry in compare.pool(environments, rows)] == [3, 3]


def test_save_goes_to_the_results_folder(square, tmp_path) -> None:
    result = runner.invoke(app, ["bench", "--save", *ON_CPU], env={"HPC_RESULTS_DIR": str(tmp_path)})
    assert result.exit_code == 0, result.output
    assert (tmp_path / "cpu" / "fake.square.jsonl").is_file()


def test_a_wrong_own_result_gives_code_1(square) -> None:
    square.error = 1.0
    result = runner.invoke(app, ["bench", *ON_CPU], env={"COLUMNS": "160"})
    assert result.exit_code == 1
    assert "wrong" in result.output


def test_list_says_what_runs_here(square) -> None:
    result = runner.invoke(app, ["bench", "--list", "--tag", "interpret"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "absent (cannot run here: absent is not installed)" in result.stdout
    assert "n 16" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([*ON_CPU, "--providers", "nobody"], "nobody"),
        ([*ON_CPU, "--case", "zzz"], "zzz"),
        (["--tag", "zzz"], "zzz"),
        (["--tag", "interpret", "--device", "abacus"], "abacus"),
        ([*ON_CPU, "--save", "--json", "-"], "--save"),
        ([*ON_CPU, "--json", "/dev/null/rows.jsonl"], "/dev/null"),
    ],
)
def test_bad_requests_are_named_without_traceback(square, arguments: list[str], fault: str) -> None:
    result = runner.invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert fault in result.output
    assert "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_says_so(square) -> None:
    result = runner.invoke(app, ["bench", "--tag", "interpret"])
    assert result.exit_code == 2
    assert "no GPU here" in result.output


def write_run(folder: Path, commit: str, time_us: float, gpu: str = "NVIDIA H200") -> Path:
    from hpc.bench import Env, Row, Writer

    env = Env(gpu, "580", "2.11", "3.6", "0.1", commit, False, "2026-01-02T03:04:05Z", commit)
    row = Row(
        "fake.square", "[n] 16", "hpc", time_us, time_us - 0.1, time_us + 0.1, 1.0, "read", 1e-3, 2e-3, commit
    )
    with Writer(folder / f"{commit}.jsonl", env) as writer:
        writer.write(row)
    return folder / f"{commit}.jsonl"


@pytest.mark.parametrize(("time_us", "code"), [(20.0, 0), (20.5, 0), (22.0, 1), (15.0, 0)])
def test_compare_leaves_with_1_on_a_regression(tmp_path: Path, time_us: float, code: int) -> None:
    old, new = write_run(tmp_path, "aaa", 20.0), write_run(tmp_path, "bbb", time_us)
    result = runner.invoke(app, ["bench", "compare", str(old), str(new)], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    assert f"{code} of 1 compared rows got worse" in result.stdout
    assert ("slower  fake.square  [n] 16" in result.stdout) is bool(code)
    as_json = runner.invoke(app, ["bench", "compare", str(old), str(new), "--json"])
    assert as_json.exit_code == code
    assert json.loads(as_json.stdout)["num_regressions"] == code
    assert runner.invoke(app, ["bench", "compare", str(old), str(new), "--threshold", "0.2"]).exit_code == 0


def test_compare_refuses_what_cannot_be_compared(tmp_path: Path) -> None:
    old, new = write_run(tmp_path, "aaa", 20.0), write_run(tmp_path, "bbb", 20.0, "NVIDIA H100")
    result = runner.invoke(app, ["bench", "compare", str(old), str(new)], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "NVIDIA H200, new on NVIDIA H100" in result.output
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    for arguments in ([str(tmp_path / "none"), str(new)], [str(broken), str(new)]):
        result = runner.invoke(app, ["bench", "compare", *arguments])
        assert result.exit_code == 2 and "Traceback" not in result.output


def test_report_is_written_checked_and_printed(tmp_path: Path) -> None:
    write_run(tmp_path / "results", "aaa", 20.0)
    page = tmp_path / "out" / "report.md"
    arguments = ["bench", "report", str(tmp_path / "results"), "-o", str(page), "--no-plots"]
    assert runner.invoke(app, [*arguments, "--check"]).exit_code == 1, "there is no page yet"
    assert runner.invoke(app, arguments).exit_code == 0
    assert "fake.square" in page.read_text()
    assert runner.invoke(app, [*arguments, "--check"]).exit_code == 0
    page.write_text(page.read_text().replace("20.0", "10.0"))
    assert runner.invoke(app, [*arguments, "--check"]).exit_code == 1
    printed = runner.invoke(app, ["bench", "report", str(tmp_path / "results")])
    assert printed.exit_code == 0 and printed.stdout.startswith("# Measured")
    as_json = json.loads(runner.invoke(app, ["bench", "report", str(tmp_path / "results"), "--json"]).stdout)
    assert as_json[0]["op"] == "fake.square" and as_json[0]["cases"][0]["lost"] is False


def test_report_of_nothing_is_a_usage_error(tmp_path: Path) -> None:
    for arguments in ([str(tmp_path)], [str(tmp_path / "none.jsonl")], ["--check"]):
        result = runner.invoke(app, ["bench", "report", *arguments])
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
