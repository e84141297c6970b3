"""Compiling for a GPU that is not there: a stand-in for Triton's driver that compiles and launches nothing.

Under `compiling_for("sm90")` a Triton launch goes its usual way - specialisation, compilation, Triton's cache - up to
the launch itself, which does nothing. The cache entries are those that the same launch finds on such a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Name -> (compute capability, shared memory of a CTA in bytes).
TARGETS: dict[str, tuple[int, int]] = {
    "sm80": (80, 166912),
    "sm89": (89, 101376),
    "sm90": (90, 232448),
    "sm100": (100, 232448),
}


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

        if target not in TARGETS:
            raise ValueError(f"unknown target {target!r}; known are {', '.join(TARGETS)}")
        capability, shared = TARGETS[target]
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
    """Triton launches inside compile for `target` and run nothing. Not for a process that also launches for real:
    a kernel keeps what it met first."""
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(NullDriver(target))
    try:
        yield
    finally:
        driver._active = before
