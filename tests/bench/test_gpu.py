"""The timer and the floor on a real GPU."""

from __future__ import annotations

import os

import pytest
import torch

from hpc.bench import rates, timer
from hpc.bench.roofline import measure
from hpc.testing import make_paged_cache

pytestmark = pytest.mark.gpu

alone = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="measures bandwidth: needs the GPU alone"
)


@alone
def test_cold_inputs_are_slower_than_cached_ones(device: torch.device) -> None:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    size = l2_bytes // 4
    count = timer.num_input_sets(size, l2_bytes)
    buffers = [torch.zeros(size // 4, device=device) for _ in range(count)]

    def read(buffer: torch.Tensor) -> torch.Tensor:
        return torch.sum(buffer)

    workloads = {
        "cold": [lambda b=b: read(b) for b in buffers],
        "cached": [lambda: read(buffers[0])] * count,
    }
    result = timer.time_interleaved(workloads, timer.make_clock(device), budget_ms=30)
    print({name: timing.median_us for name, timing in result.items()})
    assert result["cold"].median_us > 1.1 * result["cached"].median_us


@alone
def test_a_large_copy_takes_its_bytes_over_the_rate(device: torch.device) -> None:
    source = torch.empty(1 << 28, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    found = rates(device)
    assert found is not None
    timing = timer.time_interleaved({"copy": [lambda: target.copy_(source)]}, timer.make_clock(device))[
        "copy"
    ]
    assert 2 * source.nbytes / timing.median_us * 1e6 == pytest.approx(found.read, rel=0.15)
    assert timing.p20_us <= timing.median_us <= timing.p80_us < 1.2 * timing.p20_us


@alone
def test_the_table_agrees_with_a_measurement(device: torch.device) -> None:
    found, measured = rates(device), measure(device)
    assert found is not None
    assert measured.read == pytest.approx(found.read, rel=0.1)
    assert measured.bf16 == pytest.approx(found.bf16, rel=0.2)


def test_a_gigabyte_cache_is_built_in_time(device: torch.device) -> None:
    cache = make_paged_cache([4096] * 128, 8, 128, 64, torch.float8_e4m3fn, device=device)
    assert cache.kcache.nbytes > 2**29
    tail = cache.kcache.view(torch.uint8)[cache.block_ids[0, 0].long()]
    assert torch.isfinite(tail.view(torch.float8_e4m3fn).float()).all()
