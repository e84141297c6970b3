"""`hpc env`: what this machine is and what runs on it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from hpc.cli import terminal


def run(json_: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False) -> None:
    """Show versions, GPUs, which kernels run here, and the environment variables that hpc reads.

    Exit code 1 if a version cannot work; a machine without a GPU is all right (the reference runs).
    """
    from hpc.common import env

    found = env.collect()
    if json_:
        terminal.write_json(_as_json(found))
    else:
        _print(found, env.VARIABLES)
    if env.version_problems(found.torch, found.triton):
        raise typer.Exit(terminal.FAILED)


def _print(found: Any, variables: dict[str, str]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    for label, value in found.rows():
        problem = label == "problem"
        table.add_row(
            f"[{'bold red' if problem else 'bold'}]{label}[/]",
            terminal.escape(f"{value}: {variables[label]}" if label in variables else value),
        )
    console = terminal.results()
    console.print(table, highlight=False)
    if not found.gpus:
        console.print(
            "\nNo GPU: the public functions run the float reference here; `hpc demo` runs the Triton "
            "kernels in Triton's interpreter. Compiled kernels and times need an NVIDIA GPU of capability "
            "8.0 or newer.",
            highlight=False,
        )


def _as_json(found: Any) -> dict[str, Any]:
    facts = asdict(found)
    facts["cache_dir"] = str(found.cache_dir)
    facts["problems"] = list(found.problems)
    return facts
