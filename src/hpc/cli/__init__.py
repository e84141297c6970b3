"""The command line: `hpc env | demo | check | bench | schedule | warmup | tune`.

One command, one file. This module and the commands' heads import neither torch nor triton, so that help is
instant; the commands import what they need when they run.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hpc.cli import terminal
from hpc.cli.bench import run as run_bench
from hpc.cli.bench_compare import run as run_compare
from hpc.cli.bench_report import run as run_report
from hpc.cli.check import run as run_check
from hpc.cli.demo import run as run_demo
from hpc.cli.env import run as run_env
from hpc.cli.schedule import run as run_schedule
from hpc.cli.tune import run as run_tune
from hpc.cli.warmup import run as run_warmup

app = typer.Typer(
    name="hpc",
    cls=terminal.Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Operators for LLM inference on NVIDIA Hopper: look, try, check, measure.",
    epilog="Exit codes: 0 all right, 1 a check failed, 2 the request is wrong.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from hpc import __version__

        typer.echo(f"hpc {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    pass


bench = typer.Typer(cls=terminal.DefaultGroup, no_args_is_help=False)
bench.command("run", epilog="Also: hpc bench report, hpc bench compare.")(run_bench)
bench.command("report")(run_report)
bench.command("compare")(run_compare)

app.command("env")(run_env)
app.command("demo")(run_demo)
app.command("check")(run_check)
app.add_typer(
    bench, name="bench", help="Time the operators against rivals and the floor; report and compare results."
)
app.command("schedule")(run_schedule)
app.command("warmup")(run_warmup)
app.command("tune")(run_tune)


def main() -> None:
    """Entry point of the console script `hpc`."""
    app(prog_name="hpc")
