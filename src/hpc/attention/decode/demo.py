"""The main job on one page: a batch of mixed-length requests decoded through the dynamic schedule, checked
and timed.

On a GPU the public functions run the kernels, timed by CUDA-graph replay. Elsewhere a smaller batch goes
through the public functions, which then run the reference, and through the Triton kernels in Triton's
interpreter, in a process of its own because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hpc.attention.decode import cases
from hpc.attention.decode.case_lists import DecodeCase
from hpc.bench import traces
from hpc.common import arch, env
from hpc.testing import measure, poisoned

Say = Callable[[str, int, int], None]
"""Told what is being done, how many steps are done, and how many there are."""

DTYPES = ("fp8", "bf16")
INTERPRETED_PATHS = ("dynamic schedule", "static split")
INTERPRETED_SMS = 8
"""SMs of the GPU that the interpreted run pretends to have: enough bins that requests are split."""


@dataclass(frozen=True)
class Batch:
    """One decode step: KV length of each request, and the heads of the model."""

    lens: tuple[int, ...]
    num_q_heads: int = 8
    num_kv_heads: int = 1
    seed: int = 0

    def params(self, dtype: str) -> DecodeCase:
        """The batch as a case of the operator: head size 128, pages of 64 tokens, one new token a request."""
        return DecodeCase(self.lens, self.num_q_heads, self.num_kv_heads, dtype=dtype)


@dataclass(frozen=True)
class Result:
    """One way to decode the batch: its error against float64 and, where it was timed, its time."""

    dtype: str
    path: str
    rms_rel: float | None = None
    max_rel: float | None = None
    ok: bool = True
    time_us: float | None = None
    floor_us: float | None = None


@dataclass
class Report:
    """All that the demo found."""

    device: str
    batch: Batch
    num_sms: int
    gpu: bool
    results: list[Result] = field(default_factory=list)
    left_out: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)


def choose_batch(gpu: bool, tiny: bool = False, seed: int = 0) -> Batch:
    """Lengths drawn from the conversation trace and one long document; without a GPU all at a quarter or less."""
    if tiny:
        return Batch((600, 3, 65), num_q_heads=4, seed=seed)
    requests = traces.load("conversation")
    if gpu:
        return Batch((32768, *traces.draw_batch(requests, 31, seed)), seed=seed)
    short = (length // 4 for length in traces.draw_batch(requests, 10, seed, max_len=4000))
    return Batch((1900, 0, *short), seed=seed)


def judge(inputs: cases.DecodeInputs, path: str, output: torch.Tensor, expected: torch.Tensor) -> Result:
    """Error of one output against float64, within the operator's tolerance or not."""
    dtype = inputs.params.dtype
    found = measure(output, expected)
    return Result(dtype, path, found.rms_rel, found.max_rel, found.within(cases.TOLERANCES[dtype]))


class CannotRun(RuntimeError):
    """The demo could not do a part of its work; the message says why."""


def run(tiny: bool = False, seed: int = 0, say: Say = lambda text, done, total: None) -> Report:
    """Decode, check and (on a GPU) time one batch in FP8 and BF16.

    Raises CannotRun with the reason if the interpreted run breaks off, UnsupportedDevice on a GPU that is too old; a
    wrong result is a row with `ok` False, never an exception.
    """
    started = time.perf_counter()
    gpu = arch.gpu_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    if gpu:
        arch.require_gpu("demo", device)
    batch = choose_batch(gpu, tiny, seed)
    num_sms = arch.sm_count(device) if gpu else INTERPRETED_SMS
    report = Report(arch.device_name(device), batch, num_sms, gpu)
    steps = len(DTYPES) if gpu else len(DTYPES) * (1 + len(INTERPRETED_PATHS))
    for step, dtype in enumerate(DTYPES):
        say(f"{dtype}: building the cache, float64 reference", step, steps)
        inputs = cases.make_tensors(batch.params(dtype), device, seed)
        expected, _ = cases.reference(inputs)
        say(f"{dtype}: decoding" + (" and timing" if gpu else ""), step, steps)
        report.results += _on_gpu(inputs, expected) if gpu else _on_cpu(inputs, expected)
    if not gpu:
        status = env.interpreter_status(env.triton_version(), env.installed("numpy"))
        if status == "yes":
            for result in interpreted(batch):
                report.results.append(result)
                say("Triton kernels in the interpreter", len(report.results), steps)
        else:
            report.left_out = f"the interpreted kernels ({status.removeprefix('no: ')})"
    report.seconds = time.perf_counter() - started
    return report


def _on_cpu(inputs: cases.DecodeInputs, expected: torch.Tensor) -> list[Result]:
    output = cases.attend(
        inputs, cases.make_task_map(inputs), output=poisoned(expected.shape, torch.bfloat16)
    )
    return [judge(inputs, "public function (reference)", output, expected)]


def _on_gpu(inputs: cases.DecodeInputs, expected: torch.Tensor) -> list[Result]:
    from hpc.attention.decode import demo_timing

    paths: dict[str, torch.Tensor | None] = {
        "dynamic schedule": cases.make_task_map(inputs),
        "static split": None,
    }
    results = []
    for path, task_map in paths.items():
        output = poisoned(expected.shape, torch.bfloat16, inputs.q.device)
        results.append(judge(inputs, path, cases.attend(inputs, task_map, output=output), expected))
    return demo_timing.with_times(inputs, results, paths)


def interpreted(batch: Batch) -> Iterator[Result]:
    """The portable kernels on the CPU, in a process with TRITON_INTERPRET=1; each result as soon as it is there."""
    command = [sys.executable, "-m", "hpc.attention.decode.demo_interpret", json.dumps(vars(batch))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            for line in process.stdout or ():
                yield Result(**json.loads(line))
        if process.returncode != 0:
            errors.seek(0)
            reason = (errors.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise CannotRun(f"the interpreted kernels did not run: {reason}")


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    batch = report.batch
    return {
        "ok": report.ok,
        "device": report.device,
        "kernels": "compiled" if report.gpu else "interpreted",
        "kv_lens": list(batch.lens),
        "num_q_heads": batch.num_q_heads,
        "num_kv_heads": batch.num_kv_heads,
        "num_sms": report.num_sms,
        "results": [vars(result) for result in report.results],
        "left_out": report.left_out,
        "seconds": round(report.seconds, 2),
    }
