"""Fill the parts of README.md and of the documentation that come from benchmarks/serving.

A page holds two comments, for example `<!-- serving:bench -->` and `<!-- /serving -->`; what stands between is
generated from `benchmarks/serving/results/*.jsonl`:

    serving:bench     time to first token and per token of the sets of backends, model by model
    serving:stages    GPU time of a decode step by stage
    serving:check     agreement of the sets
    serving:load      servers under HTTP requests
    serving:drafts    servers with and without speculative decoding, judged by one without

    python tools/serving_tables.py            write
    python tools/serving_tables.py --check    exit with 1 if a page differs from what would be written
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "serving" / "results"
PAGES = ("README.md", "docs", "benchmarks")
MARKED = re.compile(r"(<!-- serving:(?P<name>\w+) -->\n).*?(<!-- /serving -->)", re.DOTALL)
KEYS = ("kind", "model", "layers", "kv", "case", "mode", "set", "reference", "drafts", "round")

Line = dict[str, Any]


def read(folder: Path) -> tuple[dict[str, Line], list[Line]]:
    """(environments by run, the latest line of each kind, model, case and set, in order of first appearance)."""
    environments: dict[str, Line] = {}
    latest: dict[tuple[Any, ...], Line] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
            line = json.loads(text)
            if "env" in line:
                environments[line["env"]["run_id"]] = line["env"]
                continue
            if line["kind"] == "engine":
                environments[line["run_id"]]["sglang"] = line["sglang"]
            latest[tuple(line.get(key) for key in KEYS)] = line
    return environments, list(latest.values())


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column to the left."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def groups(lines: Iterable[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    """Lines by the values of some keys."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(line.get(key) for key in keys), []).append(line)
    return found


def title(model: str, layers: int | None, kv: str) -> str:
    cut = f", first {layers} layers" if layers else ""
    return f"{model}{cut}, {kv.upper()} KV cache"


def order(lines: Iterable[Line]) -> list[str]:
    """Sets as columns: SGLang's own first."""
    names = dict.fromkeys(line["set"] for line in lines)
    return sorted(names, key=lambda name: name.startswith("hpc"))


def spelled(case: str) -> str:
    """`8 x 1024` of 8x1024, `8 of the trace` of a batch of mixed lengths."""
    return case.replace("mixed", "of the trace") if "mixed" in case else case.replace("x", " x ")


def bench(lines: list[Line]) -> str:
    text = []
    for (model, layers, kv), mine in groups(lines, "model", "layers", "kv").items():
        names = order(mine)
        own = "hpc" if "hpc" in names else names[-1]
        rows = []
        for (case,), one in groups(mine, "case").items():
            by_set = {line["set"]: line for line in one}
            cells = [spelled(case)]
            for key, digits in (("step_ms", 3), ("ttft_ms", 1)):
                values = [by_set[name][key] if name in by_set else None for name in names]
                cells += ["-" if value is None else f"{value:.{digits}f}" for value in values]
                first, last = values[0], values[names.index(own)]
                cells.append(f"{first / last:.2f}x" if first and last else "-")
            rows.append(cells)
        gain = f"{names[0]} / {own}"
        heads = ["requests x prompt", *(f"ms a token, {name}" for name in names), gain]
        heads += [*(f"ms to the first, {name}" for name in names), gain]
        text.append(f"{title(model, layers, kv)}:\n\n{table(heads, rows)}")
    return "\n".join(text)


def stages(lines: list[Line]) -> str:
    text = []
    for (model, layers, kv, case), mine in groups(lines, "model", "layers", "kv", "case").items():
        names = order(mine)
        by_set = {line["set"]: line for line in mine}
        total = {name: sum(by_set[name]["stages"].values()) for name in names}
        known = dict.fromkeys(stage for name in names for stage in by_set[name]["stages"])
        rows = [
            [stage, *(f"{by_set[name]['stages'].get(stage, 0.0):.0f}" for name in names)] for stage in known
        ]
        rows.append(["sum", *(f"{total[name]:.0f}" for name in names)])
        text.append(
            f"{title(model, layers, kv)}, {spelled(case)}, µs of GPU time a step:\n\n"
            + table(["stage", *names], rows)
        )
    return "\n".join(text)


