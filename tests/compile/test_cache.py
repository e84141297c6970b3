"""Compiling as servers do: restarts, killed compilers, folders that cannot be written, machines without a toolkit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compile

# Compiles the schedule kernel for a GPU that is not there, as its first launch would; prints what Triton's cache did.
PROGRAM = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
sys.path.insert(0, sys.argv[1])
import compile_decode, triton
from hpc.common.offline import compiling_for
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **rest: hits.append(cache_hit)
print("ready", flush=True)
with compiling_for("sm90"):
    compile_decode.launch_assign()
print(json.dumps(hits))
"""


@pytest.fixture
def command(root: Path) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(root / "tests/compile")]


def run(command: list[str], environ: dict[str, str], cache: Path, **more: Any) -> tuple[list[bool], str]:
    """(cache hits by kernel, log)"""
    environ = {**environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, done.stderr
    hits: list[bool] = json.loads(done.stdout.splitlines()[-1])
    return hits, done.stderr


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_fr_93_a_second_start_compiles_nothing(
    command: list[str], clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """Whatever the working folder, the home and the seed of Python's hashes are."""
    cache = tmp_path / "cache"
    first, _ = run(command, clean_environ, cache)
    before = files(cache)
    again = {**clean_environ, "HOME": str(tmp_path), "PYTHONHASHSEED": "7", "CUDA_VISIBLE_DEVICES": ""}
    second, _ = run(command, again, cache, cwd=tmp_path)
    assert first == [False] and second == [True]
    assert files(cache) == before, "nothing is written either"


def test_fr_87_a_killed_compiler_holds_up_nobody(
    command: list[str], clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """There is no lock: what a dead process left half-way is neither waited for nor used."""
    cache = tmp_path / "cache"
    environ = {**clean_environ, "TRITON_CACHE_DIR": str(cache)}
    victim = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert victim.stdout is not None and victim.stdout.readline() == "ready\n"
    time.sleep(0.3)
    victim.kill()
    victim.wait()
    victim.stdout.close()
    started = time.monotonic()
    hits, _ = run(command, clean_environ, cache)
    assert len(hits) == 1 and time.monotonic() - started < 200
    assert run(command, clean_environ, cache)[0] == [True]


def test_fr_87_a_cache_that_cannot_be_written(
    command: list[str], clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """A file in the place of the folder stands for a read-only mount; it stops root as well."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    private = tmp_path / "private"
    private.mkdir()
    hits, log = run(command, {**clean_environ, "TMPDIR": str(private)}, blocked / "cache")
    assert hits == [False] and "cannot be written" in log
    assert files(private), "kernels went to a folder of this process's own"


def test_fr_92_no_cuda_toolkit_is_needed(
    command: list[str], clean_environ: dict[str, str], tmp_path: Path
) -> None:
    """Triton brings its assembler, torch the runtime: nothing is looked for on the PATH or in a CUDA folder."""
    environ = {name: value for name, value in clean_environ.items() if "CUDA" not in name}
    hits, _ = run(command, {**environ, "PATH": str(tmp_path)}, tmp_path / "cache")
    assert hits == [False]


def test_fr_86_import_without_a_gpu_and_versions_can_be_read(clean_environ: dict[str, str]) -> None:
    """Then a call runs on the CPU."""
    code = (
        "import hpc, torch, json\n"
        "assert json.loads(hpc.__built_json__)['version'] == hpc.__version__\n"
        "i = torch.int32\n"
        "cache = torch.zeros(2, 16, 1, 64).bfloat16()\n"
        "out = hpc.attention_decode_bf16(torch.zeros(1, 4, 64).bfloat16(), cache, cache,\n"
        "    torch.zeros(1, 1, dtype=i), torch.ones(1, dtype=i), new_kv_included=True)\n"
        "assert out.shape == (1, 4, 64) and not torch.cuda.is_initialized()\n"
    )
    environ = {**clean_environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
