"""Launching Triton kernels with little Python: Triton's own cache and launcher, without its argument binder.

The first call of a `Kernel` goes through Triton's JIT and keeps the compiled kernel; later calls hand the arguments
straight to its launcher (3-4 us instead of 10-20 us). A `Kernel` therefore belongs to one device and one set of
compile-time facts: its owner keys it by everything that Triton would specialise on.

Triton 3.6 wraps the compiled launcher in two Python functions: one asks for scratch that our kernels do not have, one
walks over all arguments for tensor descriptors and encodes each anew (5 us for 35 arguments and two descriptors).
Where the launcher is built that way, later calls go to the compiled one (`_native`), and `descriptor` encodes an
address once. Any other Triton gets the arguments through its own wrappers.
"""

from __future__ import annotations

from typing import Any

import torch

from hpc.common.env import ensure_cache_dir

_MAX_DESCRIPTORS = 1024  # of a kernel: two a layer


class Kernel:
    """One compiled kernel on one device."""

    __slots__ = ("_args", "_descriptors", "_encode", "_fn", "_name", "_options", "_run")

    def __init__(self, fn: Any, name: str, **options: Any) -> None:
        self._fn = fn
        self._name = name
        self._options = options
        self._run: Any = None
        self._args: tuple[
            Any, ...
        ] = ()  # what the launcher takes between the stream and the kernel's arguments
        self._encode: Any = None
        self._descriptors: dict[tuple[int, int, int], tuple[Any, ...]] = {}

    @property
    def compiled(self) -> bool:
        """Whether later calls bypass Triton's argument binder."""
        return self._run is not None

    def __call__(self, grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]) -> None:
        """Launch on `stream` (a raw handle) with all arguments of the kernel in order, compile-time ones included.

        Once `compiled`, pointers may be addresses, and what `descriptor` returns takes the place of a descriptor.
        """
        if self._run is None:
            self._first_call(grid, args)
        else:
            self._run(*grid, stream, *self._args, *args)

    def descriptor(
        self, number: int, address: int, base: torch.Tensor, shape: list[int], strides: list[int]
    ) -> tuple[Any, ...]:
        """Arguments for the tensor descriptor that is the kernel's descriptor argument `number`, counted from 0.

        Kept by address and rows: for one `number` the rest of the shape, the strides and the dtype must be the same in
        every call.
        """
        key = (number, address, shape[0])
        found = self._descriptors.get(key)
        if found is None:
            described = TmaTensor(base, shape, strides)
            if self._encode is None:
                return (described,)
            if len(self._descriptors) >= _MAX_DESCRIPTORS:
                self._descriptors.clear()
            found = self._descriptors[key] = tuple(self._encode(number, described))
        return found

    def _first_call(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"hpc.{self._name}: this shape has not run yet and kernels are not compiled inside a CUDA graph "
                "capture. Run the call once eagerly before capture, or call hpc.warmup()."
            )
        ensure_cache_dir()
        compiled = self._fn[grid](*args, **self._options)
        self._keep(compiled.run, compiled.function, compiled.packed_metadata)

    def _keep(self, launcher: Any, function: Any, metadata: Any) -> None:
        """Launch by `launcher` from now on: by its compiled part if that is known."""
        native, self._encode = _native(launcher)
        hooks = (None, None, None)  # launch metadata, enter and exit hooks
        if native is None:
            self._run, self._args = launcher, (function, metadata, *hooks)
        else:
            flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
            scratch = (None, None)  # global and profile
            self._run, self._args = native, (function, *flags, *scratch, metadata, *hooks)


def _native(launcher: Any) -> tuple[Any, Any]:
    """(compiled launcher, encoder of descriptors or None) of Triton 3.6; (None, None) where it is built another way."""
    call = getattr(type(launcher).__call__, "__code__", None)
    launch = getattr(launcher, "launch", None)
    asked = ("self", "gridX", "gridY", "gridZ", "stream", "function", "args")
    if call is None or call.co_varnames[: len(asked)] != asked or call.co_argcount != len(asked) - 1:
        return None, None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None, None
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if "launcher" not in names:
        return launch, None
    cells = {name: cell.cell_contents for name, cell in zip(names, launch.__closure__ or (), strict=True)}
    make = launch.__globals__.get("make_tensordesc_arg")
    metas = cells.get("tensordesc_meta")
    if make is None or not metas or None in metas:
        return None, None
    return cells["launcher"], lambda number, described: make(described, metas[number])


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
    stream: int = torch._C._cuda_getCurrentRawStream(device_index)
    return stream


def current_device() -> int:
    """Index of the current CUDA device, where CUDA is known to be up: `torch.cuda.current_device` asks first."""
    index: int = torch._C._cuda_getDevice()
    return index
