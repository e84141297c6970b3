"""README and the documentation: their code runs, their tables are generated, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
ROOT = Path(__file__).resolve().parents[1]


def _pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("README.md")]


# Blocks that stand on their own, by page and place.
EXAMPLES = {
    f"{page.relative_to(ROOT)} {number}": code
    for page in _pages()
    for number, code in enumerate(BLOCK.findall(page.read_text()), start=1)
    if code.startswith("import torch\nimport hpc\n")
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "tools" / "readme_tables.py"
    spec = importlib.util.spec_from_file_location("readme_tables", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: str, clean_environ: dict[str, str]) -> None:
    """On a machine without a GPU they run the reference. What they call `out` must be finite."""
    check = "\nout = globals().get('out')\nassert out is None or torch.isfinite(out).all()\n"
    if example.startswith(("README.md", "docs/getting-started.md")):
        check += "assert out.shape == (B, Hq, D) and (out[3] == 0).all()\n"
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[example] + check],
        env=clean_environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_entry_pages_have_a_runnable_example() -> None:
    pages = {example.rpartition(" ")[0] for example in EXAMPLES}
    assert {"README.md", "docs/getting-started.md", "docs/serving.md"} <= pages


def test_links_lead_somewhere(root: Path) -> None:
    for path in _pages():
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.relative_to(root)} links to {target}"


def test_every_public_name_is_documented(root: Path) -> None:
    import hpc

    text = "".join(path.read_text() for path in _pages())
    missing = [name for name in hpc.__all__ if not name.startswith("_") and name not in text]
    assert not missing or missing == ["QuantType"]


def test_commands_of_the_readme_exist(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", (root / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


class FakeOperator:
    def cases(self, tag: str) -> list[object]:
        from hpc.common.operator import Case

        return [Case("fp8 8/1 64x4K", frozenset({tag})), Case("fp8 8/1 1x64K+15x4K", frozenset({tag}))]


def results(folder: Path) -> None:
    """Two runs of one case; the second is the one to show. One case that is not tagged."""
    env = {"gpu": "NVIDIA H200", "driver": "570.1", "torch": "2.11.0", "triton": "3.6.0", "hpc": "0.1.0"}
    lines: list[dict[str, object]] = []
    for run, commit, time_us in (("a", "0" * 40, 99.0), ("b", "1" * 40, 20.0)):
        lines.append({"env": {**env, "commit": commit, "date": "2026-01-02T00:00:00Z", "run_id": run}})
        for case in ("fp8 8/1 64x4K", "untagged"):
            for provider, factor in (("hpc", 1.0), ("rival", 2.0)):
                row = {"op": "attention.decode", "case": case, "provider": provider, "run_id": run}
                times = {"time_us": time_us * factor, "floor_us": 15.0, "floor_kind": "read"}
                lines.append({**row, **times, "rms_rel": 1.7e-3, "max_rel": 3e-3})
    path = folder / "H200" / "attention.decode.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_table_shows_the_latest_run_only(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool.registry, "get", lambda name: FakeOperator())
    results(tmp_path)
    page = "before\n<!-- table:decode -->\nstale\n<!-- /table -->\nafter\n"
    filled = tool.fill(page, tmp_path)
    assert filled.startswith("before\n<!-- table:decode -->\n| case")
    assert filled.endswith("<!-- /table -->\nafter\n")
    assert "stale" not in filled and "untagged" not in filled and "99" not in filled
    row = next(line for line in filled.splitlines() if line.startswith("| fp8 8/1 64x4K"))
    assert all(cell in row for cell in ("15.0", "20.0", "40.0", "2.00x", "75 %", "1.7e-03"))
    assert "NVIDIA H200, driver 570.1, torch 2.11.0, triton 3.6.0, hpc 0.1.0, commit 1111111111" in filled
    assert tool.fill(filled, tmp_path) == filled, "filling twice changes nothing"


def test_no_result_file_means_no_figure(tool: ModuleType, tmp_path: Path) -> None:
    page = "<!-- table:decode -->\n| 1.0 |\n<!-- /table -->\n"
    assert "has been recorded yet" in tool.fill(page, tmp_path)


def test_unknown_table_is_an_error(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        tool.fill("<!-- table:nothing -->\n<!-- /table -->\n", tmp_path)


def test_every_operator_has_a_page(root: Path) -> None:
    """With each of its functions, a place for its measured table, and an entry in the navigation."""
    from hpc.common import registry

    navigation = (root / "mkdocs.yml").read_text()
    pages = {path: path.read_text() for path in (root / "docs" / "operators").glob("*.md")}
    for name in registry.names():
        package = registry.OPERATORS[name].rpartition(".")[0]
        mine = [path for path, text in pages.items() if f"::: {package}.api" in text]
        assert len(mine) == 1, f"{name}: one page under docs/operators with `::: {package}.api`, found {mine}"
        text = pages[mine[0]]
        missing = [function for function in registry.get(name).functions if f"- {function}\n" not in text]
        assert not missing, f"{mine[0].name} does not list {missing}"
        for kind in ("diagram", "bars", "table"):
            assert f"<!-- {kind}:" in text, f"{mine[0].name}: no place for the {kind}"
        assert f"operators/{mine[0].name}" in navigation


def test_every_page_is_in_the_navigation(root: Path) -> None:
    navigation = (root / "mkdocs.yml").read_text()
    for path in (root / "docs").rglob("*.md"):
        assert str(path.relative_to(root / "docs")) in navigation, path.name


def test_pictures_are_used(root: Path) -> None:
    text = "".join(path.read_text() for path in (root / "docs").rglob("*.md"))
    for path in (root / "docs").rglob("*.png"):
        assert f"{path.parent.name}/{path.name}" in text, f"nothing shows {path.name}"
