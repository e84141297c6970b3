"""A machine and an operator whose times and results are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpc.bench import Provider
from hpc.common.operator import Case, Floor, Tolerance


@dataclass
class FakeCall:
    """Returns a tensor and costs time when replayed."""

    name: str
    cost_us: float
    result: Callable[[], torch.Tensor] = lambda: torch.zeros(1)
    eager: int = 0

    def __call__(self) -> torch.Tensor:
        self.eager += 1
        return self.result()


class FakeClock:
    """Captures by running the calls and noting which; a replay advances time by their costs.

    ``drift`` makes every replay slower than the one before, as a warming card does.
    """

    def __init__(self, drift: float = 0.0, launch_us: float = 0.0) -> None:
        self.now = 0.0
        self.drift = drift
        self.launch_us = launch_us
        self.replays: list[list[str]] = []
        self.captured: list[int] = []
        self._seen: list[FakeCall] = []
        self.pending = 0

    def capture(self, calls: Sequence[Callable[[], Any]]) -> list[FakeCall]:
        self.captured.append(len(calls))
        recorded: list[FakeCall] = []
        for call in calls:
            for fake in _leaves(call):
                recorded.append(fake)
        return recorded

    def replay(self, graph: list[FakeCall]) -> None:
        self.now += self.launch_us + sum(call.cost_us for call in graph) * (
            1 + self.drift * len(self.replays)
        )
        self.replays.append([call.name for call in graph])
        self.pending += 1

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: float, end: float) -> float:
        assert self.pending == 0, "times must not be read before synchronize"
        return end - start

    def synchronize(self) -> None:
        self.pending = 0


def _leaves(call: Callable[[], Any]) -> list[FakeCall]:
    """The fake calls inside a closure that chains several."""
    if isinstance(call, FakeCall):
        return [call]
    cells = [cell.cell_contents for cell in call.__closure__ or ()]
    return [leaf for cell in cells if callable(cell) for leaf in _leaves(cell)]


class SquareOperator:
    """x -> x * x, with good and bad providers."""

    name = "toy.square"
    functions = ("square",)

    def __init__(self, providers: Sequence[Provider]) -> None:
        self._providers = {provider.name: provider for provider in providers}
        self.seeds: list[int] = []

    def cases(self, tag: str) -> list[Case]:
        sizes = {"small": 8, "large": 64}
        return [Case(name, frozenset({"bench", "interpret"}), size) for name, size in sizes.items()]

    def make_inputs(self, case: Case, device: torch.device, seed: int) -> torch.Tensor:
        self.seeds.append(seed)
        return torch.randn(case.params, generator=torch.Generator().manual_seed(seed))

    def call(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * inputs

    def reference(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.double() ** 2

    def tolerance(self, case: Case) -> Tolerance:
        return Tolerance(rms=1e-6, max=1e-6)

    def floor(self, case: Case) -> Floor:
        return Floor(bytes=4 * case.params, flops=case.params, kind="bf16")

    def providers(self) -> dict[str, Provider]:
        return self._providers

    def warmup(self, device: object, progress: object) -> int:
        return 0
