"""Batches drawn from traces."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from hpc.bench.traces import BUILTIN, Request, draw_batch, load


@pytest.mark.parametrize("name", list(BUILTIN))
def test_extracts_come_with_the_package(name: str) -> None:
    requests = load(name)
    assert len(requests) == 2000
    assert all(request.prompt > 0 and request.generated >= 0 for request in requests)
    lens = draw_batch(requests, 64, seed=1)
    assert len(lens) == 64 and min(lens) >= 1 and len(set(lens)) > 30


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\nx,3180,8\n")
    assert load(path) == [Request(4808, 10), Request(3180, 8)]


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="conversation, code"):
        load("nowhere.csv")
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="ContextTokens"):
        load(path)
    path.write_text("ContextTokens,GeneratedTokens\n1,2\n3,\n")
    with pytest.raises(ValueError, match="line 3"):
        load(path)
    path.write_text("ContextTokens,GeneratedTokens\n")
    with pytest.raises(ValueError, match="no requests"):
        load(path)
    with pytest.raises(ValueError, match="generates"):
        draw_batch([Request(5, 0)], 3)


def test_cached_part_is_uniform() -> None:
    lens = draw_batch([Request(1000, 10)], 4000, seed=3)
    assert set(lens) == set(range(1001, 1011))
    assert mean(lens) == pytest.approx(1005.5, abs=0.2)


def test_long_outputs_are_met_more_often() -> None:
    """A request that generates 9 times as many tokens is 9 times as likely to be running."""
    lens = draw_batch([Request(10, 100), Request(10000, 900), Request(50000, 0)], 4000, seed=3)
    assert sum(length > 10000 for length in lens) / 4000 == pytest.approx(0.9, abs=0.02)
    assert max(lens) < 50000


def test_seed_and_limit() -> None:
    requests = load("code")
    assert (
        draw_batch(requests, 16, seed=7)
        == draw_batch(requests, 16, seed=7)
        != draw_batch(requests, 16, seed=8)
    )
    assert max(draw_batch(requests, 200, max_len=512)) == 512
