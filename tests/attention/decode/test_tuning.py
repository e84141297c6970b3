"""Measured plans of decode attention: what is searched, and when a table decides."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from hpc.attention.decode import case_lists, cases, choose, launch, tuning
from hpc.attention.decode.tuning import TUNING
from hpc.common import plan_table
from hpc.common.plan_table import Entry, PlanTable

H200 = "NVIDIA H200"
KEY = choose.Key(
    sm90=True, sms=132, batch=64, q_heads=64, kv_heads=8, head_dim=128, v_dim=128, page_size=64, max_pages=64,
    num_new_tokens=1, quant_type=1, gpu=H200,
)  # fmt: skip
KEYS = [
    KEY,
    replace(KEY, dynamic=False),
    replace(KEY, num_new_tokens=4),
    replace(KEY, head_dim=256, v_dim=256, quant_type=-1),
    replace(KEY, sm90=False),
]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a table for a GPU with one plan at batch 64."""
    monkeypatch.setattr(choose, "CONFIGS", tmp_path)

    def install(key: choose.Key, plan: choose.Plan, gpu: str = H200, sms: int = 132) -> None:
        axes, size = choose.point(key)
        entry = Entry(tuple(axes.items()), size, asdict(plan), 1.0, 2.0, 2.0)
        plan_table.path_of(tmp_path, H200).write_text(plan_table.dump(PlanTable(gpu, sms, (entry,))))
        plan_table.load.cache_clear()
        choose.choose.cache_clear()

    yield install
    plan_table.load.cache_clear()
    choose.choose.cache_clear()


@pytest.mark.parametrize("key", KEYS)
def test_candidates_hold_the_analytic_plan_and_others(key: choose.Key) -> None:
    legal = [plan for plan in TUNING.candidates(key) if choose.is_legal(plan, key) is None]
    assert choose.analytic(key) in legal and len(set(legal)) > 2


def test_every_timed_case_is_searched_by_both_paths() -> None:
    names = {case.name for case in TUNING.cases()}
    timed = {case.name for case in case_lists.target_cases() + case_lists.bench_cases()}
    assert names == timed | {f"{name} static" for name in timed}


def test_distributions_of_one_batch_share_a_point() -> None:
    """A plan is chosen without the lengths, so it is judged by all of them."""
    small = [replace(case_lists.interpret_cases()[0].params, lens=lens) for lens in ((64, 3), (5, 130))]
    points = [TUNING.point(TUNING.key(cases.make_tensors(params, "cpu", 0))) for params in small]
    assert points[0] == points[1]


def test_a_measured_plan_decides_up_to_its_size(measured) -> None:
    plan = replace(choose.analytic(KEY), stages=5)
    measured(KEY, plan)
    assert choose.choose(KEY) == plan
    assert choose.choose(replace(KEY, batch=3)) == plan
    assert choose.choose(replace(KEY, batch=65)) == choose.analytic(replace(KEY, batch=65))
    assert choose.choose(replace(KEY, q_heads=32)) == choose.analytic(replace(KEY, q_heads=32))


def test_a_table_decides_nothing_where_it_must_not(measured) -> None:
    plan = replace(choose.analytic(KEY), stages=5)
    measured(KEY, plan)
    for other in (
        replace(KEY, gpu="NVIDIA H100 80GB HBM3"),
        replace(KEY, gpu=""),
        replace(KEY, splitk=False),
        replace(KEY, dynamic=False, batch_invariant=True),
    ):
        assert choose.choose(other) == choose.analytic(other)


def test_a_table_of_another_gpu_is_said_and_not_used(measured) -> None:
    measured(KEY, replace(choose.analytic(KEY), stages=5), gpu="NVIDIA H20", sms=78)
    with pytest.warns(RuntimeWarning, match="measured on NVIDIA H20 with 78"):
        assert choose.choose(KEY) == choose.analytic(KEY)


def test_an_illegal_plan_of_a_table_is_not_used(measured) -> None:
    measured(KEY, replace(choose.analytic(KEY), stages=99))
    assert choose.choose(KEY) == choose.analytic(KEY)


def test_a_table_older_than_the_plan_is_said_and_not_used(measured) -> None:
    measured(KEY, replace(choose.analytic(KEY), stages=5))
    path = plan_table.path_of(choose.CONFIGS, KEY.gpu)
    path.write_text(path.read_text().replace('"stages"', '"depth"'))
    plan_table.load.cache_clear()
    with pytest.warns(RuntimeWarning, match="no field 'depth'.*hpc tune attention.decode"):
        assert choose.choose(KEY) == choose.analytic(KEY)


def test_scratch_follows_the_measured_plan(measured) -> None:
    """The exact size is stated without knowing window, sinks and the like: none of them may change the plan."""
    key = replace(KEY, dynamic=False)
    plan = replace(choose.analytic(key), num_splits=3)
    measured(key, plan)
    sizes = {
        launch.scratch(found, choose.choose(found))
        for found in (key, replace(key, window=True), replace(key, sinks=True, return_lse=True, max_pages=1))
    }
    assert sizes == {launch.scratch(key, plan)}


def test_prepared_call_runs_the_plan_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = cases.make_tensors(case_lists.interpret_cases()[0].params, "cpu", 0)
    seen = []
    monkeypatch.setattr(
        tuning.cases, "attend", lambda *args, **more: seen.append(more["plan"]) or torch.zeros(1)
    )
    plan = choose.analytic(TUNING.key(inputs))
    TUNING.prepare(inputs, plan)()
    assert seen == [plan]
