"""Time GPU work as users run it: by CUDA-graph replay, inputs cold, all providers interleaved.

Each provider brings one call per input set. A graph holds the calls in turn, over and over, so that a
call never finds its inputs in the L2 cache and the launch gaps are those of a captured model. Rounds
replay the providers' graphs one after the other without waiting for the host, so that all of them meet
the same clocks and temperature. One sample is one replay divided by its calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], Any]

# Per provider: enough samples for percentiles, each long against the ~1 us resolution of an event.
MIN_ROUNDS, MAX_ROUNDS = 7, 25
TARGET_REPLAY_US = 3000.0
MAX_CALLS_PER_GRAPH = 512
WARMUP_ROUNDS = 2

# Rotated inputs must exceed the L2 cache by this factor: at 1x an LRU-like cache still hits.
L2_FACTOR = 2.5
# Beyond this multiple of the L2 cache a single input set evicts itself on every call.
SELF_EVICTING_FACTOR = 8.0


@dataclass(frozen=True)
class Timing:
    """Time of one call in microseconds: median, 20th and 80th percentile over ``samples`` replays."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    calls_per_sample: int


class Clock(Protocol):
    """What the timer needs of a machine; the tests bring a fake one."""

    def capture(self, calls: Sequence[Call]) -> Any:
        """Record the calls in order; returns something that ``replay`` accepts."""

    def replay(self, graph: Any) -> None:
        """Start a recorded sequence, without waiting for it."""

    def mark(self) -> Any:
        """A point in time between what was started before and after."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two marks; only after ``synchronize``."""

    def synchronize(self) -> None:
        """Wait until everything started has finished."""


class GraphClock:
    """CUDA graphs and events on a side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def capture(self, calls: Sequence[Call]) -> Any:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.stream.synchronize()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=self.stream):
            for call in calls:
                call()
        return graph

    def replay(self, graph: Any) -> None:
        with torch.cuda.stream(self.stream):
            graph.replay()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class HostClock:
    """Plain calls and the host's clock, for devices without graphs."""

    def capture(self, calls: Sequence[Call]) -> Any:
        return list(calls)

    def replay(self, graph: Any) -> None:
        for call in graph:
            call()

    def mark(self) -> Any:
        return time.perf_counter()

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(end - start) * 1e6

    def synchronize(self) -> None:
        return None


def make_clock(device: torch.device | str) -> Clock:
    """The clock of a device: graph replay on a GPU, the host's clock elsewhere."""
    device = torch.device(device)
    return GraphClock(device) if device.type == "cuda" else HostClock()


def num_input_sets(bytes_per_set: int, l2_bytes: int, max_sets: int = 64) -> int:
    """Input sets to rotate so that ``bytes_per_set`` are read cold from memory on every call."""
    if l2_bytes <= 0 or bytes_per_set >= SELF_EVICTING_FACTOR * l2_bytes:
        return 1
    return max(2, min(max_sets, math.ceil(L2_FACTOR * l2_bytes / max(1, bytes_per_set))))


@dataclass
class _Lane:
    """One provider while it is being timed."""

    graph: Any
    calls: int
    samples: list[float]


