"""Measured plans of the fused MoE: what is searched, how a table is read, and when it decides."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hpc
from hpc.bench import runner, timer
from hpc.cli import app
from hpc.common import arch, plan_table
from hpc.common.errors import InvalidArgument
from hpc.common.operator import Case
from hpc.common.plan_table import Entry, PlanTable
from hpc.moe import case_lists, cases, choose, entry, plan, scratch, tuning, warm
from hpc.moe.plan import Key, Plan
from hpc.moe.tuning import TUNING

H200 = "NVIDIA H200"
TARGETS = {
    case.name: replace(warm.key_of(case.params, "sm90"), gpu=H200, sms=132)
    for case in case_lists.target_cases()
}
KEY = TARGETS["Hy3 TP8 M=64"]
OTHER = replace(plan.analytic(KEY), up=replace(plan.analytic(KEY).up, stages=2))  # type: ignore[type-var]
# Every backend, both kinds of scales, few and many rows
KEYS = [
    *(TARGETS[f"{name} M={tokens}"] for name in case_lists.SHAPES for tokens in (1, 8, 64, 512, 4096)),
    replace(KEY, sm90=False),
    replace(KEY, inter=80, block_scales=True),
]
Install = Callable[..., None]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a table for an H200 with one plan, at the size of a key."""
    monkeypatch.setattr(choose, "CONFIGS", tmp_path)

    def install(key: Key, fields: dict[str, Any], gpu: str = H200, sms: int = 132) -> None:
        axes, size = choose.point(key)
        table = PlanTable(gpu, sms, (Entry(tuple(axes.items()), size, fields, 1.0, 2.0, 2.0),))
        plan_table.path_of(tmp_path, H200).write_text(plan_table.dump(table))
        plan_table.load.cache_clear()

    yield install
    plan_table.load.cache_clear()


def candidates(key: Key) -> list[Plan]:
    """What the search times beside the analytic plan."""
    return [
        each for each in dict.fromkeys(TUNING.candidates(key))
        if TUNING.is_legal(each, key) is None and each != plan.analytic(key)
    ]  # fmt: skip


def test_every_plan_survives_the_file() -> None:
    for key in KEYS:
        for each in (plan.analytic(key), *plan.alternatives(key).values(), *candidates(key)):
            assert plan_table.from_fields(plan.Plan, json.loads(json.dumps(asdict(each)))) == each


def test_fields_of_later_versions_take_their_defaults() -> None:
    fields = asdict(OTHER)
    del fields["tiny"], fields["up"]["fresh"]
    assert plan_table.from_fields(plan.Plan, fields) == replace(OTHER, up=replace(OTHER.up, fresh=128))  # type: ignore[type-var]


def broken(path: str, value: Any) -> Any:
    """The fields of a plan with one of them replaced, such as "up.box"; None takes it away."""
    fields = asdict(OTHER)
    *outer, name = path.split(".")
    inner = fields[outer[0]] if outer else fields
    if value is None:
        del inner[name]
    else:
        inner[name] = value
    return fields


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (broken("splits", 2), "plan has no field 'splits'"),
        (broken("up.splits", 2), "plan.up has no field 'splits'"),
        (broken("tile", None), "plan lacks 'tile'"),
        (broken("down.box", None), "plan.down lacks 'box'"),
        (broken("tile", "8"), "plan.tile is '8', not a int"),
        (broken("up.stages", True), "plan.up.stages is True, not a int"),
        (broken("fused_index", 1), "plan.fused_index is 1, not a bool"),
        (broken("up", 3), "plan.up is 3, not a Product"),
        ([], r"plan is \[\], not a Plan"),
    ],
)
def test_other_fields_are_refused_by_name(fields: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_table.from_fields(plan.Plan, fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (broken("splits", 2), "has no field 'splits'"),
        (broken("up.stages", 99), "up: .* bytes of shared memory"),
        (broken("up.stages", 0), "up: 0 stages"),
        (broken("up.boxes", 3), "up: 3 boxes"),
        (broken("backend", "cuda"), "unknown backend 'cuda'"),
        ({**asdict(OTHER), "backend": "tiny", "tiny": {**asdict(plan.TINY), "up_rows": 0}}, "must divide 16"),
    ],
)
def test_a_plan_that_cannot_run_is_said_and_not_used(measured: Install, fields: Any, why: str) -> None:
    measured(KEY, fields)
    with pytest.warns(RuntimeWarning, match=f"NVIDIA_H200.json: the plan for .* up to size 64 .*{why}"):
        assert choose.choose(KEY) == plan.analytic(KEY)


