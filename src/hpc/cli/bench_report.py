"""`hpc bench report`: one page from the result files, with tables and images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hpc.cli import terminal


def run(
    results: Annotated[
        Path | None,
        typer.Argument(
            metavar="RESULTS", help="Result file, or a folder of them [default: benchmarks/results]."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write this page, and its images into a folder beside it."
        ),
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw the images; needs matplotlib.")
    ] = True,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 1 if the page's text would differ.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the compared cases as one JSON document.")
    ] = False,
) -> None:
    """Make a report of result files: tables, bars of the ratio to rivals and of the fraction of the floor, rooflines.

    For `-o report.md` the images go to the folder `report/` beside it. Without -o the page goes to standard output,
    without images. Cases that a rival wins are marked and listed.

    Examples: hpc bench report benchmarks/results -o report.md; hpc bench report --json
    """
    from hpc.bench import report
    from hpc.common import env

    source = results if results is not None else env.results_dir()
    if check and output is None:
        raise typer.BadParameter("--check needs the page to check: -o FILE", param_hint="--check")
    try:
        sections = report.collect(source)
    except ValueError as error:
        terminal.usage_error(str(error))
    if json_:
        terminal.write_json(_as_json(sections))
        return
    images = output.stem if output is not None and plots else None
    text = report.markdown(sections, images, source.as_posix().rstrip("/"))
    if output is None:
        typer.echo(text, nl=False)
    elif check:
        _check(output, text)
    else:
        _write(output, text, sections if plots else [])


def _check(output: Path, text: str) -> None:
    if not output.is_file() or output.read_text(encoding="utf-8") != text:
        terminal.messages().print(
            f"{output} differs from what would be written", highlight=False, markup=False
        )
        raise typer.Exit(terminal.FAILED)


def _write(output: Path, text: str, sections: list[Any]) -> None:
    from hpc.bench import plots

    try:
        images = plots.write(sections, output.parent / output.stem) if sections else []
    except ModuleNotFoundError as error:
        terminal.usage_error(f"images need {error.name}: pip install matplotlib, or pass --no-plots")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    console = terminal.results()
    console.print(
        f"wrote {output}" + (f" and {len(images)} images" if images else ""), highlight=False, markup=False
    )


def _as_json(sections: list[Any]) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [
        {
            "op": section.op,
            "gpu": section.gpu,
            "runs": [asdict(run) for run in section.runs],
            "cases": [{**asdict(line), "lost": line.lost} for line in section.lines],
        }
        for section in sections
    ]
