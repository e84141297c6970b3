"""What this machine is and what runs on it: versions, GPUs, variables. Read by `hpc env` and by result files.

Importing this module imports neither torch nor triton; versions come from the distributions' metadata.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from hpc._version import __version__

log = logging.getLogger("hpc")

# Supported versions as (major, minor): the lowest that works and the highest that the tests compile with.
TORCH_MIN, TORCH_TESTED = (2, 11), (2, 14)
TRITON_MIN, TRITON_TESTED = (3, 6), (3, 8)

# Every environment variable that the library reads. None of them selects a kernel or changes a result.
VARIABLES: dict[str, str] = {
    "HPC_RESULTS_DIR": "folder that `hpc bench` writes result files to (default benchmarks/results)",
    "HPC_WARMUP_JOBS": "kernels that `hpc warmup` compiles at the same time (default: CPU cores, at most 8)",
}


def results_dir() -> Path:
    """Folder of the result files; one subfolder per GPU."""
    return Path(os.environ.get("HPC_RESULTS_DIR") or "benchmarks/results")


def warmup_jobs() -> int:
    """Number of kernels to compile at the same time."""
    value = os.environ.get("HPC_WARMUP_JOBS")
    if not value:
        return min(8, os.cpu_count() or 1)
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"HPC_WARMUP_JOBS: expected a positive integer; got {value!r}.")
    return int(value)


# --- versions ---------------------------------------------------------------------------------------


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None. Does not import it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def minor(version: str) -> tuple[int, int]:
    """`(major, minor)` of a version string such as `2.13.0+cpu` or `3.7.0.dev1`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def triton_version() -> str | None:
    """Version of Triton under any of the names it is distributed by, or None."""
    for distribution in ("triton", "pytorch-triton", "triton-windows"):
        version = installed(distribution)
        if version:
            return version
    return None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def version_problems(torch: str | None, triton: str | None) -> list[str]:
    """One plain sentence for each version that cannot work; empty if all is well.

    Triton may be absent: then the public functions run the reference, and only GPU kernels are missing.
    """
    problems = []
    for name, found, lowest, tested in (
        ("torch", torch, TORCH_MIN, TORCH_TESTED),
        ("triton", triton, TRITON_MIN, TRITON_TESTED),
    ):
        if found is None:
            if name == "torch":
                problems.append(f"hpc {__version__} needs torch >= {_dotted(lowest)}; there is none.")
        elif minor(found) < lowest:
            problems.append(
                f"hpc {__version__} needs {name} {_dotted(lowest)} to {_dotted(tested)}; "
                f"found {name} {found}. Install a supported one: pip install '{name}>={_dotted(lowest)}'."
            )
    return problems


def version_warnings(triton: str | None) -> list[str]:
    """One plain sentence for each version that is newer than what was tested."""
    if triton is None or minor(triton) <= TRITON_TESTED:
        return []
    return [
        f"hpc {__version__} was tested with triton {_dotted(TRITON_MIN)} to {_dotted(TRITON_TESTED)}; "
        f"found triton {triton}. Kernels may fail to compile."
    ]


@lru_cache(maxsize=None)
def require_versions() -> None:
    """Raise ImportError if an installed version cannot work; warn about one that is newer than tested.

    Called when the first operator is loaded, not at `import hpc`, so that versions can always be read.
    """
    triton = triton_version()
    problems = version_problems(installed("torch"), triton)
    if problems:
        raise ImportError(" ".join(problems))
    for text in version_warnings(triton):
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def built_json() -> str:
    """JSON text with versions and, as nulls, the fields of a compiled build that a pure Python one lacks."""
    facts: dict[str, str | None] = {
        "version": __version__,
        "git-hash": "",
        "python": platform.python_version(),
        "torch": installed("torch"),
        "triton": triton_version(),
    }
    compiled = ("g++", "nvcc", "stdc++", "glibc", "cub", "cutlass", "_C")
    dates = ("built-date", "built-time", "built-ts")
    return json.dumps({**facts, **dict.fromkeys(compiled + dates)})


