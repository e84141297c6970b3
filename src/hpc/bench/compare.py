"""Two sets of result rows, old and new: what became slower, faster, wrong or less exact.

A time counts as changed only where the change stands out of the noise: the medians differ by more than the
threshold, and the ranges from the 20th to the 80th percentile do not meet. Runs of one commit are repeats of each
other and are pooled, so that repeating a run makes the verdict quieter.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, TypeAlias

from hpc.bench.providers import is_own
from hpc.bench.results import Env, Row, read

Verdict = Literal["slower", "faster", "same", "lost", "less exact", "new", "gone"]
REGRESSIONS: tuple[Verdict, ...] = ("slower", "lost", "less exact")

Key: TypeAlias = tuple[str, str, str, str]  # GPU, operator, case, provider

THRESHOLD = 0.03
ERROR_THRESHOLD = 0.25  # of the old error; rounding to bf16 alone is stable to a few per cent


@dataclass(frozen=True)
class Pool:
    """The repeats of one provider on one case. Times in us; None where none of them has a time."""

    gpu: str
    op: str
    case: str
    provider: str
    time_us: float | None
    p20_us: float | None
    p80_us: float | None
    rms_rel: float | None
    repeats: int
    note: str

    @property
    def key(self) -> Key:
        return self.gpu, self.op, self.case, self.provider


@dataclass(frozen=True)
class Change:
    """One provider on one case of one GPU, old against new.

    ``ratio`` is new time / old time, None where one of them is missing; ``why`` explains a regression.
    """

    gpu: str
    op: str
    case: str
    provider: str
    verdict: Verdict
    old_us: float | None
    new_us: float | None
    ratio: float | None
    why: str = ""

    @property
    def regression(self) -> bool:
        return self.verdict in REGRESSIONS


@dataclass(frozen=True)
class Comparison:
    """All changes, and what says whether the two sets can be compared at all.

    ``drift`` is the median of new / old over the rivals, whose code did not change with ours: far from 1 it is the
    machine that changed. None without rivals.
    """

    changes: tuple[Change, ...]
    drift: float | None
    old_gpus: tuple[str, ...]
    new_gpus: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.regression)

    @property
    def compared(self) -> int:
        """Rows that both sets hold."""
        return sum(change.verdict not in ("new", "gone") for change in self.changes)


def load(path: str | Path) -> tuple[list[Env], list[Row]]:
    """Runs and rows of a result file, or of every ``*.jsonl`` below a folder, in the order of their names.

    Raises:
        FileNotFoundError: no such file, or a folder without result files.
        ValueError: a line that is no JSON object.
    """
    source = Path(path)
    files = sorted(source.rglob("*.jsonl")) if source.is_dir() else [source]
    if not files:
        raise FileNotFoundError(2, "no result files (*.jsonl) below", str(source))
    environments: list[Env] = []
    rows: list[Row] = []
    for file in files:
        more_environments, more_rows = read(file)
        environments += more_environments
        rows += more_rows
    return environments, rows


def pool(environments: Iterable[Env], rows: Iterable[Row]) -> list[Pool]:
    """One entry per GPU, operator, case and provider: the rows of the commit that measured it last.

    The time is the median over the repeats; the range reaches from the smallest p20 to the largest p80. A run whose
    commit is unknown, or of changed sources, is a repeat of nothing.
    """
    runs = {environment.run_id: environment for environment in environments}
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        gpu = runs[row.run_id].gpu if row.run_id in runs else ""
        groups.setdefault((gpu, row.op, row.case, row.provider), []).append(row)
    return [_pool(group, runs) for group in groups.values()]


def _pool(group: Sequence[Row], runs: dict[str, Env]) -> Pool:
    last = group[-1]
    same = [row for row in group if _version(row, runs) == _version(last, runs)]
    timed = [row for row in same if row.time_us is not None]
    times = [row.time_us for row in timed if row.time_us is not None]
    lows = [row.time_us if row.time_p20_us is None else row.time_p20_us for row in timed]
    highs = [row.time_us if row.time_p80_us is None else row.time_p80_us for row in timed]
    errors = [row.rms_rel for row in same if row.rms_rel is not None]
    return Pool(
        gpu=runs[last.run_id].gpu if last.run_id in runs else "",
        op=last.op,
        case=last.case,
        provider=last.provider,
        time_us=statistics.median(times) if times else None,
        p20_us=min((low for low in lows if low is not None), default=None),
        p80_us=max((high for high in highs if high is not None), default=None),
        rms_rel=max(errors, default=None),
        repeats=len(same),
        note=last.note,
    )


def _version(row: Row, runs: dict[str, Env]) -> tuple[str, str]:
    """What the row was measured of: (GPU, commit), or its own run where that is not known for sure."""
    run = runs.get(row.run_id)
    if run is None or not run.commit or run.dirty:
        return ("run", row.run_id)
    return (run.gpu, run.commit)


def compare(
    old: Iterable[Pool],
    new: Iterable[Pool],
    *,
    threshold: float = THRESHOLD,
    error_threshold: float = ERROR_THRESHOLD,
    providers: str = "hpc*",
) -> Comparison:
    """Judge every provider whose name matches ``providers`` on every case.

    Args:
        old, new: from :func:`pool`.
        threshold: part of the old time by which a median may grow, 0.03 for 3 %.
        error_threshold: the same for the relative RMS error.
        providers: shell pattern of the names to judge; rivals only give the drift.

    Returns:
        Changes in the order of ``new``, then those that only ``old`` holds.
    """
    before = {entry.key: entry for entry in old}
    after = {entry.key: entry for entry in new}
    changes = [
        _change(before.get(key), entry, threshold, error_threshold)
        for key, entry in after.items()
        if fnmatch(entry.provider, providers)
    ]
    changes += [
        Change(*key, "gone", entry.time_us, None, None)
        for key, entry in before.items()
        if key not in after and fnmatch(entry.provider, providers)
    ]
    return Comparison(tuple(changes), _drift(before, after), _gpus(before), _gpus(after))


def _change(old: Pool | None, new: Pool, threshold: float, error_threshold: float) -> Change:
    if old is None:
        return Change(*new.key, "new", None, new.time_us, None)
    ratio = new.time_us / old.time_us if new.time_us and old.time_us else None
    verdict, why = _judge(old, new, ratio, threshold, error_threshold)
    return Change(*new.key, verdict, old.time_us, new.time_us, ratio, why)


def _judge(
    old: Pool, new: Pool, ratio: float | None, threshold: float, error_threshold: float
) -> tuple[Verdict, str]:
    if old.time_us is not None and new.time_us is None:
        return "lost", new.note or "no time"
    if old.time_us is None and new.time_us is not None:
        return "new", ""
    if old.rms_rel and new.rms_rel and new.rms_rel > old.rms_rel * (1.0 + error_threshold):
        return "less exact", f"rms error {old.rms_rel:.2e} to {new.rms_rel:.2e}"
    if ratio is None or None in (old.p20_us, old.p80_us, new.p20_us, new.p80_us):
        return "same", ""
    assert old.p20_us and old.p80_us and new.p20_us and new.p80_us
    if ratio > 1.0 + threshold and new.p20_us > old.p80_us:
        return "slower", f"{_range(old)} to {_range(new)} us"
    if ratio < 1.0 - threshold and new.p80_us < old.p20_us:
        return "faster", ""
    return "same", ""


def _range(entry: Pool) -> str:
    return f"{entry.p20_us:.4g}..{entry.p80_us:.4g}"


def _drift(before: dict[Key, Pool], after: dict[Key, Pool]) -> float | None:
    ratios = []
    for key, entry in after.items():
        other = before.get(key)
        if other is not None and not is_own(entry.provider) and entry.time_us and other.time_us:
            ratios.append(entry.time_us / other.time_us)
    return statistics.median(ratios) if ratios else None


def _gpus(entries: dict[Key, Pool]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.gpu for entry in entries.values() if entry.gpu))
