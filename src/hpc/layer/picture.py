"""The step as an image: how its time is divided among the stages."""

from __future__ import annotations

import os
from collections.abc import Mapping

COLOURS = ("#8c96a3", "#4c9f70", "#2a6f97", "#c98b2b", "#a4443f", "#d9dde2")


def save_png(path: str | os.PathLike[str], times_us: Mapping[str, float], whole: str, title: str) -> None:
    """One bar of the stages in order, and the rest of `times_us[whole]`, which is not this library's, in grey.

    Needs matplotlib (of the extra `bench`); raises ModuleNotFoundError without it and OSError when the file cannot be
    written. Stages are measured one by one, so their sum may exceed the whole, where kernels overlap.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = {name: time for name, time in times_us.items() if name != whole}
    parts["projections, norms (PyTorch)"] = max(0.0, times_us[whole] - sum(parts.values()))
    figure = Figure(figsize=(9.0, 2.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    factor, unit = (1e-3, "ms") if times_us[whole] >= 1e4 else (1.0, "us")
    start = 0.0
    for (name, time), colour in zip(parts.items(), COLOURS, strict=False):
        axes.barh([0], [time * factor], left=start * factor, color=colour, label=f"{name}  {_text(time)}")
        start += time
    axes.set_yticks([])
    axes.set_xlim(0, max(start * factor, 1e-9))
    axes.set_xlabel(unit)
    axes.set_title(f"{title}: {_text(times_us[whole])}", fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(ncols=3, fontsize=8, frameon=False, loc="outside lower center")
    figure.savefig(path, format="png")


def _text(time_us: float) -> str:
    return f"{time_us / 1e3:.1f} ms" if time_us >= 1e4 else f"{time_us:.1f} us"
