"""`hpc check`: every named case of the operators against the float64 reference."""

from __future__ import annotations

from dataclasses import asdict
from fnmatch import fnmatch
from typing import Annotated, Any

import typer

from hpc.cli import terminal


def run(
    op: terminal.OperatorName = None,
    case: Annotated[str, typer.Option("--case", metavar="GLOB", help="Only cases whose name matches.")] = "*",
    tag: Annotated[
        str | None, typer.Option("--tag", help="Which cases [default: gpu with a GPU, interpret without].")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random inputs.")] = 0,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of the table.")
    ] = False,
) -> None:
    """Run the operators on fresh random inputs and compare with float64: relative RMS and largest error.

    Exit code 1 if a case is beyond its tolerance or raises. Without a GPU the public functions run the
    reference, so this checks their arguments and plumbing, not the kernels: `hpc demo` and the tests run
    those interpreted.
    """
    import torch

    from hpc.bench.check import check
    from hpc.common import arch, operator, registry

    gpu = arch.gpu_available()
    tag = tag or ("gpu" if gpu else "interpret")
    if tag not in operator.TAGS:
        raise typer.BadParameter(f"'{tag}' is none of {', '.join(sorted(operator.TAGS))}", param_hint="--tag")
    jobs = {}
    for name in terminal.operator_names(op):
        chosen = registry.get(name)
        jobs[name] = (chosen, [item for item in chosen.cases(tag) if fnmatch(item.name, case)])
    total = sum(len(cases) for _, cases in jobs.values())
    if not total:
        terminal.usage_error(f"no case with tag '{tag}' matches '{case}'")
    device = torch.device("cuda" if gpu else "cpu")
    rows: list[Any] = []
    with terminal.progress_bar() as bar:
        task = bar.add_task("first case", total=total)

        def show(row: Any, done: int, of: int) -> None:
            bar.update(task, description=f"{row.op} {row.case}", advance=1)

        for chosen, cases in jobs.values():
            rows += check(chosen, device, show, cases=cases, seed=seed)
    _report(rows, arch.device_name(device), json_)
    if not all(row.passed for row in rows):
        raise typer.Exit(terminal.FAILED)


def _report(rows: list[Any], device: str, json_: bool) -> None:
    failed = sum(not row.passed for row in rows)
    if json_:
        cases = [asdict(row) for row in rows]
        terminal.write_json({"device": device, "cases": cases, "num_cases": len(rows), "num_failed": failed})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "operator", "case"):
        table.add_column(title, overflow="fold")
    for title in ("rms", "limit", "max", "limit", "s"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        verdict = "[green]ok[/]" if row.passed else "[bold red]FAIL[/]"
        numbers = (row.rms_rel, row.tolerance.rms, row.max_rel, row.tolerance.max)
        shown = ["-" if number is None else f"{number:.2e}" for number in numbers]
        table.add_row(verdict, row.op, terminal.escape(row.case), *shown, f"{row.seconds:.1f}")
    console = terminal.results()
    console.print(table, highlight=False)
    for row in rows:
        if not row.passed:
            console.print(
                f"[bold red]FAIL[/] {terminal.escape(row.case)}: {terminal.escape(row.note)}", highlight=False
            )
    where = device if device != "cpu" else "CPU: the public functions ran the reference, not the kernels"
    console.print(f"{len(rows) - failed} of {len(rows)} cases passed ({where})", highlight=False)
