"""Compilation in parallel processes: what `hpc warmup` and `hpc tune` do before the GPU is needed.

The processes share Triton's cache on disk with this one, which finds there what they compiled.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from hpc.common import env
from hpc.common.operator import Progress

Job = tuple[str, tuple[Any, ...]]  # name for the progress bar, arguments


def compile_all(
    function: Callable[..., None], jobs: Sequence[Job], progress: Progress | None = None
) -> list[tuple[str, BaseException]]:
    """Call a function that compiles, for every job, in `HPC_WARMUP_JOBS` processes.

    Args:
        function: importable by name, as its arguments must be picklable.
        jobs: names and arguments.
        progress: called with (name, done, total) after each job.

    Returns:
        (name, error) of the jobs that failed; the others are done all the same.
    """
    failed = []
    # a fresh interpreter each: CUDA does not survive a fork, and the parent may have launched already
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(env.warmup_jobs(), max(1, len(jobs))), context, _start) as pool:
        futures = {pool.submit(function, *arguments): name for name, arguments in jobs}
        for done, future in enumerate(as_completed(futures), start=1):
            if (error := future.exception()) is not None:
                failed.append((futures[future], error))
            if progress is not None:
                progress(futures[future], done, len(jobs))
    return failed


def compile_or_raise(
    function: Callable[..., None], jobs: Sequence[Job], progress: Progress | None = None
) -> None:
    """As `compile_all`; raises the first error."""
    for _, error in compile_all(function, jobs, progress):
        raise error


def _start() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: the interpreter compiles nothing
    import torch

    torch.set_num_threads(1)