def test_a_measured_plan_decides_where_it_was_compared(measured: Install) -> None:
    """Down to the sizes at which the analytic choice is another plan than the one that it beat."""
    measured(KEY, asdict(OTHER))
    assert choose.choose(KEY) == OTHER
    used = [n for n in range(1, 200) if choose.choose(replace(KEY, num_tokens=n)) == OTHER]
    same = [n for n in range(1, 65) if plan.analytic(replace(KEY, num_tokens=n)) == plan.analytic(KEY)]
    assert used == same and 1 < used[0] < 33 and used[-1] == 64
    for alike in ({"bf16_input": True}, {"activation": "gelu"}, {"bf16_mul": False}, {"combined": False}):
        assert choose.choose(replace(KEY, **alike)) == OTHER  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": ""}, {"gpu": "NVIDIA H100 80GB HBM3"}, {"inter": 384}, {"top_k": 6}, {"experts_total": 384},
        {"block_scales": True}, {"bf16_weights": True}, {"down_bias": True}, {"dynamic_act": True},
        {"weight_on_input": True}, {"shared_experts": 1},
    ],
)  # fmt: skip
def test_a_table_decides_nothing_that_was_not_measured(measured: Install, change: dict[str, Any]) -> None:
    measured(KEY, asdict(OTHER))
    other = replace(KEY, **change)
    assert choose.choose(other) == plan.analytic(other) != OTHER


def test_results_of_every_pair_take_no_plan_that_beat_another(measured: Install) -> None:
    """One token: the analytic choice is the tiny kernels, which only combined results have."""
    key = replace(KEY, num_tokens=1)
    plans = [each for each in candidates(key) if each.backend == "sm90"]
    measured(key, asdict(plans[0]))
    assert choose.choose(key) == plans[0]
    apart = replace(key, combined=False)
    assert choose.choose(apart) == plan.analytic(apart)


def test_a_table_of_another_gpu_is_said_and_not_used(measured: Install) -> None:
    measured(KEY, asdict(OTHER), gpu="NVIDIA H20", sms=78)
    with pytest.warns(RuntimeWarning, match="measured on NVIDIA H20 with 78"):
        assert choose.choose(KEY) == plan.analytic(KEY)


def test_no_table_is_needed() -> None:
    for key in KEYS:
        if not plan_table.path_of(choose.CONFIGS, H200).exists():
            assert choose.choose(key) == plan.analytic(key)


