"""`hpc.warmup`: compile before serving, so that no call and no graph capture meets the compiler."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable

import torch

from hpc.common import arch, env, registry
from hpc.common.operator import Progress

log = logging.getLogger("hpc")


def warmup(
    ops: str | Iterable[str] | None = None,
    device: torch.device | str | int | None = None,
    progress: Progress | None = None,
) -> int:
    """Compile the kernels that calls on a device can reach, before the first of them.

    Triton keeps what it compiled in its cache folder, so a second start only loads.

    Args:
        ops: names of operators (`attention.decode`), one or several; None means all.
        device: a CUDA device, or the name of a target to compile for on a machine without a GPU (`sm90`);
            None means the current CUDA device.
        progress: called as `progress(label, done, total)` after each kernel.

    Returns:
        Number of kernels that are ready. Zero, with a warning, if there is no GPU and no target is named.

    Shape: takes no tensors.

    Raises:
        KeyError: an operator that does not exist.
        UnsupportedDevice: a GPU that no kernel supports.

    Source: own.
    """
    names = registry.names() if ops is None else [ops] if isinstance(ops, str) else list(ops)
    operators = [registry.get(name) for name in names]
    if device is None and not arch.gpu_available():
        warnings.warn(
            "hpc.warmup: there is no GPU here, so there is nothing to compile for; name a target, "
            "for example hpc.warmup(device='sm90').",
            RuntimeWarning,
            stacklevel=2,
        )
        return 0
    target = _target(device)
    env.ensure_cache_dir()
    ready = 0
    for operator in operators:
        count = operator.warmup(target, progress)
        log.info("hpc.warmup: %s: %d kernels ready for %s", operator.name, count, target)
        ready += count
    return ready


def _target(device: torch.device | str | int | None) -> torch.device | str:
    """A CUDA device that is good enough, or the target's name as given."""
    if isinstance(device, str) and not device.startswith("cuda"):
        return device
    resolved = torch.device("cuda", arch.device_index("cuda" if device is None else device))
    arch.require_gpu("warmup", resolved)
    return resolved
