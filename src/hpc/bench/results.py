"""Result files: one JSON object a line, an ``env`` line before the rows of each run.

Reports and the README's tables are generated from these files.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hpc._version import __version__
from hpc.common import arch, env


@dataclass(frozen=True)
class Row:
    """One provider on one case. Times in microseconds; None where nothing could be measured.

    ``floor_kind`` names the bound ("read", "bf16", "fp8"); ``rms_rel`` and ``max_rel`` are errors against
    float64; ``note`` says why a time is missing, or what to know about it.
    """

    op: str
    case: str
    provider: str
    time_us: float | None
    time_p20_us: float | None
    time_p80_us: float | None
    floor_us: float | None
    floor_kind: str
    rms_rel: float | None
    max_rel: float | None
    run_id: str
    note: str = ""

    @property
    def fraction_of_floor(self) -> float | None:
        """floor / time: 1.0 is the hardware's limit."""
        return self.floor_us / self.time_us if self.floor_us and self.time_us else None


@dataclass(frozen=True)
class Env:
    """Where and with what a run was made."""

    gpu: str
    driver: str
    torch: str
    triton: str
    hpc: str
    commit: str
    dirty: bool
    date: str
    run_id: str


def current_env(device: torch.device | str) -> Env:
    """Describe this machine and checkout, with a fresh run id."""
    commit, dirty = git_state(Path(__file__).resolve().parent)
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Env(
        gpu=arch.device_name(device),
        driver=driver_version() if arch.is_cuda(device) else "",
        torch=torch.__version__,
        triton=env.triton_version() or "",
        hpc=__version__,
        commit=commit,
        dirty=dirty,
        date=date,
        run_id=f"{date[:10]}-{uuid.uuid4().hex[:8]}",
    )


def git_state(folder: Path) -> tuple[str, bool]:
    """(commit, has uncommitted changes) of the checkout around ``folder``; ("", False) outside of one."""

    def git(*args: str) -> str:
        command = ["git", "-c", "safe.directory=*", "-C", str(folder), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return "", False


def driver_version() -> str:
    """Version of the NVIDIA driver, or "" if ``nvidia-smi`` cannot say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.splitlines()[0].strip() if output.strip() else ""


def gpu_slug(name: str) -> str:
    """Folder name of a GPU: "NVIDIA H200" -> "H200"."""
    return re.sub(r"[^A-Za-z0-9]+", "-", re.sub(r"^NVIDIA\s+", "", name)).strip("-") or "unknown"


def result_path(op: str, device: torch.device | str, root: Path | None = None) -> Path:
    """``<root>/<GPU>/<operator>.jsonl``; root defaults to the folder that ``hpc env`` shows."""
    return (root or env.results_dir()) / gpu_slug(arch.device_name(device)) / f"{op}.jsonl"


class Writer:
    """Appends a run to a file; every row is on disk once written, so an interrupted run keeps its rows."""

    def __init__(self, path: str | Path, environment: Env) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self._put({"env": asdict(environment)})

    def write(self, row: Row) -> None:
        """Append one row; an empty note is left out."""
        values = asdict(row)
        if not row.note:
            del values["note"]
        self._put({key: _short(value) for key, value in values.items()})

    def _put(self, values: dict[str, object]) -> None:
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _short(value: object) -> object:
    """Five significant digits; JSON has no infinity, so a non-finite number becomes null."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if abs(value) < float("inf") else None


def read(path: str | Path) -> tuple[list[Env], list[Row]]:
    """All runs and rows of a file, in the order written. Unknown keys are ignored, missing ones are None.

    Raises ``ValueError`` naming the line that is no JSON object.
    """
    environments: list[Env] = []
    rows: list[Row] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object")
        if "env" in values:
            environments.append(Env(**{f.name: values["env"].get(f.name) for f in fields(Env)}))
        else:
            known: dict[str, Any] = {f.name: values.get(f.name) for f in fields(Row)}
            rows.append(Row(**{**known, "note": known["note"] or ""}))
    return environments, rows


def stamp_commit(path: str | Path, commit: str, dirty: bool = False) -> int:
    """Fill in the commit of runs made where the sources were no checkout; returns how many were."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    count = 0
    for index, line in enumerate(lines):
        if line.startswith('{"env"'):
            values = json.loads(line)
            if not values["env"].get("commit"):
                values["env"].update(commit=commit, dirty=dirty)
                lines[index] = json.dumps(values)
                count += 1
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return count


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each (operator, case, provider), in the order of first appearance."""
    newest: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        newest[row.op, row.case, row.provider] = row
    return list(newest.values())
