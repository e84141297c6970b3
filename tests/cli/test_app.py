"""The command line as a whole: help, speed of help, errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hpc.cli import app
from hpc.common import env, operator, registry
from hpc.common.errors import InvalidArgument

runner = CliRunner()
COMMANDS = ["env", "demo", "check", "bench", "schedule", "warmup", "tune"]
LEAVES = [
    ["env"],
    ["demo"],
    ["check"],
    ["bench"],
    ["bench", "report"],
    ["bench", "compare"],
    ["schedule"],
    ["warmup"],
    ["tune"],
]


def test_help_lists_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f" {command} " in result.output


def test_every_command_is_tested_here() -> None:
    from typer.main import get_command

    def leaves(command, path):
        children = getattr(command, "commands", {})
        return [leaf for name, child in children.items() for leaf in leaves(child, [*path, name])] or [path]

    found = {tuple(word for word in leaf if word != "run") for leaf in leaves(get_command(app), [])}
    assert found == {tuple(leaf) for leaf in LEAVES}


@pytest.mark.parametrize("command", LEAVES, ids=" ".join)
def test_help_of_every_command(command: list[str]) -> None:
    """Every command explains itself and can print JSON."""
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output
    assert len(result.output.splitlines()) > 8


def test_version() -> None:
    from hpc import __version__

    assert runner.invoke(app, ["--version"]).stdout.strip() == f"hpc {__version__}"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from hpc.cli import app;"
        "assert CliRunner().invoke(app, ['bench', '--help']).exit_code == 0;"
        "heavy = {'torch', 'triton', 'matplotlib', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("arguments", [["nonsense"], ["env", "--nonsense"], ["check", "attention.nonsense"]])
def test_unknown_words_are_usage_errors(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "nonsense" in result.output
    assert "Traceback" not in result.output


def test_env_json() -> None:
    result = runner.invoke(app, ["env", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["torch"] and facts["python"] and facts["runs"]
    assert len(facts["variables"]) <= 5
    assert all(name.startswith("HPC_") for name in facts["variables"])


def test_env_names_variables_and_exit_code_tells_unusable_versions(monkeypatch) -> None:
    shown = runner.invoke(app, ["env"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in env.VARIABLES)
    monkeypatch.setattr(env, "triton_version", lambda: "3.1.0")
    broken = runner.invoke(app, ["env"], env={"COLUMNS": "200"})
    assert broken.exit_code == 1
    assert "3.1.0" in broken.stdout


class FakeOperator:
    """An operator that adds `error` to the right answer, or raises."""

    name = "fake.op"
    functions = ()

    def __init__(self, error: float = 0.0, raises: Exception | None = None):
        self.error, self.raises = error, raises

    def cases(self, tag):
        return [operator.Case(f"case {n}", frozenset({"gpu", "interpret"}), n) for n in (1, 2)]

    def make_inputs(self, case, device, seed):
        import torch

        return torch.full((4, 4), float(case.params), device=device)

    def call(self, inputs):
        if self.raises:
            raise self.raises
        return inputs + self.error

    def reference(self, inputs):
        return inputs.double()

    def tolerance(self, case):
        return operator.Tolerance(1e-3, 1e-3)

    def warmup(self, device, progress):
        progress("one", 1, 2)
        progress("two", 2, 2)
        return 2


@pytest.fixture
def fake(monkeypatch):
    def install(**behaviour) -> None:
        chosen = FakeOperator(**behaviour)
        monkeypatch.setattr(registry, "names", lambda: ["fake.op"])
        monkeypatch.setattr(registry, "get", lambda name: chosen)

    return install


def test_check_passes(fake) -> None:
    fake()
    result = runner.invoke(app, ["check", "op", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["num_cases"] == 2 and report["num_failed"] == 0


def test_check_fails_with_code_1_on_a_wrong_result(fake) -> None:
    fake(error=0.5)
    result = runner.invoke(app, ["check"], env={"COLUMNS": "160"})
    assert result.exit_code == 1
    assert "FAIL  fake.op   case 1" in result.stdout and "FAIL  fake.op   case 2" in result.stdout
    assert "2.5 for 2" in result.stdout


def test_check_reports_a_case_that_raises_and_goes_on(fake) -> None:
    fake(raises=InvalidArgument("hpc.f: argument 'q': expected x; got y."))
    result = runner.invoke(app, ["check", "--json"])
    assert result.exit_code == 1
    cases = json.loads(result.stdout)["cases"]
    assert [case["passed"] for case in cases] == [False, False]
    assert "argument 'q'" in cases[0]["note"]


def test_check_without_a_matching_case_is_a_usage_error(fake) -> None:
    fake()
    assert runner.invoke(app, ["check", "--case", "zzz*"]).exit_code == 2
    assert runner.invoke(app, ["check", "--tag", "zzz"]).exit_code == 2


def test_warmup_for_a_named_target(fake) -> None:
    fake()
    result = runner.invoke(app, ["warmup", "--device", "sm90", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kernels"] == 2


def test_library_errors_are_one_line_and_code_2(monkeypatch) -> None:
    def broken(wanted):
        raise InvalidArgument("hpc.f: argument 'q': expected shape [64, 8]; got [1].")

    monkeypatch.setattr("hpc.cli.terminal.operator_names", broken)
    result = runner.invoke(app, ["check"])
    assert result.exit_code == 2
    assert "error: hpc.f: argument 'q': expected shape [64, 8]; got [1]." in result.output


def complete(line: str) -> str:
    """What zsh is told for a line that ends at the cursor."""
    environ = {**os.environ, "_HPC_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
    code = "from hpc.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    ).stdout


def test_the_shell_completes_commands_and_operators() -> None:
    assert '"check"' in complete("hpc ch")
    assert '"attention.decode"' in complete("hpc check att")
    both = complete("hpc bench ")
    assert '"compare"' in both and '"attention.decode"' in both


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import sys; from hpc.cli import terminal; assert terminal.complete_operator('attention.d');"
        "heavy = {'torch', 'triton', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
