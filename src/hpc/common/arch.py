"""Facts about a device, cached per device index.

Nothing here runs at import, and no function assumes device 0: a missing index means the current device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import torch

from hpc.common.errors import UnsupportedDevice

DeviceLike: TypeAlias = torch.device | str | int

# What a schedule is made for where there is no GPU to ask: an H100 or H200 SXM.
REFERENCE_SM_COUNT = 132

MIN_CAPABILITY = (8, 0)


@lru_cache(maxsize=None)
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def device_index(device: DeviceLike) -> int:
    """Index of a CUDA device; `cuda` without an index is the current device."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def is_cuda(device: DeviceLike) -> bool:
    """True for a CUDA device; asks the device no question."""
    return isinstance(device, int) or torch.device(device).type == "cuda"


def gpu_available() -> bool:
    """True if torch can see a CUDA device. Creates no context."""
    try:
        return torch.cuda.is_available()
    except RuntimeError:  # a broken driver is a machine without a GPU; `hpc env` shows the reason
        return False


def sm_count(device: DeviceLike) -> int:
    """Number of streaming multiprocessors; `REFERENCE_SM_COUNT` for a device that is no GPU."""
    if not is_cuda(device):
        return REFERENCE_SM_COUNT
    return int(_properties(device_index(device)).multi_processor_count)


def capability(device: DeviceLike) -> tuple[int, int]:
    """Compute capability, for example `(9, 0)`; `(0, 0)` for a device that is no GPU."""
    if not is_cuda(device):
        return (0, 0)
    properties = _properties(device_index(device))
    return (int(properties.major), int(properties.minor))


def is_hopper(device: DeviceLike) -> bool:
    """True on compute capability 9.x, where the SM90 kernels run."""
    return capability(device)[0] == 9


def device_name(device: DeviceLike) -> str:
    """Marketing name of a GPU, or the type of another device."""
    if not is_cuda(device):
        return torch.device(device).type
    return str(_properties(device_index(device)).name)


def require_gpu(function: str, device: DeviceLike) -> None:
    """Raise `UnsupportedDevice` unless `device` is a CUDA GPU that the portable kernels support."""
    major, minor = MIN_CAPABILITY
    needed = f"hpc.{function} needs an NVIDIA GPU of compute capability {major}.{minor} or newer"
    if not is_cuda(device):
        raise UnsupportedDevice(f"{needed}; found device '{torch.device(device)}'.")
    found = capability(device)
    if found < MIN_CAPABILITY:
        raise UnsupportedDevice(f"{needed}; found {device_name(device)} with {found[0]}.{found[1]}.")
