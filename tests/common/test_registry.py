"""The registry and the house rules that every operator follows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import hpc
from hpc.common import arch, registry
from hpc.common import warmup as warmup_module
from hpc.common.operator import TAGS, Case, Operator


@pytest.mark.parametrize("name", registry.names())
def test_operator_is_complete(name: str) -> None:
    operator = registry.get(name)
    assert isinstance(operator, Operator)
    assert operator.name == name
    assert operator.functions
    for function in operator.functions:
        assert function in hpc.__all__
    for tag in TAGS:
        cases = operator.cases(tag)
        assert cases, f"no case carries {tag!r}"
        assert len({case.name for case in cases}) == len(cases), f"case names of {tag!r} are not unique"
        for case in cases:
            assert tag in case.tags
            tolerance, floor = operator.tolerance(case), operator.floor(case)
            assert 0 < tolerance.rms <= tolerance.max
            assert floor.bytes > 0
            assert floor.kind in ("bf16", "fp8")


def test_unknown_operator_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"'attention\.nothing'; known are: attention\.decode"):
        registry.get("attention.nothing")


def test_case_refuses_unknown_tags() -> None:
    with pytest.raises(ValueError, match="unknown tags"):
        Case("x", frozenset({"slow"}))


def test_operators_do_not_import_one_another(root: Path) -> None:
    """What two operators need lives in common/."""
    folders = {module.rpartition(".")[0] for module in registry.OPERATORS.values()}
    for folder in folders:
        for path in (root / "src" / folder.replace(".", "/")).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                imported = node.module if isinstance(node, ast.ImportFrom) else None
                others = [other for other in folders - {folder} if (imported or "").startswith(other)]
                assert not others, f"{path.name} imports {imported}"


def test_files_stay_small(root: Path) -> None:
    """A public interface stays within 250 lines, any other file within 500."""
    for path in (root / "src").rglob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= (250 if path.name == "api.py" else 500), f"{path.relative_to(root)}: {lines} lines"


# --- warmup -----------------------------------------------------------------------------------------


class FakeOperator:
    name = "attention.decode"

    def __init__(self) -> None:
        self.targets: list[object] = []

    def warmup(self, device: object, progress: object) -> int:
        self.targets.append(device)
        if callable(progress):
            progress("attention.decode fp8 d128", 1, 1)
        return 3


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> FakeOperator:
    fake = FakeOperator()
    monkeypatch.setattr(registry, "get", lambda name: fake)
    return fake


def test_warmup_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, operator: FakeOperator) -> None:
    monkeypatch.setattr(arch, "gpu_available", lambda: False)
    with pytest.warns(RuntimeWarning, match="there is no GPU here"):
        assert warmup_module.warmup() == 0
    assert operator.targets == []


def test_warmup_for_a_named_target(operator: FakeOperator) -> None:
    steps: list[tuple[str, int, int]] = []
    assert (
        warmup_module.warmup("attention.decode", device="sm90", progress=lambda *step: steps.append(step))
        == 3
    )
    assert operator.targets == ["sm90"]
    assert steps == [("attention.decode fp8 d128", 1, 1)]


def test_warmup_resolves_the_current_device(monkeypatch: pytest.MonkeyPatch, operator: FakeOperator) -> None:
    monkeypatch.setattr(arch, "gpu_available", lambda: True)
    monkeypatch.setattr(arch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    warmup_module.warmup("attention.decode")
    warmup_module.warmup(["attention.decode"], device="cuda:0")
    assert operator.targets == [torch.device("cuda", 1), torch.device("cuda", 0)]
