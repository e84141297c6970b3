"""Which tests run on this machine, and what was left out.

A test states its tier by a marker. Tests of a tier that cannot run here are skipped with the reason, and the
counts are printed at the end. Without a GPU, Triton kernels of this process run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from hpc.common import env

ROOT = Path(__file__).resolve().parents[1]


def _gpu_count() -> int:
    """CUDA devices that the kernels support."""
    if not torch.cuda.is_available():
        return 0
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return sum(capability >= (8, 0) for capability in capabilities)


GPUS = _gpu_count()
if GPUS == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when it is first imported
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    # By its path: with this folder on sys.path, tests/sglang would pass for the package sglang.
    spec = importlib.util.spec_from_file_location(
        "fast_interpreter", Path(__file__).with_name("fast_interpreter.py")
    )
    assert spec is not None and spec.loader is not None
    fast_interpreter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fast_interpreter)
    fast_interpreter.install()

try:
    from hypothesis import settings
except ImportError:
    pass
else:
    # Times vary with the load of the machine; a slow example is no failure.
    settings.register_profile("hpc", deadline=None, print_blob=True)
    settings.load_profile("hpc")


def _why_not_gpu() -> str | None:
    if GPUS == 0:
        return "no CUDA GPU of capability 8.0 or newer"
    return "TRITON_INTERPRET=1 is set" if INTERPRETED else None


def _why_not_interpret() -> str | None:
    status = env.interpreter_status(env.triton_version(), env.installed("numpy"))
    if status != "yes":
        return f"Triton's interpreter: {status}"
    return None if INTERPRETED else "kernels of this process are compiled; run with TRITON_INTERPRET=1"


def _left_out() -> dict[str, str]:
    """Tier -> why it cannot run here."""
    reasons = {
        "gpu": _why_not_gpu(),
        "multi_gpu": _why_not_gpu() or (None if GPUS >= 2 else "needs two or more GPUs"),
        "interpret": _why_not_interpret(),
        "compile": None if env.triton_version() else "Triton is not installed",
        "sglang": None if importlib.util.find_spec("sglang") else "SGLang is not installed",
    }
    return {tier: reason for tier, reason in reasons.items() if reason}


LEFT_OUT = _left_out()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also tests that take minutes on a CPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = config.getoption("--slow")
    for item in items:
        if item.get_closest_marker("slow") and not slow:
            item.add_marker(pytest.mark.skip(reason="slow: minutes on a CPU; run with --slow"))
        for tier, reason in LEFT_OUT.items():
            if item.get_closest_marker(tier):
                item.add_marker(pytest.mark.skip(reason=f"{tier}: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    terminalreporter.section("left out on this machine")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:5d} {'test ' if count == 1 else 'tests'}  {reason}")


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return ROOT


@pytest.fixture
def clean_environ() -> dict[str, str]:
    """Environment for a process of its own: the source on the path, no interpreter unless asked for."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT / "src"), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    return environ


@pytest.fixture
def device() -> torch.device:
    """Where operators run in this process: the current GPU, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if GPUS and not INTERPRETED else torch.device("cpu")
    )
