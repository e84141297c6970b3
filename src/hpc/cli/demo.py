"""`hpc demo`: the library's main job, small, on whatever machine this is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hpc.cli import terminal


def run(
    png: Annotated[
        Path | None,
        typer.Option(
            "--png", metavar="FILE", help="Write the schedule, or with --model the stages, as an image."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of lengths and values.")] = 0,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Three short requests: seconds even when interpreted.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Decode steps of a whole MoE layer: hy3, qwen3-30b-a3b, longcat-flash-lite, or a config.json.",
        ),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="With --model: one of so many ranks.")] = 1,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="With --model: requests in the batch.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="With --model: decode steps.")] = 3,
) -> None:
    """Decode a batch of mixed-length requests through the scheduler; show schedule, error and time.

    On a GPU the kernels run and are timed by CUDA-graph replay: dynamic schedule, static split and plain
    PyTorch, with the fraction of the hardware's floor. Without one a smaller batch goes through the public
    functions, which then run the reference, and through the Triton kernels in Triton's interpreter; this
    takes under a minute.

    With --model: prologue, decode, router top-k and MoE of one layer, stage by stage, with error and time. On a
    GPU at the model's shapes; without one a narrower layer, through the reference.

    Exit code 1 if a result is further from float64 than its tolerance.
    """
    if model is not None:
        from hpc.cli import demo_layer

        if tiny:
            terminal.usage_error("--tiny belongs to the demo without --model")
        demo_layer.run(model, tp, requests, steps, seed, png, json_)
        return
    from hpc.attention.decode import demo

    bar = terminal.progress_bar()
    with bar:
        task = bar.add_task("start", total=None)

        def say(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        try:
            report = demo.run(tiny, seed, say)
        except demo.CannotRun as error:
            terminal.messages().print(f"[bold red]error:[/] {terminal.escape(error)}", highlight=False)
            raise typer.Exit(terminal.FAILED) from None
    dynamic, static, title = _timelines(report)
    if png is not None:
        from hpc.cli.schedule import write_png

        write_png(png, [dynamic, static], title)
    if json_:
        terminal.write_json(demo.as_json(report))
    else:
        _print(report, dynamic, static, title, png)
    if not report.ok:
        raise typer.Exit(terminal.FAILED)


def _timelines(report: Any) -> tuple[Any, Any, str]:
    from hpc.attention.decode import timeline
    from hpc.cli import distribution

    batch = report.batch
    machine = timeline.Machine(
        num_q_heads=batch.num_q_heads,
        num_kv_heads=batch.num_kv_heads,
        num_sms=report.num_sms,
    )
    heads = f"{batch.num_q_heads}/{batch.num_kv_heads}"
    if report.gpu:
        machine = machine.with_kernel_choice(len(batch.lens))
    title = f"{distribution.describe(list(batch.lens))}, heads {heads}, fp8, {report.num_sms} SMs"
    return (
        timeline.dynamic_timeline(batch.lens, machine),
        timeline.static_timeline(batch.lens, machine),
        title,
    )


def _print(report: Any, dynamic: Any, static: Any, title: str, png: Path | None) -> None:
    from hpc.attention.decode import picture

    console = terminal.results()
    batch = report.batch
    console.print(
        f"Decode attention, one step: {len(batch.lens)} requests of {min(batch.lens)} to {max(batch.lens)} "
        f"tokens, {batch.num_q_heads} query heads on {batch.num_kv_heads} KV head of size 128, "
        "pages of 64 tokens in shuffled order, NaN in every dead row.",
        highlight=False,
    )
    if not report.gpu:
        console.print(
            "\n[bold yellow]No GPU here.[/] The public functions run the float reference; the Triton "
            f"kernels run in Triton's interpreter, as on a GPU of {report.num_sms} SMs. Results are real; "
            "times would not be, so none are shown.",
            highlight=False,
        )
    console.print()
    console.print(picture.terminal(dynamic, "dynamic schedule", width=console.width, max_rows=16))
    console.print(f"static split for comparison: {picture.headline(static)}", style="dim", highlight=False)
    console.print()
    console.print(_table(report))
    if report.left_out:
        console.print(f"[bold yellow]left out:[/] {terminal.escape(report.left_out)}", highlight=False)
    verdict = "[bold green]passed[/]" if report.ok else "[bold red]FAILED[/]"
    console.print(f"{verdict} in {report.seconds:.0f} s on {terminal.escape(report.device)}", highlight=False)
    if png is not None:
        console.print(f"wrote {png}", highlight=False, markup=False)


def _table(report: Any) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("type")
    table.add_column("path")
    heads = ["rms error", "max error"] + (["time us", "floor us", "of floor"] if report.gpu else [])
    for head in heads:
        table.add_column(head, justify="right")
    for row in report.results:
        verdict = "" if row.rms_rel is None else "[green]ok[/]" if row.ok else "[bold red]FAIL[/]"
        cells = [_number(row.rms_rel, ".1e"), _number(row.max_rel, ".1e")]
        if report.gpu:
            fraction = row.floor_us / row.time_us if row.floor_us and row.time_us else None
            cells += [_number(row.time_us, ".1f"), _number(row.floor_us, ".1f"), _number(fraction, ".0%")]
        table.add_row(verdict, row.dtype, terminal.escape(row.path), *cells)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
