"""The least time a case can take: bytes over the read rate, or operations over the matrix rate."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpc.common import arch
from hpc.common.operator import Floor


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches when nothing else limits it.

    Attributes:
        read: bytes a second, reading only.
        bf16, fp8: matrix operations a second (a multiply-add counts as two).
        source: where the numbers come from.
    """

    read: float
    bf16: float
    fp8: float
    source: str


# Measured: reading 4.39 TB/s, bf16 8192^3 product of random data 790 TFLOP/s. The fp8 rate is twice that.
KNOWN: dict[str, Rates] = {
    "NVIDIA H200": Rates(read=4.39e12, bf16=790e12, fp8=1580e12, source="table"),
}


def rates(device: torch.device | str) -> Rates | None:
    """Rates of a device: from the table, else measured once per process; None without a GPU."""
    if not arch.is_cuda(device):
        return None
    return _rates(arch.device_index(device))


@functools.lru_cache(maxsize=None)
def _rates(index: int) -> Rates:
    known = KNOWN.get(arch.device_name(index))
    return known if known is not None else measure(torch.device("cuda", index))


def measure(device: torch.device) -> Rates:
    """Measure a GPU: a 1 GiB copy (read plus written bytes) and an 8192^3 bf16 product."""
    source = torch.empty(1 << 28, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    copy = _best_seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2))
    product = _best_seconds(lambda: torch.mm(a, b), device)
    bf16 = 2.0 * 8192**3 / product
    read = 2.0 * source.nbytes / copy
    return Rates(read=read, bf16=bf16, fp8=2.0 * bf16, source="measured: copy and bf16 product")


def _best_seconds(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    best = float("inf")
    for _ in range(3):
        call()
    for _ in range(3):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def floor_us(floor: Floor, found: Rates | None) -> tuple[float | None, str]:
    """(microseconds, kind): kind is "read" or the matrix rate that binds; (None, kind) without rates."""
    if found is None:
        return None, "read"
    read = floor.bytes / found.read * 1e6
    matrix = floor.flops / getattr(found, floor.kind) * 1e6
    return (read, "read") if read >= matrix else (float(matrix), floor.kind)
