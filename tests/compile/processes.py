"""Scripts of this folder in a process of their own, under one Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc.common import env

INSTALLED = "3.6.0"  # ships with torch 2.11
NEWEST = "3.8.0"
SHARED_MEMORY = 227 * 1024  # bytes a CTA of SM90 may use


def run(version: str, root: Path, environ: dict[str, str], cache: Path, arguments: list[str]) -> str:
    """Output of Python with `arguments` under one Triton, its cache in `cache`; skips where that Triton is absent."""
    environ = {**environ, "TRITON_CACHE_DIR": str(cache)}
    if version != env.triton_version():
        folder = root / ".triton" / version
        if not folder.is_dir():
            pytest.skip(f"Triton {version} is neither installed nor in {folder}")
        environ["PYTHONPATH"] = os.pathsep.join([str(folder), environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def reports(
    version: str,
    root: Path,
    environ: dict[str, str],
    cache: Path,
    script: str,
    names: list[str] | None = None,
) -> list[dict[str, Any]]:
    """What a script of this folder prints, a JSON object a line; it takes names of its cases, all by default."""
    said = run(version, root, environ, cache, [str(root / "tests/compile" / script), *(names or [])])
    found = [json.loads(line) for line in said.splitlines()]
    assert {report["triton"] for report in found} == {version}
    return found


def few_or_all(few: list[str], newest: list[str] | None = None) -> pytest.MarkDecorator:
    """Parameters `version` and `names`: a few cases always; when slow tests run, all (no names), and the newest Triton
    with `newest`, or all."""
    slow = pytest.mark.slow
    rows = [
        (INSTALLED, few), pytest.param(INSTALLED, [], marks=slow), pytest.param(NEWEST, newest or [], marks=slow),
    ]  # fmt: skip
    return pytest.mark.parametrize(("version", "names"), rows, ids=["few", "all", "newest"])
