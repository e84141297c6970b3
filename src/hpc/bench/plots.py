"""The report's images: how the cases of an operator stand to rivals and to the floor, and the roofline.

Needs matplotlib (of the extra `bench`). The same rows give the same bytes with the same matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc.bench.providers import is_own
from hpc.bench.report import Section, image_names, roofline_name
from hpc.bench.roofline import Rates
from hpc.bench.table import Line, ratio_text

OWN, LOST, RIVAL, PALE = "#00796b", "#c62828", "#37474f", "#b0bec5"
MARKERS = "osD^vP"


def write(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write every image of the report into ``folder``; returns their paths.

    Raises ModuleNotFoundError without matplotlib.
    """
    import matplotlib  # noqa: F401  before the folder is made

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section in sections:
        for name, lines in image_names(section).items():
            written.append(folder / name)
            _save(_bars(lines, f"{section.op} on {section.gpu}"), written[-1])
        roofline = roofline_name(section)
        if roofline is not None:
            written.append(folder / roofline)
            _save(_roofline(section), written[-1])
    return written


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, format="png", metadata={"Software": None})


def _bars(lines: Sequence[Line], title: str) -> Any:
    """Left, where there are rivals: their time over ours, the best one as a bar. Right: fraction of the floor."""
    rivals = any(line.speedup is not None for line in lines)
    figure = _figure(10.5 if rivals else 7.5, 1.5 + 0.235 * len(lines))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    if rivals:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _ratios(left, lines)
        figure.legend(loc="outside upper right", fontsize=8.5, frameon=False, ncols=6)
    else:
        left = right = figure.subplots()
    _fractions(right, lines, rivals)
    left.set_yticks(range(len(lines)), [line.case for line in lines], fontsize=8.5)
    left.set_ylim(len(lines) - 0.4, -0.6)
    for axes in (left, right):
        axes.grid(axis="x", color="#e4e7ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    return figure


TICKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


def _ratios(axes: Any, lines: Sequence[Line]) -> None:
    for place, line in enumerate(lines):
        if line.speedup is not None:
            colour = LOST if line.lost else OWN
            axes.barh(place, line.speedup - 1.0, left=1.0, height=0.62, color=colour, zorder=2)
    names = {name for line in lines for name, time in line.times_us.items() if time and not is_own(name)}
    ends = [1.0]
    for number, name in enumerate(sorted(names)):
        spots = [(ratio, place) for place, line in enumerate(lines) if (ratio := _over_own(line, name))]
        ends += [ratio for ratio, _ in spots]
        axes.scatter(
            *zip(*spots, strict=True), s=17, marker=MARKERS[number % len(MARKERS)], facecolor="white", edgecolor=RIVAL,
            linewidth=1.0, zorder=3, label=name,
        )  # fmt: skip
    for place, line in enumerate(lines):
        if line.speedup is not None:
            # to the left, where no mark of another rival lies
            axes.annotate(
                ratio_text(line.speedup).rstrip("x"), (min(line.speedup, 1.0), place), xytext=(-7, 0), va="center",
                textcoords="offset points", ha="right", fontsize=7.5, zorder=5,
            )  # fmt: skip
    axes.axvline(1.0, color="#222222", linewidth=1.1, zorder=4)
    low, high = min(0.9, min(ends) / 1.12), max(1.25, max(ends) * 1.12)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    wide = high / low > 8.0
    ticks = [
        tick
        for tick in TICKS
        if low <= tick <= high and not (wide and tick in (0.3, 0.4, 0.6, 0.8, 1.25, 1.5))
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("time of the rival / time of hpc    (red: the rival is faster)")


def _over_own(line: Line, rival: str) -> float | None:
    """Time of a rival over ours."""
    time, own = line.times_us.get(rival), line.times_us.get(line.own) if line.own else None
    return time / own if time and own else None


def _fractions(axes: Any, lines: Sequence[Line], rivals: bool) -> None:
    for place, line in enumerate(lines):
        if line.fraction_of_floor is not None:
            axes.barh(place, line.fraction_of_floor, height=0.62, color=LOST if line.lost else OWN, zorder=2)
        best = line.times_us.get(line.rival) if line.rival else None
        if best and line.floor_us:
            at = line.floor_us / best
            axes.plot([at, at], [place - 0.36, place + 0.36], color=RIVAL, linewidth=2.0, zorder=3)
    axes.axvline(1.0, color="#222222", linewidth=1.1, zorder=4)
    axes.set_xlim(0, 1.08)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel("of the floor" + ("    (mark: best rival)" if rivals else ""))


def _roofline(section: Section) -> Any:
    """Reached rate over arithmetic intensity, with the roofs of the card."""
    rates = section.rates
    assert rates is not None
    figure = _figure(8.0, 5.0)
    axes = figure.subplots()
    kinds = sorted({section.floors[line.case].kind for line in section.lines if line.case in section.floors})
    spans: list[float] = []
    for number, kind in enumerate(kinds):
        spans += _points(axes, section, kind, MARKERS[number % len(MARKERS)])
    if not spans:
        spans = [1.0, 1000.0]
    _roofs(axes, rates, kinds, min(spans) / 2.5, max(max(spans) * 2.5, rates.fp8 / rates.read * 6.0))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # room for what is written above the roofs
    axes.set_xlabel("operations a byte that must be read")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{section.op} on {section.gpu}", fontsize=12, fontweight="bold")
    axes.grid(which="major", color="#e4e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    return figure


def _points(axes: Any, section: Section, kind: str, marker: str) -> list[float]:
    """Ours filled, the best rival's hollow, joined by a thin line; returns the intensities."""
    spots = []
    for line in section.lines:
        floor = section.floors.get(line.case)
        own = line.times_us.get(line.own) if line.own else None
        if floor is None or floor.kind != kind or not own or not floor.bytes or not floor.flops:
            continue
        best = line.times_us.get(line.rival) if line.rival else None
        spots.append(
            (floor.flops / floor.bytes, floor.flops / own / 1e6, floor.flops / best / 1e6 if best else None)
        )
    for x, own, best in spots:
        if best is not None:
            axes.plot([x, x], [own, best], color=OWN if own >= best else LOST, linewidth=0.9, zorder=2)
    beaten = [(x, best) for x, _, best in spots if best is not None]
    axes.scatter(
        [x for x, _ in beaten], [best for _, best in beaten], s=20, marker=marker, facecolor="white", edgecolor=RIVAL,
        linewidth=0.9, zorder=3, label=f"best rival, {kind}" if beaten else None,
    )  # fmt: skip
    axes.scatter(
        [x for x, _, _ in spots], [own for _, own, _ in spots], s=24, marker=marker, zorder=4, edgecolor="white",
        linewidth=0.4, color=[LOST if best is not None and best > own else OWN for _, own, best in spots],
    )  # fmt: skip
    if spots:  # an empty one for the legend, which would take the first point's colour
        label = f"hpc, {kind}" + (" (red: the rival is faster)" if beaten else "")
        axes.scatter([], [], s=24, marker=marker, color=OWN, edgecolor="white", linewidth=0.4, label=label)
    return [x for x, _, _ in spots]


def _roofs(axes: Any, rates: Rates, kinds: Sequence[str], low: float, high: float) -> None:
    """The reading slope up to the highest matrix rate in use, and the matrix rates from where they bind."""
    tops = {kind: float(getattr(rates, kind)) / 1e12 for kind in kinds}
    slope = rates.read / 1e12
    ridge = max(tops.values()) / slope
    end = min(ridge, high)
    axes.plot(
        [low, end],
        [low * slope, end * slope],
        color="#222222",
        linewidth=1.3,
        label=f"reading {slope:.2f} TB/s",
    )
    for kind, top in tops.items():
        axes.plot([top / slope, high], [top, top], color="#222222", linewidth=1.3)
        axes.annotate(
            f"{kind} product {top:.0f} TFLOP/s", (high, top), xytext=(-2, 3), textcoords="offset points", ha="right",
            fontsize=8,
        )  # fmt: skip
    axes.set_xlim(low, high)
