"""`hpc tune`: measure plans on this machine and keep those that beat the analytic choice."""

from __future__ import annotations

from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from hpc.cli import terminal


def run(
    op: terminal.OperatorName = None,
    case: Annotated[str, typer.Option("--case", metavar="GLOB", help="Only cases whose name matches.")] = "*",
    min_gain: Annotated[
        float, typer.Option("--min-gain", min=0.0, help="Least mean gain that counts: 0.02 is 2 %.")
    ] = 0.02,
    budget_ms: Annotated[
        float,
        typer.Option(
            "--budget-ms", min=1.0, help="Device time per plan and case; finalists get four times it."
        ),
    ] = 20.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random inputs.")] = 0,
    device: Annotated[str | None, typer.Option("--device", help="Such as cuda:0 [default: the GPU].")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write tables to DIR/OP/ [default: the operator's configs].",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and show, write nothing.")] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List operators with plans and their cases, run nothing.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of the table.")
    ] = False,
) -> None:
    """Search the legal plans of an operator on this machine; keep what honestly beats the analytic choice.

    Every plan is checked against float64, then timed beside the analytic one. The best meet it again in a second
    round, and only that round counts: at least --min-gain faster on average over the cases that the plan would serve,
    and slower beyond noise in none of them. Where nothing qualifies nothing is written. A table is used only on the
    GPU it was measured on.

    Exit code 1 if an analytic plan fails.
    """
    from hpc.bench import tune
    from hpc.common import registry

    names = [name for name in terminal.operator_names(op) if tune.load(name) is not None]
    if not names:
        with_plans = ", ".join(tune.tunable()) or "none"
        terminal.usage_error(f"{op or 'hpc'} has no plans to search; those that have: {with_plans}")
    jobs: list[Any] = []
    for name in names:
        tuning = tune.load(name)
        assert tuning is not None
        jobs.append(
            (registry.get(name), tuning, [item for item in tuning.cases() if fnmatch(item.name, case)])
        )
    if not any(cases for _, _, cases in jobs):
        terminal.usage_error(f"no case matches '{case}'")
    if list_:
        _list(jobs)
        return
    reports = []
    for chosen, tuning, cases in jobs:
        findings = _search(chosen, tuning, cases, _device(device), budget_ms, min_gain, seed)
        folder = tuning.folder if output is None else output / chosen.name
        path = None if dry_run else _write(folder, findings, _device(device))
        reports.append((chosen.name, findings, path))
    if json_:
        terminal.write_json([_as_json(*report) for report in reports])
    else:
        for report in reports:
            _print(*report)
    if any(finding.note for _, findings, _ in reports for finding in findings):
        raise typer.Exit(terminal.FAILED)


def _device(wanted: str | None) -> Any:
    from hpc.cli.bench import _device

    return _device(wanted)


def _search(
    chosen: Any, tuning: Any, cases: list[Any], device: Any, budget_ms: float, min_gain: float, seed: int
) -> list[Any]:
    from hpc.bench import tune

    with terminal.progress_bar() as bar:
        task = bar.add_task(chosen.name, total=2 * len(cases))

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        return tune.search(
            chosen, tuning, cases, device, budget_ms=budget_ms, min_gain=min_gain, seed=seed, progress=show
        )


def _write(folder: Path, findings: list[Any], device: Any) -> Path | None:
    """The table's path after writing; None if there is nothing to keep."""
    from hpc.bench.results import current_env
    from hpc.common import arch, plan_table

    env = current_env(device)
    gpu, sms = arch.device_name(device), arch.sm_count(device)
    path = plan_table.path_of(folder, gpu)
    old = plan_table.parse(path.read_text(encoding="utf-8")) if path.is_file() else None
    origin = f"driver {env.driver}, torch {env.torch}, triton {env.triton}, hpc {env.hpc}, {env.date[:10]}"
    measured = [finding.entry() for finding in findings if not finding.note]
    table = plan_table.merged(old, gpu, sms, measured, origin)
    if table is None:
        path.unlink(missing_ok=True)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(plan_table.dump(table), encoding="utf-8")
    return path


def _list(jobs: list[Any]) -> None:
    console = terminal.results()
    for chosen, _, cases in jobs:
        console.print(chosen.name, style="bold", markup=False)
        for item in cases:
            console.print(f"  case  {item.name}", highlight=False, markup=False)


def _as_json(name: str, findings: list[Any], path: Path | None) -> dict[str, Any]:
    def one(finding: Any) -> dict[str, Any]:
        plans = {
            key: asdict(getattr(finding, key)) if getattr(finding, key) else None
            for key in ("analytic", "best")
        }
        times = {case: {"analytic_us": a, "best_us": b} for case, (a, b) in finding.times_us.items()}
        return {
            "axes": dict(finding.axes), "size": finding.size, **plans, "gain": finding.gain, "times": times,
            "tried": finding.tried, "failed": dict(finding.failed), "note": finding.note,
        }  # fmt: skip

    return {
        "op": name,
        "written": str(path) if path else None,
        "points": [one(finding) for finding in findings],
    }


def _print(name: str, findings: list[Any], path: Path | None) -> None:
    from rich.table import Table

    from hpc.bench.tune import difference

    table = Table(title=name, box=None, pad_edge=False)
    for title in ("size", "plans", "analytic us", "best us", "gain"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("better plan: what it changes", overflow="fold")
    table.add_column("cases", overflow="fold")
    for finding in findings:
        analytic, best = (sum(times[place] for times in finding.times_us.values()) for place in (0, 1))
        kept = finding.best is not None
        what = (
            difference(finding.best, finding.analytic)
            if kept
            else finding.note or "the analytic choice stays"
        )
        table.add_row(
            str(finding.size), str(finding.tried), f"{analytic:.4g}", f"{best:.4g}" if kept else "-",
            f"[green]{finding.gain:.2f}x[/]" if kept else "-", terminal.escape(what),
            terminal.escape(", ".join(finding.cases)),
        )  # fmt: skip
    console = terminal.results()
    console.print(table, highlight=False)
    console.print(f"wrote {path}" if path else "nothing to write", highlight=False, markup=False)