# --- Triton's cache ---------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Folder in which Triton keeps compiled kernels."""
    explicit = os.environ.get("TRITON_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@lru_cache(maxsize=None)
def ensure_cache_dir() -> Path:
    """Triton's cache folder, or, if that cannot be written, a private one for this process and its children.

    Triton takes no lock there (it writes aside and renames): a process that died leaves nothing to wait for.
    """
    folder = cache_dir()
    if _writable(folder):
        return folder
    private = Path(tempfile.mkdtemp(prefix="hpc-triton-"))
    os.environ["TRITON_CACHE_DIR"] = str(private)
    log.warning("Triton's cache folder %s cannot be written; kernels go to %s instead", folder, private)
    return private


# --- the machine ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    index: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_gib: float


@dataclass(frozen=True)
class Environment:
    """Facts about this machine; `rows()` gives them as pairs to print."""

    hpc: str
    python: str
    torch: str | None
    triton: str | None
    numpy: str | None
    cuda: str
    gpus: tuple[Gpu, ...]
    runs: str
    interpreter: str
    cache_dir: Path
    variables: dict[str, str | None]
    problems: tuple[str, ...] = field(default=())

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of every fact, in reading order."""
        rows = [
            ("hpc", self.hpc),
            ("python", self.python),
            ("torch", self.torch or "not installed"),
            ("triton", self.triton or "not installed"),
            ("CUDA runtime", self.cuda),
        ]
        for gpu in self.gpus:
            major, minor_ = gpu.capability
            text = f"{gpu.name}, capability {major}.{minor_}, {gpu.sm_count} SMs, {gpu.memory_gib:.0f} GiB"
            rows.append((f"GPU {gpu.index}", text))
        if not self.gpus:
            rows.append(("GPU", "none that torch can use"))
        rows += [
            ("runs here", self.runs),
            ("interpreted kernels", self.interpreter),
            ("kernel cache", str(self.cache_dir)),
        ]
        rows += [(name, value if value else "not set") for name, value in self.variables.items()]
        rows += [("problem", text) for text in self.problems]
        return rows


def _gpus() -> tuple[tuple[Gpu, ...], list[str]]:
    """CUDA devices, and what torch said if it could not reach any."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            devices = [torch.cuda.get_device_properties(index) for index in range(count)]
        except RuntimeError as error:
            return (), [str(error)]
    found = tuple(
        Gpu(index, p.name, (p.major, p.minor), p.multi_processor_count, p.total_memory / 2**30)
        for index, p in enumerate(devices)
    )
    return found, [str(warning.message) for warning in caught]


def _gpu_problems(cuda: str | None, gpus: tuple[Gpu, ...], said: list[str]) -> list[str]:
    problems = [] if gpus else said
    if not gpus and cuda is None and Path("/dev/nvidiactl").exists():
        problems.append(
            "This machine has an NVIDIA driver, but torch is a CPU build. Install a CUDA 12 or CUDA 13 build "
            "of torch; hpc uses the CUDA runtime that torch ships and needs no toolkit."
        )
    return problems


def what_runs(gpus: tuple[Gpu, ...], triton: str | None) -> str:
    """Which kernels the best GPU of the machine gets."""
    if not gpus:
        return "reference only (no GPU)"
    best = max(gpu.capability for gpu in gpus)
    if triton is None:
        return "nothing: Triton is not installed"
    if any(gpu.capability[0] == 9 for gpu in gpus):
        return "GPU kernels on SM90 (Gluon), portable Triton kernels"
    if best >= (8, 0):
        return "portable Triton kernels"
    return f"nothing: GPUs need compute capability 8.0 or newer, found {_dotted(best)}"


def interpreter_status(triton: str | None, numpy: str | None) -> str:
    """Whether Triton's interpreter can run the portable kernels on the CPU (`TRITON_INTERPRET=1`)."""
    if triton is None:
        return "no: Triton is not installed"
    if numpy is None:
        return "no: needs numpy"
    # Triton 3.6 turns run-time loop bounds into ints in a way that numpy 2.4 refuses.
    if minor(triton) <= (3, 6) and minor(numpy) >= (2, 4):
        return f"no: triton {triton} needs numpy < 2.4; found {numpy}"
    return "yes"


def collect() -> Environment:
    """Look at the machine. Never fails for want of a GPU."""
    torch_version, triton, numpy = installed("torch"), triton_version(), installed("numpy")
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    said: list[str] = []
    if torch_version is not None:
        import torch

        cuda = torch.version.cuda
        gpus, said = _gpus()
    problems = version_problems(torch_version, triton) + version_warnings(triton)
    problems += _gpu_problems(cuda, gpus, said)
    return Environment(
        hpc=__version__,
        python=f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        torch=torch_version,
        triton=triton,
        numpy=numpy,
        cuda=f"{cuda}, shipped with torch" if cuda else "none: torch is a CPU build",
        gpus=gpus,
        runs=what_runs(gpus, triton),
        interpreter=interpreter_status(triton, numpy),
        cache_dir=cache_dir(),
        variables={name: os.environ.get(name) for name in VARIABLES},
        problems=tuple(problems),
    )
