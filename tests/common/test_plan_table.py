"""Tables of measured plans: lookup, merging, and that a table of another GPU is never used in silence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc.common.plan_table import Entry, PlanTable, dump, load, merged, parse, path_of

AXES = (("heads", 8), ("fp8", True))
H200 = ("NVIDIA H200", 132)


def entry(size: int, stages: int | None, axes: tuple[tuple[str, int | bool | str], ...] = AXES) -> Entry:
    plan = None if stages is None else {"stages": stages}
    return Entry(axes, size, plan, 10.0, 11.0, 1.1) if plan else Entry(axes, size, None)


def table(*entries: Entry, gpu: str = H200[0], sms: int = H200[1]) -> PlanTable:
    return PlanTable(gpu, sms, entries, "driver 580")


def save(folder: Path, found: PlanTable, as_gpu: str = H200[0]) -> Path:
    path = path_of(folder, as_gpu)
    path.write_text(dump(found))
    load.cache_clear()
    return path


@pytest.mark.parametrize(("size", "stages"), [(1, 2), (8, 2), (9, 3), (64, 3), (65, None)])
def test_lookup_takes_the_smallest_measured_size_that_is_enough(size: int, stages: int | None) -> None:
    found = table(entry(64, 3), entry(8, 2)).find(dict(AXES), size)
    assert (found.plan if found else None) == ({"stages": stages} if stages else None)


def test_lookup_is_exact_on_the_other_axes() -> None:
    assert table(entry(64, 3)).find({"heads": 9, "fp8": True}, 8) is None
    assert table(entry(64, 3)).find({"fp8": True, "heads": 8}, 8) is not None, "their order does not matter"


def test_a_size_that_the_analytic_choice_won_stops_a_larger_ones_plan() -> None:
    found = table(entry(8, None), entry(64, 3))
    assert found.find(dict(AXES), 8).plan is None  # type: ignore[union-attr]
    assert found.find(dict(AXES), 9).plan == {"stages": 3}  # type: ignore[union-attr]


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(1, 512)),
        st.one_of(st.none(), st.integers(2, 8)),
        max_size=12,
    )
)
def test_text_round_trip_keeps_every_lookup(points: dict[tuple[int, int], int | None]) -> None:
    entries = [entry(size, stages, (("heads", heads),)) for (heads, size), stages in points.items()]
    found = table(*entries)
    back = parse(dump(found))
    assert dump(back) == dump(found)
    for heads in range(4):
        for size in (1, 7, 100, 511):
            ours, theirs = found.find({"heads": heads}, size), back.find({"heads": heads}, size)
            assert (ours and (ours.size, ours.plan)) == (theirs and (theirs.size, theirs.plan))


def test_text_has_one_entry_a_line_in_order() -> None:
    lines = dump(table(entry(64, 3), entry(8, None))).splitlines()
    assert [json.loads(line.rstrip(","))["size"] for line in lines[1:-1]] == [8, 64]
    assert '"gpu": "NVIDIA H200", "sms": 132' in lines[0]


def test_merging_replaces_points_and_drops_idle_ones() -> None:
    old = table(entry(8, 2), entry(64, 3))
    new = merged(old, *H200, [entry(64, None), entry(128, None)], "now")
    assert new is not None and [(e.size, e.plan) for e in new.entries] == [(8, {"stages": 2})]
    assert merged(new, *H200, [entry(8, None)], "now") is None, "nothing is left to write"
    kept = merged(old, *H200, [entry(8, None)], "now")
    assert kept is not None and [(e.size, e.plan) for e in kept.entries] == [(8, None), (64, {"stages": 3})]


def test_merging_drops_a_table_of_another_gpu() -> None:
    old = table(entry(8, 2), gpu="NVIDIA H100 80GB HBM3")
    new = merged(old, *H200, [entry(64, 3)], "now")
    assert new is not None and new.gpu == "NVIDIA H200" and [e.size for e in new.entries] == [64]


def test_a_table_is_found_by_the_exact_name_of_the_gpu(tmp_path: Path) -> None:
    save(tmp_path, table(entry(8, 2)))
    assert load(tmp_path, *H200) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path, "NVIDIA H100 80GB HBM3", 132) is None
        assert load(tmp_path, "NVIDIA H20", 78) is None
        assert load(tmp_path, "", 132) is None, "without a GPU"


@pytest.mark.parametrize(("gpu", "sms"), [("NVIDIA H100 80GB HBM3", 132), ("NVIDIA H200", 16)])
def test_a_table_of_another_gpu_under_this_ones_name_is_refused_aloud(
    tmp_path: Path, gpu: str, sms: int
) -> None:
    """A copied or renamed file, or a slice of the card with fewer multiprocessors."""
    save(tmp_path, table(entry(8, 2), gpu=gpu, sms=sms))
    with pytest.warns(RuntimeWarning, match=rf"measured on {gpu} with {sms} .* this is NVIDIA H200 with 132"):
        assert load(tmp_path, *H200) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"gpu": "NVIDIA H200"}', '{"gpu": "NVIDIA H200", "sms": 132, "entries": 3}']
)
def test_a_broken_table_warns_and_is_not_used(tmp_path: Path, text: str) -> None:
    path_of(tmp_path, H200[0]).write_text(text)
    load.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert load(tmp_path, *H200) is None