def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for the device meets an H200."""
    for name, value in {
        "gpu_available": True,
        "capability": (9, 0),
        "sm_count": 132,
        "device_name": H200,
    }.items():
        monkeypatch.setattr(arch, name, lambda *_, value=value: value)


def test_scratch_and_warm_up_follow_the_measured_plan(
    measured: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    taller = next(each for each in candidates(KEY) if each.backend == "sm90" and each.tile == 16)
    measured(KEY, asdict(taller))
    on_h200(monkeypatch)
    size = hpc.get_fuse_moe_scratch_size(64, 8, 4096, 192, 192)
    assert size == scratch.layout(KEY, taller).size != scratch.layout(KEY, plan.analytic(KEY)).size
    params = next(case.params for case in case_lists.target_cases() if case.name == "Hy3 TP8 M=64")
    assert choose.choose(warm.key_of(params, "sm90", (H200, 132))) == taller
    assert choose.choose(warm.key_of(params, "sm90")) == plan.analytic(KEY)


def test_a_call_takes_the_measured_plan_or_its_own(measured: Install) -> None:
    measured(KEY, asdict(OTHER))
    assert entry._legal("fuse_moe", None, KEY) == OTHER
    assert entry._legal("fuse_moe", plan.analytic(KEY), KEY) == plan.analytic(KEY)
    with pytest.raises(InvalidArgument, match="shared memory"):
        entry._legal("fuse_moe", plan_table.from_fields(plan.Plan, broken("up.stages", 99)), KEY)


def test_the_searched_cases_are_the_timed_ones() -> None:
    searched = TUNING.cases()
    assert {case.name for case in searched} >= set(TARGETS)
    assert {case.params.routing for case in searched} == {"uniform", "one", "zipf", "half"}
    for case in searched:
        p = case.params
        assert scratch.chunk_tokens(p.tokens, p.top_k, p.hidden, p.inter) == p.tokens, "one pass, one plan"


def test_routings_share_a_point_and_bf16_x_is_looked_up_alike() -> None:
    small = case_lists.MoeCase(5, 6, 128, 64, top_k=2)
    kinds = [{"routing": "one"}, {"routing": "zipf"}, {"bf16_input": True}, {"activation": "gelu"}]
    points = [
        TUNING.point(TUNING.key(cases.make_inputs(replace(small, **kind), "cpu", 0)))  # type: ignore[arg-type]
        for kind in kinds
    ]
    assert all(point == points[0] for point in points) and points[0][1] == 5


@pytest.mark.parametrize("name", TARGETS)
def test_candidates_are_many_and_keep_the_error(name: str) -> None:
    key = TARGETS[name]
    found, base = candidates(key), plan.analytic(key)
    assert len(found) >= 8 and base in set(TUNING.candidates(key)) | {base}
    most = max(tuning.FRESH, base.up.fresh if base.up else 0)
    assert all(each.up.fresh <= most for each in found if each.up is not None)
    assert all(each.backend != "tiny" or key.pairs <= tuning.TINY_PAIRS for each in found)
    assert all((each.chunk, each.fused_index) == (base.chunk, base.fused_index) for each in found)
    tall = {each.tile for each in found if each.backend == "sm90"}
    assert len(tall) > 1 or base.up is not None


def test_what_candidates_vary() -> None:
    """Each freedom of a plan is used somewhere: kernels, tile, boxes, stages, warps, programs, order, fresh."""
    found = [each for key in KEYS for each in candidates(key)]
    assert {each.backend for each in found} == {"tiny", "sm90", "portable"}
    assert {each.tile for each in found} >= {8, 16, 32, 64, 128}
    for name, values in {
        "boxes": {1, 2}, "stages": {2, 3, 4, 6}, "warps": {4, 8}, "producer_warps": {1, 2, 4}, "per_sm": {1, 2},
        "shared_order": {False, True}, "pair": {False, True}, "fresh": {32, 64, 128},
    }.items():  # fmt: skip
        assert {getattr(each.up, name) for each in found if each.up} >= values, name
    mixed = [
        each for each in found if each.up and each.down and each.up.shared_order != each.down.shared_order
    ]
    assert mixed


def test_prepared_call_runs_the_plan_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = cases.make_inputs(case_lists.interpret_cases()[0].params, "cpu", 0)
    seen = []
    monkeypatch.setattr(tuning.cases, "run", lambda inputs, plan: seen.append(plan))
    TUNING.prepare(inputs, OTHER)()
    assert seen == [OTHER]


class FakeTime(timer.HostClock):
    """A clock that calls move."""

    now_us = 0.0

    def mark(self) -> float:
        return self.now_us * 1e-6


def test_hpc_tune_searches_and_writes_what_a_call_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole command on the CPU, with plans whose time is made up: 32 rows a tile are the fastest."""
    clock = FakeTime()
    monkeypatch.setattr(runner, "make_clock", lambda device: clock)
    params = case_lists.MoeCase(4, 4, 64, 16, top_k=2)
    inputs = cases.make_inputs(params, "cpu", 0)
    result = cases.run(inputs)
    monkeypatch.setattr(tuning.MoeTuning, "cases", lambda self: [Case("small", frozenset(), params)])

    def prepare(self: Any, inputs: Any, chosen: Plan) -> Callable[[], Any]:
        def call() -> Any:
            clock.now_us += 100 if chosen.tile == 32 else 200
            return result.clone()

        return call

    monkeypatch.setattr(tuning.MoeTuning, "prepare", prepare)
    command = ["tune", "moe.fused", "--device", "cpu", "--budget-ms", "1", "--json"]
    dry = CliRunner().invoke(app, [*command, "--dry-run", "-o", str(tmp_path)])
    assert dry.exit_code == 0, dry.output
    (report,) = json.loads(dry.stdout)
    assert report["written"] is None and not list(tmp_path.iterdir())
    (point,) = report["points"]
    assert (point["size"], point["tried"], point["best"]["tile"]) == (4, 3, 32)
    assert CliRunner().invoke(app, [*command, "-o", str(tmp_path)]).exit_code == 0
    monkeypatch.setattr(choose, "CONFIGS", tmp_path / "moe.fused")
    key = replace(TUNING.key(inputs), gpu="cpu")
    plan_table.load.cache_clear()
    assert [choose.choose(replace(key, num_tokens=n)).tile for n in (2, 3, 4, 5)] == [32, 32, 32, 16]
    plan_table.load.cache_clear()


def test_plans_that_differ_have_names_that_differ() -> None:
    """A name stands for a plan in the search's rows."""
    from hpc.bench.tune import difference

    for key in KEYS:
        base = plan.analytic(key)
        found = candidates(key)
        assert len({difference(each, base) for each in found}) == len(found)
        for a, b in itertools.pairwise(found):
            assert a != b
