"""The decode schedule as a picture: coloured rows in the terminal, or an image by matplotlib.

Requests read in one piece are grey and alternate; requests in several pieces are bright. So the eye finds
first what the schedule had to split, and then the dots at the right: time in which a row has nothing left
to read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hpc.attention.decode.timeline import Segment, Timeline, headline

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

SPLIT_COLOURS = ("#e45756", "#f2a93b", "#4c9f70", "#4d8fd6", "#a26bd0", "#2fb5b5", "#e377ae", "#b5b13a")
WHOLE_COLOURS = ("#6f7a86", "#a9b1b9", "#8b95a0")
IDLE, FULL = "·", "█"


def colours(timeline: Timeline) -> dict[int, str]:
    """Colour of every request: bright when it is read in several pieces, grey when in one."""
    chunks = timeline.chunks
    split = (request for request in sorted(chunks) if chunks[request] > 1)
    table = {request: SPLIT_COLOURS[i % len(SPLIT_COLOURS)] for i, request in enumerate(split)}
    return {r: table.get(r, WHOLE_COLOURS[r % len(WHOLE_COLOURS)]) for r in range(timeline.num_requests)}


def terminal(
    timeline: Timeline, title: str, *, width: int = 100, max_rows: int = 24, horizon_us: float = 0.0
) -> RenderableType:
    """Draw a timeline as text: one line per row, or per group of neighbouring rows when there are more than
    `max_rows`.

    A group is shown by its slowest row, so that the tail is never hidden. `horizon_us` stretches the time
    axis, for two pictures on one scale.
    """
    from rich.console import Group
    from rich.text import Text

    horizon_us = max(horizon_us, timeline.tail_us, 1e-9)
    groups = _groups(len(timeline.rows), max_rows)
    label_width = max(len(_label(low, high)) for low, high in groups)
    cells = max(20, width - label_width - 30)
    table = colours(timeline)
    lines: list[RenderableType] = [
        Text.assemble((title, "bold"), ": ", headline(timeline)),
        Text(
            f"{'bin' if timeline.kind == 'dynamic' else 'slot':>{label_width}}  {_axis(cells, horizon_us)}",
            "dim",
        ),
    ]
    for low, high in groups:
        slowest = max(range(low, high), key=lambda row: timeline.row_us[row])
        line = Text(f"{_label(low, high):>{label_width}}  ")
        line.append_text(_bar(timeline.rows[slowest], cells, horizon_us, table))
        line.append(_numbers(timeline, slowest))
        lines.append(line)
    if len(groups) < len(timeline.rows):
        lines.append(Text("each line shows the slowest row of its group", "dim"))
    lines.append(_legend(timeline, table, width))
    return Group(*lines)


def _groups(num_rows: int, max_rows: int) -> list[tuple[int, int]]:
    size = -(-num_rows // max(1, max_rows))
    return [(low, min(low + size, num_rows)) for low in range(0, num_rows, size)]


def _label(low: int, high: int) -> str:
    return str(low) if high == low + 1 else f"{low}-{high - 1}"


def _axis(cells: int, horizon_us: float) -> str:
    end = f"{horizon_us:.1f} us"
    return "0" + end.rjust(cells - 1)


def _numbers(timeline: Timeline, row: int) -> str:
    segments = timeline.rows[row]
    tiles = sum(segment.tiles for segment in segments)
    return f" {timeline.row_us[row]:7.1f} us {tiles:5d} t {len(segments):3d} req"


def _bar(segments: list[Segment], cells: int, horizon_us: float, table: dict[int, str]) -> Text:
    """One row as `cells` characters; a cell belongs to the segment that its middle falls into.

    A thin mark where a segment begins keeps neighbours of one colour apart.
    """
    from rich.text import Text

    bar = Text()
    filled = 0
    for index, segment in enumerate(segments):
        end = min(cells, int(segment.end_us / horizon_us * cells + 0.5))
        if end > filled:
            bar.append(("▌" if index else FULL) + FULL * (end - filled - 1), table[segment.request])
            filled = end
    bar.append(IDLE * (cells - filled), "dim")
    return bar


def _legend(timeline: Timeline, table: dict[int, str], width: int) -> Text:
    """Colours of the requests in most pieces, as many as fit on the line."""
    from rich.text import Text

    split = [(request, count) for request, count in timeline.chunks.most_common() if count > 1]
    legend = Text()
    for position, (request, count) in enumerate(split):
        entry = f" request {request} in {count} pieces  "
        if legend.cell_len + len(entry) + 46 > width and position:
            legend.append(f"and {len(split) - position} more  ", "dim")
            break
        legend.append(FULL, table[request])
        legend.append(entry)
    if len(split) < timeline.num_requests:
        for shade in WHOLE_COLOURS[:2]:
            legend.append(FULL, shade)
        legend.append(" in one piece  ")
    legend.append(f"{IDLE * 2} idle", "dim")
    return legend


def save_png(path: str | os.PathLike[str], timelines: list[Timeline], title: str) -> None:
    """Write an image of timelines side by side on one time axis, each with its tail marked.

    Needs matplotlib (of the extra `bench`); raises ModuleNotFoundError without it and OSError
    when the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    horizon_us = max(max(timeline.tail_us for timeline in timelines), 1e-9) * 1.04
    height = min(7.5, max(3.6, 1.9 + 0.09 * max(len(timeline.rows) for timeline in timelines)))
    figure = Figure(figsize=(6.4 * len(timelines), height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    panels = figure.subplots(1, len(timelines), sharex=True, squeeze=False)[0]
    for axes, timeline in zip(panels, timelines, strict=True):
        _draw(axes, timeline, horizon_us)
    figure.savefig(path, format="png")


def _draw(axes: Any, timeline: Timeline, horizon_us: float) -> None:
    table = colours(timeline)
    edge = 0.4 if len(timeline.rows) <= 64 else 0.0
    for row, segments in enumerate(timeline.rows):
        axes.barh(
            [row] * len(segments),
            [segment.end_us - segment.start_us for segment in segments],
            left=[segment.start_us for segment in segments],
            height=0.86 if edge else 1.0,
            color=[table[segment.request] for segment in segments],
            edgecolor="white",
            linewidth=edge,
            zorder=2,
        )
    # Pale up to the tail: time in which the other rows wait for the slowest.
    axes.axvspan(0, timeline.tail_us, color="#eef0f2", zorder=0, linewidth=0)
    axes.axvline(timeline.tail_us, color="#222222", zorder=3, linewidth=1.2, linestyle=(0, (4, 2)))
    left = timeline.tail_us > 0.75 * horizon_us
    axes.annotate(
        f"tail {timeline.tail_us:.1f} us",
        (timeline.tail_us, 0.5),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if left else 6, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=10,
        zorder=4,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "#cccccc"},
    )
    axes.set_title(
        f"{timeline.kind}: longest/mean {timeline.balance:.2f}, {timeline.num_split} of "
        f"{timeline.num_requests} requests split",
        fontsize=10,
    )
    axes.set_xlim(0, horizon_us)
    axes.set_ylim(len(timeline.rows) - 0.4, -0.6)
    axes.set_xlabel("predicted time (us)")
    axes.set_ylabel("CTA bin" if timeline.kind == "dynamic" else "CTA slot")
    axes.spines[["top", "right"]].set_visible(False)
