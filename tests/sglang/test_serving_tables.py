"""tools/serving_tables.py: the latest line of each case, and pages that hold no typed figure."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENV = {
    "run_id": "r",
    "gpu": "NVIDIA H200",
    "torch": "2.11",
    "triton": "3.6",
    "commit": "0123456789abc",
    "dirty": False,
}
SHARED = {"run_id": "r", "model": "m", "layers": None, "kv": "fp8"}


@pytest.fixture
def tables() -> Any:
    spec = importlib.util.spec_from_file_location("serving_tables", ROOT / "tools" / "serving_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(tmp_path: Path) -> Path:
    agree = {"requests": 8, "steps": 32, "agreement": 0.99, "cosine": 0.999, "cosine_min": 0.99,
             "flipped_margin": 0.1, "median_margin": 0.8}  # fmt: skip
    lines: list[dict[str, Any]] = [
        {"env": ENV},
        {"kind": "engine", "set": "hpc", "sglang": "0.5.17", **SHARED},
        {"kind": "bench", "set": "hpc", "case": "4x1024", "step_ms": 9.0, "ttft_ms": 9.0, **SHARED},
        {"kind": "bench", "set": "default", "case": "4x1024", "step_ms": 1.5, "ttft_ms": 15.0, **SHARED},
        {"kind": "bench", "set": "hpc", "case": "4x1024", "step_ms": 1.0, "ttft_ms": 12.0, **SHARED},
        {"kind": "profile", "set": "hpc", "case": "4x1024", "stages": {"experts": 400.0}, **SHARED},
        {"kind": "check", "set": "hpc", "reference": "default", "mode": "graph", **agree, **SHARED},
        {"kind": "check", "set": "hpc", "reference": "hpc", "mode": "repeated", "identical": True, **SHARED},
    ]
    (tmp_path / "H200.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_tables_from_a_result_file(tables: Any, results: Path) -> None:
    bench = tables.render("bench", results)
    assert "| 4 x 1024 | 1.500 | 1.000 | 1.50x | 15.0 | 12.0 | 1.25x |" in bench
    assert "NVIDIA H200, torch 2.11, triton 3.6, SGLang 0.5.17, hpc 0123456789." in bench
    assert "| experts | 400 |" in tables.render("stages", results)
    check = tables.render("check", results)
    assert "| 8 x 32 | 99.0 % | 0.99900 |" in check and "repeated" not in check
    assert tables.render("load", results) == "Nothing has been recorded yet.\n"
    page = tables.fill("a\n<!-- serving:load -->\nold\n<!-- /serving -->\nb\n", results)
    assert page == "a\n<!-- serving:load -->\nNothing has been recorded yet.\n<!-- /serving -->\nb\n"


def test_each_kind_of_drafts_and_each_round_has_a_row(tables: Any, results: Path) -> None:
    counts = {"requests": 64, "errors": 0, "tokens": 9, "tokens_wanted": 9}
    judged = {"chosen": 0.998, "flipped_margin": 0.06, "median_margin": 1.44, **counts}
    load = {"clients": 64, "cached_tokens": 0, "tokens_per_s": 5.0, "ttft_ms": 1.0, "ttft_p90_ms": 2.0,
            "tpot_ms": 3.0, "tpot_p90_ms": 4.0, **counts}  # fmt: skip
    new = {**SHARED, "run_id": "s", "set": "hpc-plugin"}
    lines: list[dict[str, Any]] = [
        {"env": {**ENV, "run_id": "s", "commit": "fedcba9876543"}},
        {
            "kind": "engine",
            "sglang": "0.5.17",
            **new,
            "set": "hpc",
        },  # the latest of its kind: the older run keeps its own
        {"kind": "drafts", "drafts": None, "round": 0, **judged, **new},
        *(
            {"kind": "drafts", "drafts": "ngram", "round": n, "accepted": 1.0 + n, **judged, **new}
            for n in (0, 1)
        ),
        *({"kind": "load", "drafts": kind, **load, **new} for kind in ("standalone", "ngram")),
    ]
    with (results / "H200.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    drafts = tables.render("drafts", results)
    assert "| hpc-plugin | 1 | 0 of 64 | 9 of 9 | - | 99.8 % | 0.06 of 1.44 |" in drafts
    assert "| hpc-plugin, ngram drafts | 2 | 0 of 64 | 9 of 9 | 2.00 |" in drafts
    served = tables.render("load", results)
    assert "hpc-plugin, standalone drafts" in served and "hpc-plugin, ngram drafts" in served
    assert "SGLang 0.5.17, hpc 0123456789." in tables.render("bench", results)


def test_pages_are_up_to_date(tables: Any) -> None:
    assert tables.main(["--check"]) == 0
