"""The environment of a process that runs SGLang: what is on its path, and which plugins it finds."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from functools import cache
from pathlib import Path

from serving.sets import SETS

ROOT = Path(__file__).resolve().parents[2]
GROUP = "sglang.srt.plugins"
OWN = {"hpc": "hpc.integrations.sglang:register", "hpc_moe": "hpc.integrations.sglang_moe:register"}


@cache
def _declared(own: bool) -> Path:
    """A folder that declares plugins as installed distributions do: the weights', and this package's if it is a mere
    checkout."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-serving-plugins-"))
    _declare(folder, "hpc-bench-weights", {"hpc_bench_weights": "serving.weights:register"})
    if own:
        _declare(folder, "hpc-checkout", OWN)
    return folder


def _declare(folder: Path, name: str, points: dict[str, str]) -> None:
    info = folder / f"{name.replace('-', '_')}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    text = "".join(f"{key} = {value}\n" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{text}")


def environment(name: str) -> dict[str, str]:
    """Variables for a set of backends. This package is on the path of its own sets only."""
    own = SETS[name].own
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    others = [part for part in given if Path(part).resolve() != ROOT / "src"]
    path = [str(_declared(own)), str(ROOT / "benchmarks"), *([str(ROOT / "src")] if own else []), *others]
    variables = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_PLUGINS": SETS[name].plugins, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    variables.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    return variables


def die_with_parent() -> None:
    """For a child before it runs: Linux kills it when its parent is gone, however that ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
