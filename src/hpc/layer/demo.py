"""What `hpc demo --model` does: one decode step of a layer, each stage checked against float64 and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from hpc.attention.decode import cases as decode_cases
from hpc.bench import traces
from hpc.bench.timer import make_clock, time_interleaved
from hpc.common import arch
from hpc.common.operator import Tolerance
from hpc.layer import batching, exact
from hpc.layer.model import LayerShape, load
from hpc.layer.step import Step
from hpc.moe import cases as moe_cases
from hpc.rope import cases as rope_cases
from hpc.testing import measure

Say = Callable[[str, int, int], None]

CACHE = Tolerance(rms=2.9e-2, max=2**-4 * 1.01)
"""One scale a tensor: half a step of e4m3 is up to 2^-4 of a value."""
ROUTER = Tolerance(rms=5e-5, max=2e-4)
REGRET = 1e-5
"""Scores are apart by 1e-3 and more where there is a choice; two halves of a weight leave 1e-6 of a logit."""
WHOLE = Tolerance(rms=4e-2, max=8e-2)
"""e4m3 activations (2.6% each) against none: tells that the stages fit together, not how well each rounds."""


@dataclass(frozen=True)
class Stage:
    """One line of the report. `time_us` is None for what is checked only."""

    name: str
    what: str
    rms_rel: float
    max_rel: float
    ok: bool
    time_us: float | None = None


@dataclass
class Report:
    """All that was found."""

    device: str
    gpu: bool
    shape: LayerShape
    batches: list[batching.Batch]
    stages: list[Stage] = field(default_factory=list)
    times_us: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(stage.ok for stage in self.stages)

    @property
    def lens(self) -> tuple[int, ...]:
        """KV lengths of the last step."""
        return self.batches[-1].lens

    @property
    def num_joined(self) -> int:
        """Requests that took the place of one that had ended."""
        return sum(len(batch.joined) for batch in self.batches[1:])


def run(
    model: str,
    tp: int = 1,
    num_requests: int | None = None,
    seed: int = 0,
    say: Say = lambda text, done, total: None,
    num_steps: int = 3,
) -> Report:
    """Build, run, check and time decode steps of `model` (a name or a config.json); a small layer without a GPU.

    Lengths come from the conversation trace, a quarter of them without a GPU. Each step is checked; a stage's errors
    are the worst of all steps, its time is that of the last one. Raises InvalidArgument for an unknown model or a `tp`
    that does not divide it; a wrong result is a stage with `ok` False.
    """
    started = time.perf_counter()
    gpu = arch.gpu_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    shape = load(model, tp)
    shape = shape if gpu else shape.small()
    trace = traces.load("conversation")
    batches = batching.plan(trace, num_requests or (32 if gpu else 6), num_steps, seed, 1 if gpu else 4)
    say("building weights and caches", 0, num_steps + 2)
    step = Step(shape, batching.capacity(batches), device, seed)
    report = Report(arch.device_name(device), gpu, shape, batches)
    for number, batch in enumerate(batches):
        say(f"step {number + 1}: running, checking against float64", number + 1, num_steps + 2)
        step.load(batch.lens, batch.joined)
        report.stages = worst(report.stages, check(step, step.run()))
    say("timing", num_steps + 1, num_steps + 2)
    report.times_us = times(step)
    report.stages = [replace(s, time_us=report.times_us.get(s.name)) for s in report.stages]
    report.seconds = time.perf_counter() - started
    return report


def worst(before: list[Stage], now: list[Stage]) -> list[Stage]:
    """Stage by stage the larger errors of two steps."""
    if not before:
        return now
    return [
        replace(
            b, rms_rel=max(a.rms_rel, b.rms_rel), max_rel=max(a.max_rel, b.max_rel), ok=a.ok and b.ok
        )
        for a, b in zip(before, now, strict=True)
    ]  # fmt: skip


def check(step: Step, out: torch.Tensor) -> list[Stage]:
    """Each stage against float64 of its own inputs, then the layer's output against a layer that rounds nothing."""
    stages = []

    def judge(name: str, what: str, have: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> None:
        found = measure(have, want)
        stages.append(Stage(name, what, found.rms_rel, found.max_rel, found.within(tolerance)))

    if step.shape.has_attention:
        q, rows = exact.queries_and_rows(step)
        fp8 = rope_cases.TOLERANCES["fp8"]
        judge("prologue", "queries", step.q.double() * step.q_scale.double()[..., None], q, fp8)
        judge("", "keys and values in the cache", exact.stored_rows(step), rows, CACHE)
        judge("decode", "attention", step.attention, exact.attention(step), decode_cases.TOLERANCES["fp8"])
    weights, regret = exact.routing(step)
    judge("router top-k", "weights of the chosen", step.topk_weights, weights, ROUTER)
    stages.append(Stage("", "score lost by the choice", regret, regret, regret <= REGRET))
    judge("MoE", "experts and shared output", step.moe, exact.experts(step), moe_cases.FEW_TOLERANCE)
    judge("whole layer", "against float64 without FP8", out, exact.whole_layer(step), WHOLE)
    return stages


def stages_of(step: Step) -> dict[str, Callable[[], object]]:
    """Stage by name, in order; only what this library computes, and the whole step with PyTorch's part."""
    first: dict[str, Callable[[], object]] = {}
    if step.shape.has_attention:
        first = {"schedule": step.schedule, "prologue": step.prologue, "decode": step.decode}
    return first | {"router top-k": step.route, "MoE": step.experts, "whole layer": step.run}


def times(step: Step) -> dict[str, float]:
    """Median time by CUDA-graph replay of each stage and of the whole step; without a GPU that of one call."""
    work = stages_of(step)
    if step.device.type == "cuda":
        found = time_interleaved({name: [call] for name, call in work.items()}, make_clock(step.device))
        return {name: timing.median_us for name, timing in found.items()}
    took = {}
    for name, call in work.items():
        started = time.perf_counter()
        call()
        took[name] = (time.perf_counter() - started) * 1e6
    return took


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "ok": report.ok,
        "device": report.device,
        "ran": "kernels" if report.gpu else "reference",
        "model": asdict(report.shape),
        "kv_lens": [list(batch.lens) for batch in report.batches],
        "joined": report.num_joined,
        "stages": [asdict(stage) for stage in report.stages],
        "times_us": report.times_us,
        "seconds": round(report.seconds, 2),
    }
