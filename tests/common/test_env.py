"""What `hpc env` says of a machine, version checks, and Triton's cache folder."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from hpc.common import env

H200 = env.Gpu(0, "NVIDIA H200", (9, 0), 132, 139.8)
B200 = env.Gpu(1, "NVIDIA B200", (10, 0), 148, 178.0)
T4 = env.Gpu(0, "NVIDIA T4", (7, 5), 40, 15.0)


def test_collect_never_fails_and_names_what_runs() -> None:
    found = env.collect()
    rows = dict(found.rows())
    assert rows["hpc"] == found.hpc
    assert rows["runs here"] == found.runs
    assert set(env.VARIABLES) <= set(rows)


def test_at_most_five_variables_and_no_hidden_one(root: Path) -> None:
    assert len(env.VARIABLES) <= 5
    assert all(name.startswith("HPC_") for name in env.VARIABLES)
    used = {
        name
        for path in (root / "src").rglob("*.py")
        for name in re.findall(
            r"(?<!\.)\bHPC_[A-Z0-9_]+\b", path.read_text()
        )  # not attributes of other packages
    }
    assert used == set(env.VARIABLES)


@pytest.mark.parametrize(
    ("gpus", "triton", "text"),
    [
        ((), "3.6.0", "reference only (no GPU)"),
        ((H200,), "3.6.0", "GPU kernels on SM90 (Gluon), portable Triton kernels"),
        ((B200, H200), "3.6.0", "GPU kernels on SM90 (Gluon), portable Triton kernels"),
        ((B200,), "3.6.0", "portable Triton kernels"),
        ((T4,), "3.6.0", "nothing: GPUs need compute capability 8.0 or newer, found 7.5"),
        ((H200,), None, "nothing: Triton is not installed"),
    ],
)
def test_what_runs(gpus: tuple[env.Gpu, ...], triton: str | None, text: str) -> None:
    assert env.what_runs(gpus, triton) == text


@pytest.mark.parametrize(
    ("torch", "triton", "says"),
    [
        ("2.11.0", "3.6.0", []),
        ("2.14.1+cu130", "3.8.2", []),
        ("3.0.0", None, []),
        ("2.10.1", "3.6.0", ["torch 2.11 to 2.14; found torch 2.10.1"]),
        ("2.13.0", "3.5.1", ["triton 3.6 to 3.8; found triton 3.5.1"]),
        (None, None, ["needs torch >= 2.11; there is none"]),
        ("2.9.0", "3.4.0", ["found torch 2.9.0", "found triton 3.4.0"]),
    ],
)
def test_version_problems(torch: str | None, triton: str | None, says: list[str]) -> None:
    problems = env.version_problems(torch, triton)
    assert len(problems) == len(says)
    for problem, text in zip(problems, says, strict=True):
        assert text in problem


def test_newer_than_tested_is_a_warning() -> None:
    assert env.version_warnings("3.8.9") == []
    assert env.version_warnings(None) == []
    assert "found triton 3.9.0" in env.version_warnings("3.9.0")[0]


@pytest.mark.parametrize(
    ("triton", "numpy", "status"),
    [
        ("3.6.0", "2.3.5", "yes"),
        ("3.8.0", "2.4.0", "yes"),
        ("3.6.0", "2.4.1", "no: triton 3.6.0 needs numpy < 2.4; found 2.4.1"),
        ("3.6.0", None, "no: needs numpy"),
        (None, "2.3.5", "no: Triton is not installed"),
    ],
)
def test_interpreter_status(triton: str | None, numpy: str | None, status: str) -> None:
    assert env.interpreter_status(triton, numpy) == status


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0.dev20260101", "2.13", "2.13rc1"])
def test_minor(version: str) -> None:
    assert env.minor(version) == (2, 13)


def test_warmup_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPC_WARMUP_JOBS", raising=False)
    assert 1 <= env.warmup_jobs() <= 8
    monkeypatch.setenv("HPC_WARMUP_JOBS", "3")
    assert env.warmup_jobs() == 3
    monkeypatch.setenv("HPC_WARMUP_JOBS", "many")
    with pytest.raises(ValueError, match="expected a positive integer; got 'many'"):
        env.warmup_jobs()


def test_results_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HPC_RESULTS_DIR", str(tmp_path))
    assert env.results_dir() == tmp_path
    monkeypatch.delenv("HPC_RESULTS_DIR")
    assert env.results_dir() == Path("benchmarks/results")


@pytest.fixture
def fresh_cache_choice() -> object:
    env.ensure_cache_dir.cache_clear()
    yield None
    env.ensure_cache_dir.cache_clear()


def test_writable_cache_folder_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_cache_choice: object
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert env.ensure_cache_dir() == tmp_path / "cache"


def test_unwritable_cache_folder_gets_a_private_one(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fresh_cache_choice: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file where the folder should be stands for a read-only mount; it stops root as well."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocked / "cache"))
    chosen = env.ensure_cache_dir()
    assert chosen.is_dir()
    assert os.environ["TRITON_CACHE_DIR"] == str(chosen)
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700, "compiled code must not be writable by others"
    assert "cannot be written" in caplog.text
    chosen.rmdir()
