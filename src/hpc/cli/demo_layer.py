"""`hpc demo --model`: one decode step of a whole MoE layer on a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from hpc.cli import terminal


def run(
    model: str, tp: int, requests: int | None, steps: int, seed: int, png: Path | None, json_: bool
) -> None:
    """Run the steps, print their stages, leave with code 1 if one is wrong."""
    from hpc.layer import demo

    bar = terminal.progress_bar()
    with bar:
        task = bar.add_task("start", total=None)

        def say(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        report = demo.run(model, tp, requests, seed, say, steps)
    if png is not None:
        _write_png(png, report)
    if json_:
        terminal.write_json(demo.as_json(report))
    else:
        _print(report)
        if png is not None:
            terminal.results().print(f"wrote {png}", highlight=False, markup=False)
    if not report.ok:
        raise typer.Exit(terminal.FAILED)


def _write_png(path: Path, report: Any) -> None:
    from hpc.layer import picture

    where = report.device if report.gpu else f"{report.device}, reference"
    title = f"{report.shape.name}, {len(report.lens)} requests, {where}"
    try:
        picture.save_png(path, report.times_us, "whole layer", title)
    except ModuleNotFoundError as error:
        terminal.usage_error(f"--png needs {error.name}; install it with: pip install matplotlib")


def _print(report: Any) -> None:
    console = terminal.results()
    shape, lens = report.shape, report.lens
    heads = f"{shape.q_heads} query heads on {shape.kv_heads} KV heads of size {shape.head_dim}, e4m3 cache; "
    zero = f" and {shape.zero_experts} zero experts" if shape.zero_experts else ""
    scales = "128x128 block scales" if shape.block_scales else "one scale an expert"
    experts = f"{shape.experts} experts of width {shape.inter}{zero}, top {shape.top_k} by {shape.scoring}, e4m3 with "
    attention = heads if shape.has_attention else ""
    changed = f", {report.num_joined} of them in place of one that ended" if report.num_joined else ""
    console.print(
        f"{terminal.escape(shape.name)}, one layer, decode steps: {len(report.batches)}. {len(lens)} requests of "
        f"{min(lens)} to {max(lens)} tokens{changed}. {attention}{experts}{scales}; hidden size {shape.hidden}.",
        highlight=False,
    )
    if not shape.has_attention:
        console.print(
            "\n[bold yellow]Left out:[/] this model's attention is latent (MLA), which this library does not compute; "
            "the step is router and experts.",
            highlight=False,
        )
    if not report.gpu:
        console.print(
            "\n[bold yellow]No GPU here.[/] A narrower layer goes through the public functions, which then run the "
            "reference in PyTorch. Errors are real; times are those of the reference on this CPU.",
            highlight=False,
        )
    console.print()
    console.print(_table(report))
    verdict = "[bold green]passed[/]" if report.ok else "[bold red]FAILED[/]"
    console.print(f"{verdict} in {report.seconds:.0f} s on {terminal.escape(report.device)}", highlight=False)


def _table(report: Any) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in ("", "stage", "checked"):
        table.add_column(head)
    unit = "time us" if report.gpu else "CPU ms"
    for head in ("rms error", "max error", unit):
        table.add_column(head, justify="right")
    if "schedule" in report.times_us:
        table.add_row(
            "", "schedule", "once for all layers", "-", "-", _time(report, report.times_us["schedule"])
        )
    for stage in report.stages:
        verdict = "[green]ok[/]" if stage.ok else "[bold red]FAIL[/]"
        errors = (f"{stage.rms_rel:.1e}", f"{stage.max_rel:.1e}")
        table.add_row(verdict, stage.name, stage.what, *errors, _time(report, stage.time_us))
    return table


def _time(report: Any, time_us: float | None) -> str:
    if time_us is None:
        return ""
    return f"{time_us:.1f}" if report.gpu else f"{time_us / 1e3:.1f}"
