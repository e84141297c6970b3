"""Fill the generated parts of README.md and of the documentation.

A page holds two comments, for example `<!-- table:decode -->` and `<!-- /table -->`; what stands between is generated:

    table:decode      the operator's measured cases with a target; `table:decode-all`: all of them
    bars:decode       its images of the report, for pages in docs/operators
    diagram:decode    the diagram of the README in its folder

    python tools/readme_tables.py            write
    python tools/readme_tables.py --check    exit with 1 if a page differs from what would be written
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from hpc.bench.report import origin  # noqa: E402
from hpc.bench.results import Env, Row, latest, read  # noqa: E402
from hpc.bench.table import notes, to_markdown  # noqa: E402
from hpc.common import registry  # noqa: E402

PAGES = ("README.md", "docs", "src")
GPU = "H200"
MARKED = re.compile(
    r"(<!-- (?P<kind>table|bars|diagram):(?P<name>[\w.-]+) -->\n).*?(<!-- /(?P=kind) -->)", re.DOTALL
)


@dataclass(frozen=True)
class Source:
    """Rows of one operator on one GPU: the cases with `tag`."""

    op: str
    gpu: str
    tag: str


def source_of(name: str) -> Source:
    """`decode`: the targets of the operator of that name or last part of a name; `decode-all`: all it times.

    KeyError if there is no such operator.
    """
    op, _, every = name.partition("-")
    found = [known for known in registry.names() if op in (known, known.rsplit(".", 1)[-1])]
    if len(found) != 1 or every not in ("", "all"):
        raise KeyError(
            f"no table {name!r}; operators: {', '.join(registry.names())}, or one of them with -all"
        )
    return Source(found[0], GPU, "bench" if every else "target")


def rows_of(source: Source, results: Path) -> tuple[list[Env], list[Row]]:
    """The latest rows of the tagged cases, in the order of the cases, and the runs they come from."""
    path = results / source.gpu / f"{source.op}.jsonl"
    if not path.exists():
        return [], []
    runs, rows = read(path)
    order = {case.name: place for place, case in enumerate(registry.get(source.op).cases(source.tag))}
    chosen = sorted((row for row in latest(rows) if row.case in order), key=lambda row: order[row.case])
    used = {row.run_id for row in chosen}
    return [run for run in runs if run.run_id in used], chosen


def render(source: Source, results: Path) -> str:
    """Markdown between the comments."""
    runs, rows = rows_of(source, results)
    if not rows:
        return f"No measurement of {source.op} on {source.gpu} has been recorded yet.\n"
    text = [to_markdown(rows), *(f"\n{note}.\n" for note in notes(rows))]
    origins = "; ".join(dict.fromkeys(origin(run) for run in runs))
    path = f"benchmarks/results/{source.gpu}/{source.op}.jsonl"
    text.append(
        f"\nTimes in µs, medians of CUDA-graph replays with cold caches. {origins}. Source: `{path}`.\n"
    )
    return "".join(text)


def bars(source: Source) -> str:
    """Links to the report's images, or nothing where there are none."""
    names = sorted(
        path.name for path in (ROOT / "docs" / "measured").glob(f"{source.gpu}-{source.op}-[0-9]*.png")
    )
    what = f"{source.op} on {source.gpu}: ratio to rivals, fraction of the floor"
    return "".join(f"![{what}](../measured/{name})\n\n" for name in names)


def diagram(source: Source) -> str:
    """The first code block of the operator's README."""
    folder = ROOT / "src" / Path(*registry.OPERATORS[source.op].split(".")[:-1])
    found = re.search(
        r"^```\n.*?^```\n", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    if found is None:
        raise ValueError(f"{folder}/README.md has no diagram")
    return found[0]


def fill(page: str, results: Path) -> str:
    """The page with every generated part replaced; KeyError for one of no operator."""

    def replaced(match: re.Match[str]) -> str:
        source = source_of(match["name"])
        text = {
            "table": lambda: render(source, results),
            "bars": lambda: bars(source),
            "diagram": lambda: diagram(source),
        }
        return f"{match[1]}{text[match['kind']]()}{match[4]}"

    return MARKED.sub(replaced, page)


def pages() -> list[Path]:
    """Markdown files that may hold generated parts."""
    found: list[Path] = []
    for name in PAGES:
        path = ROOT / name
        found += sorted(path.rglob("*.md")) if path.is_dir() else [path]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fill the generated parts of README.md and docs.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is out of date"
    )
    check = parser.parse_args(arguments).check
    stale = []
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = fill(before, ROOT / "benchmarks" / "results")
        if after == before:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.write_text(after, encoding="utf-8")
    for name in stale:
        print(f"{name}: generated parts are out of date; run `make tables`" if check else f"{name}: written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