def check(lines: list[Line]) -> str:
    rows = []
    for line in lines:
        if line["mode"] == "repeated":
            continue
        rows.append([
            title(line["model"], line["layers"], line["kv"]), f"{line['set']} / {line['reference']}", line["mode"],
            f"{line['requests']} x {line['steps']}", f"{100 * line['agreement']:.1f} %", f"{line['cosine']:.5f}",
            f"{line['cosine_min']:.5f}", f"{line['flipped_margin']:.2f} of {line['median_margin']:.2f}",
        ])  # fmt: skip
    heads = ["model", "sets", "mode", "tokens", "same choice", "cosine", "least cosine", "margin of a flip"]
    return table(heads, rows)


def drafted(line: Line) -> str:
    """Name of a set, and the drafts that it verified."""
    return f"{line['set']}, {line['drafts']} drafts" if line.get("drafts") else line["set"]


def load(lines: list[Line]) -> str:
    rows = [
        [
            title(line["model"], line["layers"], line["kv"]), drafted(line), str(line["clients"]),
            str(line["requests"]), str(line["errors"]), f"{line['tokens']} of {line['tokens_wanted']}",
            str(line["cached_tokens"]), f"{line['tokens_per_s']:.0f}",
            f"{line['ttft_ms']:.0f} / {line['ttft_p90_ms']:.0f}", f"{line['tpot_ms']:.1f} / {line['tpot_p90_ms']:.1f}",
        ]
        for line in lines
    ]  # fmt: skip
    heads = ["model", "set", "clients", "requests", "errors", "tokens", "prompt tokens from cache", "tokens / s",
             "ms to the first, p50 / p90", "ms a token, p50 / p90"]  # fmt: skip
    return table(heads, rows)


def drafts(lines: list[Line]) -> str:
    rows = [
        [
            title(line["model"], line["layers"], line["kv"]), drafted(line), str(line["round"] + 1),
            f"{line['errors']} of {line['requests']}", f"{line['tokens']} of {line['tokens_wanted']}",
            f"{line['accepted']:.2f}" if "accepted" in line else "-", f"{100 * line['chosen']:.1f} %",
            f"{line['flipped_margin']:.2f} of {line['median_margin']:.2f}",
        ]
        for line in lines
    ]  # fmt: skip
    heads = ["model", "set", "round", "errors", "tokens", "tokens a verification", "the judge's choice",
             "margin of a flip"]  # fmt: skip
    return table(heads, rows)


PARTS: dict[str, tuple[str, Callable[[list[Line]], str]]] = {
    "bench": ("bench", bench), "stages": ("profile", stages), "check": ("check", check), "load": ("load", load),
    "drafts": ("drafts", drafts),
}  # fmt: skip


def origin(environment: Line) -> str:
    commit = environment["commit"][:10] or "unknown commit"
    changed = ", changed" if environment["dirty"] else ""
    sglang = f", SGLang {environment['sglang']}" if "sglang" in environment else ""
    found = f"torch {environment['torch']}, triton {environment['triton']}{sglang}"
    return f"{environment['gpu']}, {found}, hpc {commit}{changed}"


def render(name: str, folder: Path) -> str:
    """Markdown between the comments; KeyError for a part that there is not."""
    kind, make = PARTS[name]
    environments, lines = read(folder)
    chosen = [line for line in lines if line["kind"] == kind]
    if not chosen:
        return "Nothing has been recorded yet.\n"
    from_ = dict.fromkeys(origin(environments[line["run_id"]]) for line in chosen)
    return f"{make(chosen)}\n{'; '.join(from_)}.\n"


def fill(page: str, folder: Path) -> str:
    """The page with every generated part replaced."""
    return MARKED.sub(lambda match: f"{match[1]}{render(match['name'], folder)}{match[3]}", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fill the parts that come from benchmarks/serving.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is out of date"
    )
    only_check = parser.parse_args(arguments).check
    stale = []
    for name in PAGES:
        path = ROOT / name
        for page in sorted(path.rglob("*.md")) if path.is_dir() else [path]:
            before = page.read_text(encoding="utf-8")
            after = fill(before, RESULTS)
            if after != before:
                stale.append(page.relative_to(ROOT))
                if not only_check:
                    page.write_text(after, encoding="utf-8")
    for page in stale:
        print(f"{page}: {'out of date; run tools/serving_tables.py' if only_check else 'written'}")
    return 1 if only_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
