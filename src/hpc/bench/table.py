"""Tables from result rows: for the terminal (rich) and for Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc.bench.providers import BOUND, is_own
from hpc.bench.results import Row, latest

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Line:
    """One case over all providers.

    Attributes:
        op, case: names.
        floor_us: the hardware's limit, None without a GPU.
        times_us: provider -> median time; None where it has no time.
        own, rival: this library's default path (its fastest, where that one has no time); the fastest rival.
        speedup: rival time / own time; above 1 the library is faster.
        fraction_of_floor: floor / own time.
        rms_rel, rival_rms: errors of the own path and of that rival.
    """

    op: str
    case: str
    floor_us: float | None
    times_us: dict[str, float | None]
    own: str | None
    rival: str | None
    speedup: float | None
    fraction_of_floor: float | None
    rms_rel: float | None
    rival_rms: float | None = None

    @property
    def lost(self) -> bool:
        """A rival is faster, however little."""
        return self.speedup is not None and self.speedup < 1.0


def summarise(rows: Iterable[Row]) -> list[Line]:
    """One line per operator and case, from the latest row of each provider."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in latest(rows):
        groups.setdefault((row.op, row.case), []).append(row)
    return [_line(group) for group in groups.values()]


def _line(rows: Sequence[Row]) -> Line:
    timed = {row.provider: row for row in rows if row.time_us is not None}
    own = timed.get("hpc") or _fastest(row for row in timed.values() if is_own(row.provider))
    rival = _fastest(
        row for row in timed.values() if not is_own(row.provider) and not row.note.startswith(BOUND)
    )
    speedup = None
    if own is not None and rival is not None and own.time_us and rival.time_us:
        speedup = rival.time_us / own.time_us
    return Line(
        op=rows[0].op,
        case=rows[0].case,
        floor_us=next((row.floor_us for row in rows if row.floor_us is not None), None),
        times_us={row.provider: row.time_us for row in rows},
        own=own.provider if own else None,
        rival=rival.provider if rival else None,
        speedup=speedup,
        fraction_of_floor=own.fraction_of_floor if own else None,
        rms_rel=own.rms_rel if own else next((row.rms_rel for row in rows if is_own(row.provider)), None),
        rival_rms=rival.rms_rel if rival else None,
    )


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: row.time_us or float("inf"), default=None)


def providers_of(lines: Iterable[Line]) -> list[str]:
    """Column order: the library's default path, its other paths, then rivals."""
    names = dict.fromkeys(name for line in lines for name in line.times_us)
    return sorted(names, key=lambda name: (name != "hpc", not is_own(name)))


def notes(rows: Iterable[Row]) -> list[str]:
    """Why times are missing and what to know about them, one sentence per provider and reason."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in latest(rows):
        if row.note:
            cases.setdefault((row.provider, row.note), []).append(row.case)
    return [f"{provider} ({_list(names)}): {note}" for (provider, note), names in cases.items()]


def _list(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


LOST = "▼"  # before the ratio of a case that a rival wins


def _cells(line: Line, columns: Sequence[str], rival_error: bool = False) -> list[str]:
    times = [_number(line.times_us.get(name)) for name in columns]
    ratio = (f"{LOST} " if line.lost else "") + ratio_text(line.speedup)
    fraction = f"{100 * line.fraction_of_floor:.0f} %" if line.fraction_of_floor is not None else "-"
    errors = [line.rms_rel, line.rival_rms] if rival_error else [line.rms_rel]
    shown = ["-" if error is None else f"{error:.1e}" for error in errors]
    return [line.case, _number(line.floor_us), *times, ratio, fraction, *shown]


def ratio_text(ratio: float | None) -> str:
    """ "1.40x"; a third digit where two would round a lost row to 1.00."""
    if ratio is None:
        return "-"
    return f"{ratio:.3f}x" if 0.995 <= ratio < 1.0 else f"{ratio:.2f}x"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _heads(columns: Sequence[str], rival_error: bool = False) -> list[str]:
    errors = ["rms error", "of that rival"] if rival_error else ["rms error"]
    return ["case", "floor", *columns, "best rival / hpc", "of floor", *errors]


def to_rich(rows: Iterable[Row], title: str = "") -> Table:
    """A terminal table; times in us. Faster than every rival is green, slower red."""
    from rich.table import Table

    lines = summarise(rows)
    columns = providers_of(lines)
    table = Table(title=title or None, caption="times in us, medians")
    for head in _heads(columns):
        table.add_column(head, justify="left" if head == "case" else "right")
    for line in lines:
        cells = _cells(line, columns)
        if line.speedup is not None:
            colour = "green" if line.speedup >= 1.0 else "red"
            cells[2 + len(columns)] = f"[{colour}]{cells[2 + len(columns)]}[/{colour}]"
        table.add_row(*cells)
    return table


def to_markdown(rows: Iterable[Row], *, rival_error: bool = False) -> str:
    """A Markdown table; times in us. A case that a rival wins is marked; `rival_error` adds that rival's error."""
    lines = summarise(rows)
    columns = providers_of(lines)
    heads = _heads(columns, rival_error)
    text = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    text += ["| " + " | ".join(_cells(line, columns, rival_error)) + " |" for line in lines]
    return "\n".join(text) + "\n"
