"""The report: every result file below a folder as one Markdown page with tables and, by `plots`, images.

Its text depends on the result files and on the names and work of the operators' cases, and on nothing else: the same
files give the same page.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc.bench.compare import load
from hpc.bench.results import Env, Row, gpu_slug, latest
from hpc.bench.roofline import KNOWN, Rates
from hpc.bench.table import LOST, Line, notes, ratio_text, summarise, to_markdown
from hpc.common import registry
from hpc.common.operator import Floor

MOST_BARS = 32  # cases of one image


@dataclass(frozen=True)
class Part:
    """Cases of one operator that are shown together."""

    title: str
    rows: tuple[Row, ...]

    @property
    def lines(self) -> list[Line]:
        return summarise(self.rows)


@dataclass(frozen=True)
class Section:
    """One operator on one GPU.

    Attributes:
        op, gpu: names.
        parts: the cases with a target first, then the others in the order of the bench, then those that the bench
            does not have any more.
        floors: work of each case that the bench still has.
        runs: where the rows come from.
    """

    op: str
    gpu: str
    parts: tuple[Part, ...]
    runs: tuple[Env, ...]
    floors: dict[str, Floor] = field(default_factory=dict)

    @property
    def lines(self) -> list[Line]:
        return [line for part in self.parts for line in part.lines]

    @property
    def rates(self) -> Rates | None:
        """What the GPU reaches, if it is in the table."""
        return KNOWN.get(self.gpu)


def collect(results: str | Path) -> list[Section]:
    """Sections in the order of GPU names and of the registry.

    Args:
        results: a result file, or a folder of them.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a line that is no JSON object.
    """
    runs, rows = load(results)
    by_id = {run.run_id: run for run in runs}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        gpu = by_id[row.run_id].gpu if row.run_id in by_id else "unknown GPU"
        groups.setdefault((gpu, row.op), []).append(row)
    order = {name: place for place, name in enumerate(registry.names())}
    keys = sorted(groups, key=lambda key: (key[0], order.get(key[1], len(order)), key[1]))
    return [_section(gpu, op, latest(groups[gpu, op]), by_id) for gpu, op in keys]


def _section(gpu: str, op: str, rows: Sequence[Row], runs: dict[str, Env]) -> Section:
    targets: dict[str, int] = {}
    floors: dict[str, Floor] = {}
    order: dict[str, int] = {}
    if op in registry.names():
        operator = registry.get(op)
        targets = {case.name: place for place, case in enumerate(operator.cases("target"))}
        cases = operator.cases("bench")
        floors = {case.name: operator.floor(case) for case in cases}
        order = {case.name: place for place, case in enumerate(cases)}

    def part(title: str, names: dict[str, int]) -> Part:
        chosen = [row for row in rows if row.case in names]
        return Part(title, tuple(sorted(chosen, key=lambda row: names[row.case])))

    others = {name: place for name, place in order.items() if name not in targets}
    stale = {row.case: 0 for row in rows if row.case not in targets and row.case not in order}
    parts = (
        part("Cases with a target", targets),
        part("Further cases", others),
        part("Cases that the bench no longer has", stale),
    )
    used = dict.fromkeys(runs[row.run_id] for row in rows if row.run_id in runs)
    return Section(op, gpu, tuple(found for found in parts if found.rows), tuple(used), floors)


def image_names(section: Section) -> dict[str, list[Line]]:
    """File name of each bar image -> the cases it shows."""
    slug = f"{gpu_slug(section.gpu)}-{section.op}"
    pieces = []
    for part in section.parts:
        lines = [line for line in part.lines if line.own is not None]
        pieces += [lines[at : at + MOST_BARS] for at in range(0, len(lines), MOST_BARS)]
    return {f"{slug}-{number}.png": piece for number, piece in enumerate(pieces, start=1)}


def roofline_name(section: Section) -> str | None:
    """File name of the roofline image; None where rates or work are unknown."""
    drawn = section.rates is not None and any(line.case in section.floors for line in section.lines)
    return f"{gpu_slug(section.gpu)}-{section.op}-roofline.png" if drawn else None


def markdown(sections: Sequence[Section], images: str | None, source: str = "") -> str:
    """The page.

    Args:
        sections: from :func:`collect`.
        images: folder of the images as the page links to it; None leaves them out.
        source: what the page was made from, for its last line.
    """
    text = [HEAD]
    for gpu in dict.fromkeys(section.gpu for section in sections):
        mine = [section for section in sections if section.gpu == gpu]
        text += [f"## {gpu}\n", _summary(mine), _runs(mine)]
        for section in mine:
            text += _operator(section, images)
    if source:
        text.append(f"Made from `{source}` by `hpc bench report`; no figure on this page is typed.\n")
    return "\n".join(text)


HEAD = f"""# Measured

