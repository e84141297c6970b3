"""Processes for the scripts of this folder: each starts where torch and Triton are imported already."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

COUNT = 2
MODULES = ["torch", "triton.compiler", "triton.language", "triton.experimental.gluon.language.nvidia.hopper"]


def context() -> ForkServerContext:
    """Fresh processes, forked from one that has imported `MODULES`: 2.5 s less a process.

    Call it after TRITON_INTERPRET is gone from the environment.
    """
    multiprocessing.set_forkserver_preload(MODULES)
    return multiprocessing.get_context("forkserver")
