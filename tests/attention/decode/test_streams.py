"""Streams and early launches: concurrent calls share nothing, kernels that start early still wait for their inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_support import attend, check, make, same_bits

import hpc
from hpc.attention.decode import cases
from hpc.attention.decode.cases import DecodeInputs
from hpc.common.errors import UnsupportedDevice

pytestmark = pytest.mark.gpu

CAPACITY = 2048  # tokens that each request's pages hold
STEPS = 500


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of float8, which few torch kernels take; other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


class Model:
    """Two attention layers over one schedule; every step's inputs come from a kernel right before their use."""

    def __init__(self, dtype: str, page: int, heads: tuple[int, int], dynamic: bool) -> None:
        self.x = make((CAPACITY,) * 4, heads, seed=3, dtype=dtype, page_size=page)
        cache, generator = self.x.cache, torch.Generator("cuda").manual_seed(0)
        self.dynamic = dynamic
        self.changed = tuple(map(memory, (cache.kcache, cache.vcache, self.x.q)))
        self.start = tuple(tensor.clone() for tensor in self.changed)
        self.lens = [
            torch.randint(1, CAPACITY, (4,), generator=generator, device="cuda", dtype=torch.int32)
            for _ in range(7)
        ]
        self.queries = [memory(self.x.q).roll(shift, 0).clone() for shift in range(5)]
        self.tables = [cache.block_ids.roll(shift, 0).clone() for shift in range(4)]
        live = cache.block_ids[:, 0].long()
        self.rows = [memory(cache.kcache)[live, 0].roll(shift, 0).clone() for shift in range(3)]

    def reset(self) -> None:
        for tensor, start in zip(self.changed, self.start, strict=True):
            tensor.copy_(start)

    def write_rows(self, step: int) -> None:
        """The keys and values of this step's tokens, as a prologue stores them."""
        x, page = self.x, self.x.params.page_size
        at = (x.seq_lens - 1).long()
        pages = x.cache.block_ids.gather(1, (at // page)[:, None])[:, 0].long()
        for shift, cache in enumerate((x.cache.kcache, x.cache.vcache)):
            memory(cache)[pages, at % page] = self.rows[(step + shift) % 3]

    def step(self, i: int) -> list[torch.Tensor]:
        x = self.x
        x.cache.block_ids.copy_(self.tables[i % 4])
        x.seq_lens.copy_(self.lens[i % 7])
        task_map = cases.assign(x, x.task_map) if self.dynamic and x.task_map is not None else None
        self.write_rows(i)
        first = cases.attend(x, task_map)
        memory(x.q).copy_(self.queries[i % 5])
        second = cases.attend(x, task_map)
        swapped = replace(x.cache, kcache=x.cache.vcache, vcache=x.cache.kcache)
        self.write_rows(i + 1)  # ends right before the third call, which reads these rows
        return [first, second, cases.attend(replace(x, cache=swapped), task_map)]


@pytest.mark.parametrize(
    ("dtype", "page", "heads", "dynamic"),
    [
        ("fp8", 64, (8, 1), True), ("bf16", 16, (64, 8), True), ("bf16", 64, (8, 1), False),
        ("fp8", 8, (8, 1), True), ("bf16", 8, (8, 1), False),
    ],
)  # fmt: skip
def test_fr_66_a_chain_of_copies_assign_and_decode(
    dtype: str, page: int, heads: tuple[int, int], dynamic: bool
) -> None:
    """Nothing waits for the host: the bits are those of a run that waits after every step."""
    model = Model(dtype, page, heads, dynamic)
    model.step(0)  # compiles
    runs: list[list[torch.Tensor]] = []
    for wait in (True, False):
        model.reset()
        torch.cuda.synchronize()
        results: list[torch.Tensor] = []
        for i in range(STEPS):
            results += model.step(i)
            if wait:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        runs.append(results)
    differ = [n for n, pair in enumerate(zip(*runs, strict=True)) if not same_bits(*pair)]
    assert not differ, f"{len(differ)} of {3 * STEPS} results differ, the first in step {differ[0] // 3}"
    assert all(bool(result.isfinite().all()) for result in runs[0])


@pytest.mark.parametrize("path", ["dynamic", "static"])
@pytest.mark.parametrize(("dtype", "page"), [("fp8", 64), ("bf16", 64), ("bf16", 8)])
def test_fr_68_two_streams_with_their_own_maps(path: str, dtype: str, page: int) -> None:
    """The same shapes and other data and lengths, schedules made anew each time, no synchronisation."""
    calls = [
        make(lens, seed=seed, dtype=dtype, page_size=page)
        for seed, lens in enumerate([(4096,) * 8, (3000, 64) * 4])
    ]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def one(x: DecodeInputs) -> torch.Tensor:
        if path == "dynamic" and x.task_map is not None:
            cases.assign(x, x.task_map)
        return attend(x, path)

    alone = [one(x) for x in calls]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(100):
        for s, x in enumerate(calls):
            with torch.cuda.stream(streams[s]):
                results[s].append(one(x))
    torch.cuda.synchronize()
    for s in (0, 1):
        wrong = [n for n, result in enumerate(results[s]) if not same_bits(result, alone[s])]
        assert not wrong, f"stream {s}: iterations {wrong[:5]} differ"


@pytest.mark.multi_gpu
@pytest.mark.parametrize("path", ["dynamic", "static"])
@pytest.mark.parametrize("page", [64, 8])
def test_fr_54_all_tensors_on_a_device_that_is_not_current(path: str, page: int) -> None:
    with torch.cuda.device(0):
        for where in ("cuda:1", "cuda:0", "cuda:1"):
            x = make((300, 5000, 1), device=where, page_size=page)
            assert x.task_map is not None and x.task_map.device == torch.device(where)
            assert check(x, path).device == torch.device(where)
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert hpc.get_attention_decode_task_workspace(1, 64, 1).device == torch.device("cuda:1")


@pytest.mark.multi_gpu
def test_fr_54_mixed_devices_are_refused() -> None:
    x = make((300, 5), device="cuda:0")
    attend(x)  # the same shapes have been seen: a cached signature must not wave the others through
    assert x.task_map is not None
    changes: list[dict[str, Any]] = [{n: getattr(x, n).to("cuda:1")} for n in ("q", "seq_lens", "task_map")]
    for call in (replace(x, **change) for change in changes):
        with pytest.raises(UnsupportedDevice, match="cuda:"):
            attend(call)
