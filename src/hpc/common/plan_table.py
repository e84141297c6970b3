"""Measured plans: `configs/<GPU>.json` in an operator's folder, written by `hpc tune` and read by its choice of plan.

A table holds only what measured better than the analytic choice. It belongs to the GPU it was measured on: the file
names the card and its number of multiprocessors, and on any other card it is not used, whatever the file is called.

A lookup is exact on the discrete axes and takes, of the measured sizes, the smallest that is at least the one asked
for. A size at which the analytic choice won is kept too (as a plan that is null) where a larger size has a plan, so
that the larger one's plan does not reach below it.

Pure Python: neither torch nor Triton.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

Axes = Mapping[str, int | bool | str]
T = TypeVar("T")
_hints = cache(get_type_hints)


@dataclass(frozen=True)
class Entry:
    """One measured point.

    Attributes:
        axes: (name, value) of the discrete axes, in the operator's order.
        size: the axis that is rounded up.
        plan: fields of the plan; None where the analytic choice won.
        time_us, analytic_us: sums of the medians over the point's cases, for the reader of the file.
        gain: analytic time / plan time, geometric mean over the point's cases; 1.0 without a plan.
    """

    axes: tuple[tuple[str, int | bool | str], ...]
    size: int
    plan: Mapping[str, Any] | None
    time_us: float | None = None
    analytic_us: float | None = None
    gain: float = 1.0


@dataclass(frozen=True)
class PlanTable:
    """Entries of one GPU. `gpu` is its marketing name, `sms` its multiprocessors (a MIG slice has fewer)."""

    gpu: str
    sms: int
    entries: tuple[Entry, ...]
    origin: str = ""

    def find(self, axes: Axes, size: int) -> Entry | None:
        """The entry for a call, or None if nothing was measured for it."""
        wanted = dict(axes)
        fitting = [entry for entry in self.entries if entry.size >= size and dict(entry.axes) == wanted]
        return min(fitting, key=lambda entry: entry.size, default=None)


def path_of(folder: Path, gpu: str) -> Path:
    """`configs/NVIDIA_H200.json`."""
    return folder / f"{gpu.replace(' ', '_').replace('/', '_')}.json"


@lru_cache(maxsize=None)
def load(folder: Path, gpu: str, sms: int) -> PlanTable | None:
    """The table for a GPU, read once per process; None if there is none.

    A file that was measured on another card than its name says is not used, with a warning that names both. A file
    that cannot be read is not used either, with a warning: a call never fails for want of a measured plan.
    """
    path = path_of(folder, gpu)
    if not gpu or not path.is_file():
        return None
    try:
        table = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"hpc: {path} cannot be read ({error}); the analytic plans are used.", RuntimeWarning, 2
        )
        return None
    if (table.gpu, table.sms) != (gpu, sms):
        warnings.warn(
            f"hpc: {path} was measured on {table.gpu} with {table.sms} multiprocessors, this is {gpu} with {sms}; "
            "its plans are not used. `hpc tune` measures this card.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return table


def parse(text: str) -> PlanTable:
    """A table from its text. Raises ValueError, KeyError or TypeError if it is none."""
    data = json.loads(text)
    entries = tuple(
        Entry(
            tuple(found["axes"].items()), int(found["size"]), found["plan"], found.get("time_us"),
            found.get("analytic_us"), float(found.get("gain", 1.0)),
        )
        for found in data["entries"]
    )  # fmt: skip
    return PlanTable(str(data["gpu"]), int(data["sms"]), entries, str(data.get("origin", "")))


def dump(table: PlanTable) -> str:
    """The text of a table: sorted by axes and size, one entry a line, so that differences read well."""

    def line(entry: Entry) -> str:
        values: dict[str, Any] = {"axes": dict(entry.axes), "size": entry.size, "plan": entry.plan}
        if entry.plan is not None:
            values.update(
                time_us=_short(entry.time_us), analytic_us=_short(entry.analytic_us), gain=_short(entry.gain)
            )
        return "  " + json.dumps(values)

    lines = ",\n".join(line(entry) for entry in sorted(table.entries, key=_order))
    head = f'"gpu": {json.dumps(table.gpu)}, "sms": {table.sms}, "origin": {json.dumps(table.origin)}'
    return f'{{{head}, "entries": [\n{lines}\n]}}\n'


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _order(entry: Entry) -> tuple[str, int]:
    return json.dumps(entry.axes), entry.size


def merged(
    old: PlanTable | None, gpu: str, sms: int, measured: Iterable[Entry], origin: str
) -> PlanTable | None:
    """`old` with the points that were measured again replaced; None if no entry with a plan is left.

    Points without a plan stay only where a larger size of the same axes has one. A table of another GPU is dropped.
    """
    points: dict[tuple[Any, int], Entry] = {}
    if old is not None and (old.gpu, old.sms) == (gpu, sms):
        points = {(entry.axes, entry.size): entry for entry in old.entries}
    points.update({(entry.axes, entry.size): entry for entry in measured})
    largest: dict[Any, int] = {}
    for (axes, size), entry in points.items():
        if entry.plan is not None:
            largest[axes] = max(size, largest.get(axes, size))
    kept = [entry for (axes, size), entry in points.items() if size <= largest.get(axes, -1)]
    if not kept:
        return None
    return PlanTable(gpu, sms, tuple(sorted(kept, key=_order)), origin)


def refuse(folder: Path, gpu: str, entry: Entry, why: str, operator: str) -> None:
    """Warn that the plan of an entry cannot be used and the analytic one is."""
    warnings.warn(
        f"hpc: {path_of(folder, gpu)}: the plan for {dict(entry.axes)} up to size {entry.size} cannot be used ({why}); "
        f"the analytic one is. `hpc tune {operator}` measures anew.",
        RuntimeWarning,
        stacklevel=4,
    )


def from_fields(kind: type[T], values: Any, where: str = "plan") -> T:
    """The inverse of `dataclasses.asdict` for a plan of type `kind`.

    Raises ValueError, naming the field, for anything else: a table may be older than the plan.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}, not a {kind.__name__}")
    hints, known = _hints(kind), fields(kind)  # type: ignore[arg-type]
    unknown = [name for name in values if name not in hints]
    if unknown:
        raise ValueError(f"{where} has no field {', '.join(map(repr, unknown))}")
    missing = [each.name for each in known if each.default is MISSING and each.name not in values]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}")
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """A field of its declared type: int, bool, str, one of some literals, a record, or None. True is no int here."""
    kinds = get_args(hint) or (hint,)
    if value is None and NoneType in kinds:
        return None
    if is_dataclass(kinds[0]):
        return from_fields(kinds[0], value, where)  # type: ignore[arg-type]
    if not isinstance(kinds[0], type):
        if value not in kinds:
            raise ValueError(f"{where} is {value!r}, not one of {kinds}")
    elif type(value) is not kinds[0]:
        raise ValueError(f"{where} is {value!r}, not a {kinds[0].__name__}")
    return value