def time_interleaved(
    workloads: Mapping[str, Sequence[Call]],
    clock: Clock,
    *,
    budget_ms: float = 80.0,
    chain: Sequence[Call] | None = None,
    on_error: Callable[[str, Exception], None] | None = None,
) -> dict[str, Timing]:
    """Time several providers side by side.

    Args:
        workloads: name -> calls, one per rotated input set.
        clock: see :func:`make_clock`.
        budget_ms: device time to spend per provider, capture aside.
        chain: calls (one per input set, or a single one) put before each timed call inside the graph, as
            the kernel that feeds the operator in a model. Their own time, measured as one more interleaved
            graph, is subtracted, so what remains is what the operator adds to the chain.
        on_error: called as ``on_error(name, exception)`` for a provider that fails; it is left out of the
            result. Without it the exception is raised.

    Returns:
        name -> :class:`Timing`.
    """
    jobs = {name: list(calls) for name, calls in workloads.items()}
    if chain:
        jobs = {name: _chained(chain, calls) for name, calls in jobs.items()}
    lanes: dict[str, _Lane] = {}
    rounds = MIN_ROUNDS
    chain_key = "\0chain"
    if chain and jobs:
        width = len(next(iter(workloads.values())))
        jobs[chain_key] = [chain[i % len(chain)] for i in range(width)]
    for name, calls in jobs.items():
        try:
            lane, replay_us = _prepare(calls, clock, budget_ms)
        except Exception as error:
            if on_error is None or name == chain_key:
                raise
            on_error(name, error)
            continue
        lanes[name] = lane
        rounds = max(rounds, min(MAX_ROUNDS, int(budget_ms * 1e3 / max(replay_us, 1e-3))))
    _run_rounds(lanes, clock, rounds)
    base = lanes.pop(chain_key, None)
    return {name: _timing(lane, base) for name, lane in lanes.items()}


def _chained(chain: Sequence[Call], calls: Sequence[Call]) -> list[Call]:
    def pair(before: Call, call: Call) -> Call:
        def both() -> None:
            before()
            call()

        return both

    return [pair(chain[i % len(chain)], call) for i, call in enumerate(calls)]


def _prepare(calls: Sequence[Call], clock: Clock, budget_ms: float) -> tuple[_Lane, float]:
    """Warm up, estimate one pass over the input sets, and capture as many passes as one sample needs."""
    for call in calls:
        call()
    clock.synchronize()
    once = clock.capture(calls)
    clock.replay(once)
    start = clock.mark()
    clock.replay(once)
    end = clock.mark()
    clock.synchronize()
    pass_us = max(clock.elapsed_us(start, end), 1e-3)
    target_us = min(TARGET_REPLAY_US, budget_ms * 1e3 / MIN_ROUNDS)
    passes = max(1, min(round(target_us / pass_us), MAX_CALLS_PER_GRAPH // len(calls)))
    graph = once if passes == 1 else clock.capture(list(calls) * passes)
    return _Lane(graph, len(calls) * passes, []), pass_us * passes


def _run_rounds(lanes: Mapping[str, _Lane], clock: Clock, rounds: int) -> None:
    """Round-robin, starting with another provider each round; nothing waits until the end."""
    marks: list[tuple[_Lane, Any, Any]] = []
    order = list(lanes.values())
    for index in range(WARMUP_ROUNDS + rounds):
        shift = index % max(1, len(order))
        for lane in order[shift:] + order[:shift]:
            start = clock.mark()
            clock.replay(lane.graph)
            end = clock.mark()
            if index >= WARMUP_ROUNDS:
                marks.append((lane, start, end))
    clock.synchronize()
    for lane, start, end in marks:
        lane.samples.append(clock.elapsed_us(start, end) / lane.calls)


def _timing(lane: _Lane, base: _Lane | None) -> Timing:
    offset = percentile(base.samples, 0.5) if base is not None else 0.0
    median, low, high = (percentile(lane.samples, q) - offset for q in (0.5, 0.2, 0.8))
    return Timing(median, low, high, len(lane.samples), lane.calls)


def percentile(values: Sequence[float], q: float) -> float:
    """Linearly interpolated quantile, ``q`` from 0 to 1."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def host_time_us(call: Call, device: torch.device | str, calls: int = 200, rounds: int = 7) -> float:
    """Host time of one eager call in microseconds: median over rounds of back-to-back calls.

    The queue is emptied before each round and 200 calls of a few kernels fit into it, so the host never
    waits for the device inside the measured span.
    """
    clock = make_clock(device)
    for _ in range(20):
        call()
    samples = []
    for _ in range(rounds):
        clock.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    clock.synchronize()
    return percentile(samples, 0.5)
