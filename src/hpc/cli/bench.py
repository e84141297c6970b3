"""`hpc bench`: time the operators against rivals and the hardware's floor."""

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
    tag: Annotated[
        str, typer.Option("--tag", help="Which cases: bench (all), target (with a target), demo.")
    ] = "bench",
    providers: Annotated[
        str | None,
        typer.Option("--providers", metavar="A,B", help="Only these [default: all that run here]."),
    ] = None,
    json_: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Append JSON lines to FILE; - for standard output."),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Append to the GPU's file in the results folder.")
    ] = False,
    budget_ms: Annotated[
        float, typer.Option("--budget-ms", min=1.0, help="Device time per provider and case.")
    ] = 80.0,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats", min=1, help="Go through the cases so often; hpc bench compare pools the rows."
        ),
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random inputs.")] = 0,
    device: Annotated[str | None, typer.Option("--device", help="Such as cuda:0 [default: the GPU].")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List cases and providers, run nothing.")] = False,
) -> None:
    """Check, then time every provider on every case: CUDA-graph replay, inputs cold, providers interleaved.

    Shows the median in us, the best rival over hpc, the fraction of the hardware's floor, and the error
    against float64. Exit code 1 if one of hpc's own paths fails or is wrong.

    Examples: hpc bench attention.decode --tag target --save; hpc bench --case 'fp8 8/1*' --providers
    hpc,hpc/static
    """
    from hpc.common import operator, registry

    if tag not in operator.TAGS:
        raise typer.BadParameter(f"'{tag}' is none of {', '.join(sorted(operator.TAGS))}", param_hint="--tag")
    if json_ is not None and save:
        raise typer.BadParameter("give either --json FILE or --save", param_hint="--json")
    jobs = [
        (chosen, [item for item in chosen.cases(tag) if fnmatch(item.name, case)])
        for chosen in map(registry.get, terminal.operator_names(op))
    ]
    if not any(cases for _, cases in jobs):
        terminal.usage_error(f"no case with tag '{tag}' matches '{case}'")
    names = [name.strip() for name in providers.split(",") if name.strip()] if providers is not None else None
    if list_:
        _list(jobs)
        return
    jobs = [(chosen, cases * repeats) for chosen, cases in jobs]
    if not _run(jobs, names, _device(device), json_, save, budget_ms, seed):
        raise typer.Exit(terminal.FAILED)


def _device(wanted: str | None) -> Any:
    import torch

    from hpc.common import arch

    try:
        device = torch.device(wanted or "cuda")
    except RuntimeError:
        raise typer.BadParameter(f"'{wanted}' is no device; try cuda:0", param_hint="--device") from None
    if arch.is_cuda(device) and not arch.gpu_available():
        terminal.usage_error("no GPU here; times on a CPU mean little, but --device cpu --tag interpret runs")
    return device


def _run(
    jobs: list[Any],
    names: list[str] | None,
    device: Any,
    json_: Path | None,
    save: bool,
    budget_ms: float,
    seed: int,
) -> bool:
    """Run and show everything; True if every own path has a time."""
    from hpc.bench import results, runner
    from hpc.bench.providers import is_own

    good = True
    for chosen, cases in jobs:
        if not cases:
            continue
        try:
            runner.select(chosen, names)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--providers") from None
        to_stdout = json_ is not None and str(json_) == "-"
        path = results.result_path(chosen.name, device) if save else None if to_stdout else json_
        environment = results.current_env(device)
        rows = _with_progress(chosen, cases, names, device, path, environment, budget_ms, seed)
        if to_stdout:
            _print_lines(environment, rows)
        else:
            _print_table(chosen.name, environment.gpu, rows, path)
        good = good and all(row.time_us is not None for row in rows if is_own(row.provider))
    return good


def _with_progress(
    chosen: Any, cases: list[Any], names: list[str] | None, device: Any, path: Any, environment: Any,
    budget_ms: float, seed: int,
) -> list[Any]:  # fmt: skip
    from hpc.bench import runner

    with terminal.progress_bar() as bar:
        task = bar.add_task(chosen.name, total=len(cases))

        def show(event: Any) -> None:
            what = f"{event.case}: {event.stage} {event.provider}".rstrip()
            bar.update(task, description=what, completed=event.index)
            row = event.row
            if row is not None:
                time = "no time" if row.time_us is None else f"{row.time_us:.1f} us"
                bar.console.print(
                    f"{row.case}  {row.provider}  {time}  {row.note}", highlight=False, markup=False
                )

        return runner.run(
            chosen, cases, names, device, path, show, budget_ms=budget_ms, seed=seed, environment=environment
        )


def _print_lines(environment: Any, rows: list[Any]) -> None:
    import json

    typer.echo(json.dumps({"env": asdict(environment)}))
    for row in rows:
        typer.echo(json.dumps(terminal.finite(asdict(row))))


def _print_table(name: str, gpu: str, rows: list[Any], path: Any) -> None:
    from hpc.bench import table

    console = terminal.results()
    console.print(table.to_rich(rows, f"{name} on {gpu}"))
    for note in table.notes(rows):
        console.print(note, style="dim", highlight=False, markup=False)
    if path is not None:
        console.print(f"wrote {path}", highlight=False, markup=False)


def _list(jobs: list[Any]) -> None:
    console = terminal.results()
    for chosen, cases in jobs:
        console.print(chosen.name, style="bold", markup=False)
        for item in cases:
            console.print(f"  case      {item.name}", highlight=False, markup=False)
        for provider in chosen.providers().values():
            reason = provider.available()
            state = "runs here" if reason is None else f"cannot run here: {reason}"
            console.print(f"  provider  {provider.name} ({state})", highlight=False, markup=False)
