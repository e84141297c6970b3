"""`hpc schedule`: the decode schedule of any length distribution as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hpc.cli import distribution, terminal


def run(
    kv: Annotated[
        str | None,
        typer.Option(
            "--kv", metavar="NxL+NxL", help="KV lengths: N requests of L tokens each; suffixes K = 1024, M."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Draw the lengths from a CSV with ContextTokens and GeneratedTokens, or from the extracts "
            "that come with hpc: conversation, code.",
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", min=1, max=65536, help="Requests drawn from --trace.")
    ] = 64,
    seed: Annotated[int, typer.Option("--seed", help="Seed of that draw.")] = 0,
    heads: Annotated[str, typer.Option("--heads", metavar="Q/KV", help="Query heads / KV heads.")] = "8/1",
    dtype: Annotated[str, typer.Option("--dtype", metavar="fp8|bf16", help="Type of the cache.")] = "fp8",
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, help="Head size of K and of V.")] = 128,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, max=16, help="New tokens of a request.")
    ] = 1,
    window: Annotated[int | None, typer.Option("--window", min=1, help="Sliding window in tokens.")] = None,
    sms: Annotated[int, typer.Option("--sms", min=1, max=4096, help="SMs of the GPU.")] = 132,
    ctas_per_sm: Annotated[
        int | None,
        typer.Option("--ctas-per-sm", min=1, max=2, help="CTAs per SM [default: what the kernel uses]."),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Draw the static split too, on the same axis.")
    ] = False,
    splits: Annotated[
        int | None, typer.Option("--splits", min=1, help="Chunks of the static split [default: by batch].")
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", min=1, help="Most lines of a picture; more bins are grouped.")
    ] = 33,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Write dynamic next to static as an image.")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print every bin and segment as JSON instead.")
    ] = False,
) -> None:
    """Draw how decode attention divides a batch among the CTAs, and what the slowest of them costs.

    Runs the very planner of the kernels in pure Python; no GPU is needed. A row is one CTA bin (for all KV
    heads at once), its length is predicted time at 4.39 TB/s. Requests that are split over bins are bright,
    others grey.

    Examples: hpc schedule --kv 1x128K+31x4K --static; hpc schedule --trace conversation --requests 64
    --heads 64/8
    """
    from dataclasses import replace

    from hpc.attention.decode import picture
    from hpc.attention.decode.timeline import dynamic_timeline, static_timeline

    lens = _lengths(kv, trace, requests, seed)
    machine = _machine(heads, dtype, head_dim, new_tokens, window, sms)
    if ctas_per_sm is None:
        machine = machine.with_kernel_choice(len(lens))
    else:
        machine = replace(machine, ctas_per_sm=ctas_per_sm)
    dynamic, fixed = dynamic_timeline(lens, machine), static_timeline(lens, machine, splits)
    what = f"{distribution.describe(lens)}, heads {heads}, {dtype}, {sms} SMs x {machine.ctas_per_sm}"
    if png is not None:
        write_png(png, [dynamic, fixed], what)
    if json_:
        terminal.write_json(_as_json(lens, machine, dynamic, fixed))
        return
    console = terminal.results()
    horizon = max(dynamic.tail_us, fixed.tail_us) if static else 0.0
    options: dict[str, Any] = {"width": console.width, "max_rows": rows, "horizon_us": horizon}
    console.print(what, style="bold", highlight=False, markup=False)
    console.print(picture.terminal(dynamic, "dynamic", **options))
    if static:
        console.print()
        console.print(picture.terminal(fixed, "static", **options))
    else:
        console.print(f"static split for comparison: {picture.headline(fixed)}", style="dim", highlight=False)
    if png is not None:
        console.print(f"wrote {png}", highlight=False, markup=False)


def _lengths(kv: str | None, trace: str | None, requests: int, seed: int) -> list[int]:
    if (kv is None) == (trace is None):
        raise typer.BadParameter(f"give either --kv or --trace; --kv takes {distribution.GRAMMAR}")
    try:
        if trace is not None:
            from hpc.bench import traces

            return traces.draw_batch(traces.load(trace), requests, seed)
        return distribution.parse(kv or "")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv" if trace is None else "--trace") from None


def _machine(
    heads: str,
    dtype: str,
    head_dim: int,
    new_tokens: int,
    window: int | None,
    sms: int,
) -> Any:
    from hpc.attention.decode.timeline import Machine

    q_heads, _, kv_heads = heads.partition("/")
    if not (q_heads.isdigit() and kv_heads.isdigit() and int(kv_heads) > 0 and int(q_heads) > 0):
        raise typer.BadParameter(f"'{heads}' is not Q/KV, such as 8/1 or 64/8", param_hint="--heads")
    if int(q_heads) % int(kv_heads):
        raise typer.BadParameter(
            f"'{heads}': query heads must be a multiple of KV heads", param_hint="--heads"
        )
    if dtype not in ("fp8", "bf16"):
        raise typer.BadParameter(f"'{dtype}' is neither fp8 nor bf16", param_hint="--dtype")
    return Machine(
        num_q_heads=int(q_heads),
        num_kv_heads=int(kv_heads),
        head_dim=head_dim,
        v_head_dim=head_dim,
        kv_bytes=1 if dtype == "fp8" else 2,
        num_new_tokens=new_tokens,
        window=window,
        num_sms=sms,
    )


def write_png(path: Path, timelines: list[Any], title: str) -> None:
    """Write an image of timelines; a usage error without matplotlib."""
    from hpc.attention.decode import picture

    try:
        picture.save_png(path, timelines, title)
    except ModuleNotFoundError as error:
        terminal.usage_error(f"--png needs {error.name}; install it with: pip install matplotlib")


def _as_json(lens: list[int], machine: Any, dynamic: Any, fixed: Any) -> dict[str, Any]:
    return {
        "kv_lens": lens,
        "num_q_heads": machine.num_q_heads,
        "num_kv_heads": machine.num_kv_heads,
        "num_new_tokens": machine.num_new_tokens,
        "num_sms": machine.num_sms,
        "ctas_per_sm": machine.ctas_per_sm,
        "tile_tokens": 64,
        "tile_us": round(machine.tile_us, 4),
        "dynamic": dynamic.as_json(),
        "static": fixed.as_json(),
    }
