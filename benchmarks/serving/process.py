"""The parent's side of a worker: start it, ask it, give up on it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serving.environment import die_with_parent, environment


class Gone(RuntimeError):
    """A worker died, took too long, or answered that a command failed."""


class Worker:
    """A process that runs `serving.worker` with one set of backends. Loading has begun when this returns."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serving.worker", json.dumps(arguments)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log.open("w"), env=environment(name), start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip
        self._rest = b""
        self.facts: dict[str, Any] = {}

    def loaded(self, deadline: float) -> dict[str, Any]:
        """Wait for the model; what runs in the worker."""
        self.facts = self._answer(deadline)
        return self.facts

    def ask(self, do: str, limit: float = 120.0, **values: Any) -> dict[str, Any]:
        """Run a command. Raises Gone if it fails; after a failure of time or process the worker is of no more use."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Gone(f"{self.name}: {error}; {self._last_words()}") from error
        return self._answer(time.monotonic() + limit)

    def _answer(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            ready = select.select([self._process.stdout], [], [], max(0.0, left))[0]
            if not ready:
                self.stop()
                raise Gone(f"{self.name}: no answer in time; {self._last_words()}")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                self.stop()
                raise Gone(f"{self.name}: the process ended; {self._last_words()}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if not found.pop("ok"):
            raise Gone(f"{self.name}: {found['error']}; {self._last_words()}")
        return found

    def _last_words(self, lines: int = 12) -> str:
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"end of {self.log}:\n" + "\n".join(text)

    def stop(self) -> None:
        """End the process and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()
