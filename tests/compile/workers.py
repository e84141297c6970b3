"""Processes for the scripts of this folder: one a case, each starts where torch and Triton are imported already."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from typing import Any

COUNT = 2
MODULES = ["torch", "triton.compiler", "triton.language", "triton.experimental.gluon.language.nvidia.hopper"]


def print_each(case: Callable[[str], Any], names: Sequence[str]) -> None:
    """`case(name)` for each name in a process of its own, since a kernel keeps what it was first compiled for; what it
    returns, a dict or a list of such, as lines of JSON, first come first.

    Processes are forked from one that has imported `MODULES`: 2.5 s less each. TRITON_INTERPRET must be gone from the
    environment by then.
    """
    multiprocessing.set_forkserver_preload(MODULES)
    context = multiprocessing.get_context("forkserver")

    def alone(name: str) -> Any:
        with ProcessPoolExecutor(1, context) as process:
            return process.submit(case, name).result()

    with ThreadPoolExecutor(COUNT) as threads:
        for job in as_completed([threads.submit(alone, name) for name in names]):
            found = job.result()
            for report in found if isinstance(found, list) else [found]:
                print(json.dumps(report), flush=True)
