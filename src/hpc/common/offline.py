"""Compiling for a GPU that is not there: a stand-in for Triton's driver that compiles and launches nothing.

Under `compiling_for("sm90")` a Triton launch goes its usual way - specialisation, compilation, Triton's cache - up to
the launch itself, which does nothing. The cache entries are those that the same launch finds on such a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TARGET = re.compile(r"sm(\d{2,3})a?")
_SHARED = {90: 232448, 100: 232448}  # bytes of shared memory a CTA may use, by capability
_SHARED_ELSEWHERE = 101376


class _NullLauncher:
    """What Triton builds once a kernel is compiled."""

    def __init__(self, src: Any, metadata: Any) -> None: ...

    def __call__(self, *args: Any) -> None: ...


class _NullUtils:
    """Device properties and module loading, as far as a first launch asks for them."""

    def __init__(self, shared: int) -> None:
        self.shared = shared

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024  # module, function, registers, spills, threads a block at most


class NullDriver:
    """A device of one target that never runs anything."""

    launcher_cls = _NullLauncher

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        match = _TARGET.fullmatch(target)
        if match is None or int(match[1]) < 80:
            raise ValueError(f"unknown target {target!r}: expected sm80 or newer, such as sm90")
        capability = int(match[1])
        shared = _SHARED.get(capability, _SHARED_ELSEWHERE)
        self.utils = _NullUtils(shared)
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def compiling_for(target: str) -> Iterator[None]:
    """Triton launches inside compile for `target` (such as "sm90") and run nothing.

    One target a process, and no real launches in it: a kernel keeps the target that it met first.
    """
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(NullDriver(target))
    try:
        yield
    finally:
        driver._active = before
