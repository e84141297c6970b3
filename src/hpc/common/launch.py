"""Launching Triton kernels with little Python: Triton's own cache and launcher, without its argument binder.

The first call of a `Kernel` goes through Triton's JIT and keeps the compiled kernel; later calls hand the arguments
straight to its launcher (3-4 us instead of 10-20 us). A `Kernel` therefore belongs to one device and one set of
compile-time facts: its owner keys it by everything that Triton would specialise on.
"""

from __future__ import annotations

from typing import Any

import torch

from hpc.common.env import ensure_cache_dir


class Kernel:
    """One compiled kernel on one device."""

    __slots__ = ("_args", "_fn", "_name", "_options", "_run")

    def __init__(self, fn: Any, name: str, **options: Any) -> None:
        self._fn = fn
        self._name = name
        self._options = options
        self._run: Any = None
        self._args: tuple[Any, ...] = ()

    @property
    def compiled(self) -> bool:
        """Whether later calls bypass Triton's argument binder."""
        return self._run is not None

    def __call__(self, grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        """Launch on `stream` (a raw handle) with all arguments of the kernel in order, compile-time ones included."""
        if self._run is None:
            self._first_call(grid, args)
        else:
            self._run(*grid, stream, *self._args, None, None, None, *args)

    def _first_call(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"hpc.{self._name}: this shape has not run yet and kernels are not compiled inside a CUDA graph "
                "capture. Run the call once eagerly before capture, or call hpc.warmup()."
            )
        ensure_cache_dir()
        compiled = self._fn[grid](*args, **self._options)
        self._args = (compiled.function, compiled.packed_metadata)
        self._run = compiled.run


class TmaTensor:
    """What Triton's launcher reads of a host-side tensor descriptor, without the validation of its own class."""

    __slots__ = ("base", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int]) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.padding = "zero"
        self.round_f32_to_tf32 = False


def raw_stream(device_index: int) -> int:
    """Handle of the current stream of a device."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))
