"""The result file: one JSON object a line, an `env` line before the lines of a run, each on disk once written."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc.bench import results
from hpc.common import arch

RESULTS = Path(__file__).parent / "results"


class Records:
    """Appends a run to `path`, by default `results/<GPU>.jsonl` beside this file; also prints a line for each."""

    def __init__(self, path: Path | None = None) -> None:
        self.environment = results.current_env("cuda" if arch.gpu_available() else "cpu")
        self.path = path or RESULTS / f"{results.gpu_slug(self.environment.gpu)}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self._put({"env": asdict(self.environment)})

    def write(self, kind: str, **values: Any) -> None:
        """Append a line of a kind: "engine", "bench", "check", "profile", "load", "failure"."""
        self._put({"kind": kind, **values, "run_id": self.environment.run_id})
        shown = {key: value for key, value in values.items() if key not in ("prefill", "decode", "lens")}
        print(kind, " ".join(f"{key}={value}" for key, value in shown.items()), flush=True)

    def _put(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


def read(path: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """(environments by run, lines in order) of a result file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    environments = {line["env"]["run_id"]: line["env"] for line in lines if "env" in line}
    return environments, [line for line in lines if "env" not in line]