Every row is a median of CUDA-graph replays with cold inputs, in µs, of a result that was checked against float64, but
for what the notes under a table say. All providers of a case run interleaved on the same inputs; names that begin with
`hpc` are this library's paths, the others are rivals. The floor is the time that reading the bytes or computing the
product takes at the measured rates of the card, an average that a lucky case exceeds by a little. "best rival / hpc" is
above 1 where this library is faster; {LOST} marks a case that a rival wins. The last columns are relative RMS errors
against float64, of `hpc` and of that rival.

On a machine with a GPU, `hpc bench --save` measures again, and `hpc bench report benchmarks/results -o report.md` makes
this page from the files. `hpc bench compare OLD NEW` tells what changed.
"""


def _summary(sections: Sequence[Section]) -> str:
    heads = [
        "operator",
        "cases",
        "won",
        f"{LOST} lost",
        "no rival",
        "best rival / hpc",
        "of floor",
        "rms error",
    ]
    rows = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for section in sections:
        lines = section.lines
        ratios = [line.speedup for line in lines if line.speedup is not None]
        fractions = [line.fraction_of_floor for line in lines if line.fraction_of_floor is not None]
        errors = [line.rms_rel for line in lines if line.rms_rel is not None]
        lost = sum(line.lost for line in lines)
        span = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
        cells = [
            f"[{section.op}](#{anchor(section)})", str(len(lines)), str(len(ratios) - lost), str(lost),
            str(len(lines) - len(ratios)), span,
            f"{100 * statistics.median(fractions):.0f} %" if fractions else "-",
            f"{max(errors):.1e}" if errors else "-",
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    legend = (
        "Medians over the cases, the range of the ratio, and the largest error. Won: faster than every rival."
    )
    missing = [name for name in registry.names() if name not in {section.op for section in sections}]
    if missing:
        legend += f" No results yet: {', '.join(missing)}."
    return "\n".join([*rows, "", legend]) + "\n"


def anchor(section: Section) -> str:
    """Where the section begins on the page."""
    return f"{gpu_slug(section.gpu)}-{section.op}".lower().replace(".", "-")


def origin(run: Env) -> str:
    """One line that says where a run's numbers come from."""
    commit = f", commit {run.commit[:10]}" if run.commit else ", commit not recorded"
    changed = " with uncommitted changes" if run.dirty else ""
    driver = f"driver {run.driver}, " if run.driver else ""
    versions = f"{driver}torch {run.torch}, triton {run.triton}, hpc {run.hpc}{commit}{changed}"
    return f"{run.gpu}, {versions}, {(run.date or '')[:10]}"


def _runs(sections: Iterable[Section]) -> str:
    origins = dict.fromkeys(origin(run) for section in sections for run in section.runs)
    return "\n".join(f"- {text}" for text in origins) + "\n"


def _operator(section: Section, images: str | None) -> list[str]:
    text = [f'<a id="{anchor(section)}"></a>\n', f"### {section.op}\n"]
    roofline = roofline_name(section)
    if images is not None and roofline is not None:
        text.append(f"![Roofline of {section.op} on {section.gpu}]({images}/{roofline})\n")
    bars = image_names(section) if images is not None else {}
    text += [f"![{section.op}: ratio to rivals, fraction of the floor]({images}/{name})\n" for name in bars]
    lost = [line for line in section.lines if line.lost]
    if lost:
        names = "; ".join(f"{line.case} ({line.rival}, {ratio_text(line.speedup)})" for line in lost)
        text.append(f"{LOST} Lost, {len(lost)} of {len(section.lines)}: {names}.\n")
    measured = {line.case for line in section.lines if line.own is not None}
    absent = [name for name in section.floors if name not in measured]
    if absent:
        text.append(f"Not measured, {len(absent)} of {len(section.floors)} cases: {', '.join(absent)}.\n")
    for part in section.parts:
        text += [f"#### {part.title}\n", to_markdown(part.rows, rival_error=True)]
    every = [row for part in section.parts for row in part.rows]
    return [*text, "\n".join(f"- {note}." for note in notes(every)) + "\n"]
