"""`hpc warmup`: compile kernels before serving or capture."""

from __future__ import annotations

from typing import Annotated

import typer

from hpc.cli import terminal


def run(
    op: terminal.OperatorName = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="CUDA device (cuda:0), or a target to compile for without a GPU (sm90)."
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the number of ready kernels as JSON.")] = False,
) -> None:
    """Compile every kernel that calls can reach, in parallel, so that no call and no capture meets the
    compiler.

    Triton keeps the result in its cache folder (`hpc env` names it). HPC_WARMUP_JOBS bounds the parallel
    compiles.
    """
    import time

    from hpc.common import arch
    from hpc.common.warmup import warmup

    names = terminal.operator_names(op)
    if device is None and not arch.gpu_available():
        terminal.usage_error(
            "no GPU here, so nothing to compile for; name a target: hpc warmup --device sm90"
        )
    started = time.perf_counter()
    with terminal.progress_bar() as bar:
        task = bar.add_task("compiling", total=None)

        def show(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        ready = warmup(names, device, show)
    seconds = time.perf_counter() - started
    if json_:
        terminal.write_json({"operators": names, "kernels": ready, "seconds": round(seconds, 2)})
    else:
        terminal.results().print(f"{ready} kernels ready in {seconds:.1f} s", highlight=False)
