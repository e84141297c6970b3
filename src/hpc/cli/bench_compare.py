"""`hpc bench compare`: did anything become slower, wrong or less exact?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hpc.cli import terminal


def run(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Result file, or a folder of them.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Result file, or a folder of them.")],
    threshold: Annotated[
        float, typer.Option("--threshold", min=0.0, help="Growth of a time that counts: 0.03 is 3 %.")
    ] = 0.03,
    error_threshold: Annotated[
        float, typer.Option("--error-threshold", min=0.0, help="The same for the relative RMS error.")
    ] = 0.25,
    providers: Annotated[
        str, typer.Option("--providers", metavar="GLOB", help="Whose times are judged.")
    ] = "hpc*",
    all_: Annotated[bool, typer.Option("--all", help="Show unchanged rows too.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of the table.")
    ] = False,
) -> None:
    """Compare two sets of results; leave with code 1 if something got worse.

    Slower means: the median grew by more than the threshold, and the ranges from the 20th to the 80th percentile
    do not meet. Runs of one commit are repeats and are pooled, so one more run of either side makes the verdict
    quieter. A time that got lost (a path that fails or is wrong now) and a larger error count as worse too.

    Examples: hpc bench compare main.jsonl mine.jsonl; hpc bench compare old/ new/ --threshold 0.05
    """
    from hpc.bench import compare

    found = compare.compare(
        compare.pool(*_load(old)), compare.pool(*_load(new)),
        threshold=threshold, error_threshold=error_threshold, providers=providers,
    )  # fmt: skip
    if not found.compared:
        terminal.usage_error(_nothing_in_common(found, providers))
    if json_:
        terminal.write_json(_as_json(found, threshold))
    else:
        _print(found, all_, threshold)
    if found.regressions:
        raise typer.Exit(terminal.FAILED)


def _load(path: Path) -> Any:
    from hpc.bench import compare

    try:
        return compare.load(path)
    except ValueError as error:
        terminal.usage_error(str(error))


def _nothing_in_common(found: Any, providers: str) -> str:
    gpus = [", ".join(names) or "an unknown GPU" for names in (found.old_gpus, found.new_gpus)]
    if gpus[0] != gpus[1]:
        return f"nothing to compare: old was measured on {gpus[0]}, new on {gpus[1]}"
    return f"nothing to compare: no case of a provider '{providers}' is in both"


def _as_json(found: Any, threshold: float) -> dict[str, Any]:
    return {
        "threshold": threshold,
        "num_compared": found.compared,
        "num_regressions": len(found.regressions),
        "drift_of_rivals": found.drift,
        "changes": [{**asdict(change), "regression": change.regression} for change in found.changes],
    }


COLOURS = {"slower": "bold red", "lost": "bold red", "less exact": "bold red", "faster": "green"}


def _print(found: Any, all_: bool, threshold: float) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "operator", "case", "provider"):
        table.add_column(title, overflow="fold")
    for title in ("old us", "new us", "change"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    # worst first, then the best; what only one side holds last
    shown = sorted(
        (change for change in found.changes if all_ or change.verdict != "same"),
        key=lambda change: (not change.regression, change.ratio is None, -(change.ratio or 0.0)),
    )
    for change in shown:
        colour = COLOURS.get(change.verdict, "dim")
        times = ["-" if time is None else f"{time:.4g}" for time in (change.old_us, change.new_us)]
        ratio = "-" if change.ratio is None else f"{100 * (change.ratio - 1):+.1f} %"
        names = (change.op, terminal.escape(change.case), change.provider)
        why = terminal.escape(change.why)
        table.add_row(f"[{colour}]{change.verdict}[/]", *names, *times, ratio, why)
    console = terminal.results()
    if shown:
        console.print(table, highlight=False)
    better = sum(change.verdict == "faster" for change in found.changes)
    console.print(
        f"{len(found.regressions)} of {found.compared} compared rows got worse, {better} faster, "
        f"the others within {100 * threshold:g} % or noise",
        highlight=False,
    )
    if found.drift is not None:
        text = f"Rivals moved by {100 * (found.drift - 1):+.1f} % (median)"
        if abs(found.drift - 1) > threshold:
            text += ": the machine or the rivals' versions changed, so these times do not compare"
        console.print(text, style="dim", highlight=False)
