"""The timer on a machine whose times are known."""

from __future__ import annotations

import pytest
import torch
from bench_fakes import FakeCall, FakeClock

from hpc.bench import timer
from hpc.bench.timer import num_input_sets, percentile, time_interleaved


def _calls(name: str, cost_us: float, sets: int = 3) -> list[FakeCall]:
    return [FakeCall(f"{name}{i}", cost_us) for i in range(sets)]


def test_time_per_call_is_exact_and_rounds_are_many() -> None:
    result = time_interleaved({"a": _calls("a", 10.0), "b": _calls("b", 25.0)}, FakeClock(), budget_ms=80)
    assert result["a"].median_us == pytest.approx(10.0)
    assert result["b"].median_us == pytest.approx(25.0)
    assert result["a"].samples == result["b"].samples >= timer.MIN_ROUNDS
    assert result["a"].calls_per_sample % 3 == 0, "a sample holds whole passes over the input sets"


def test_input_sets_rotate_within_a_graph() -> None:
    clock = FakeClock()
    time_interleaved({"a": _calls("a", 10.0)}, clock)
    names = clock.replays[-1]
    assert names[:6] == ["a0", "a1", "a2", "a0", "a1", "a2"]


def test_providers_take_turns_and_the_first_place_moves() -> None:
    clock = FakeClock()
    time_interleaved({name: _calls(name, 100.0) for name in "abc"}, clock, budget_ms=20)
    order = [names[0][0] for names in clock.replays[6:]]  # two estimates for each of three come first
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds[:4] == ["abc", "bca", "cab", "abc"]


def test_a_drifting_machine_keeps_the_order_of_equals() -> None:
    """Interleaving: a card that slows by 1 % a replay must not make equal providers differ by as much."""
    result = time_interleaved({name: _calls(name, 50.0) for name in "abc"}, FakeClock(drift=0.01))
    medians = [timing.median_us for timing in result.values()]
    assert max(medians) / min(medians) < 1.02


@pytest.mark.parametrize("cost_us", [0.5, 12.0, 300.0, 5000.0, 60000.0])
def test_device_time_stays_near_the_budget(cost_us: float) -> None:
    clock = FakeClock()
    result = time_interleaved({"a": _calls("a", cost_us)}, clock, budget_ms=80)
    one_pass_ms = 3 * cost_us / 1e3
    least = (timer.MIN_ROUNDS + timer.WARMUP_ROUNDS + 2) * one_pass_ms  # each round is a whole pass
    assert clock.now / 1e3 <= max(1.3 * 80 + 2 * one_pass_ms, least + 1e-6)
    assert result["a"].median_us == pytest.approx(cost_us)


def test_graphs_stay_small_enough_to_capture() -> None:
    clock = FakeClock()
    time_interleaved({"a": _calls("a", 0.1, sets=40)}, clock)
    assert max(clock.captured) <= timer.MAX_CALLS_PER_GRAPH


def test_chain_runs_before_each_call_and_its_time_is_subtracted() -> None:
    clock = FakeClock()
    chain = [FakeCall("before", 7.0)]
    result = time_interleaved({"a": _calls("a", 10.0)}, clock, chain=chain)
    assert list(result) == ["a"]
    assert result["a"].median_us == pytest.approx(10.0)
    with_call = next(names for names in reversed(clock.replays) if "a0" in names)
    assert with_call[:4] == ["before", "a0", "before", "a1"]


def test_a_failing_provider_is_reported_and_the_others_timed() -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    failed: dict[str, str] = {}
    result = time_interleaved(
        {"bad": [broken], "good": _calls("g", 10.0)},
        FakeClock(),
        on_error=lambda name, error: failed.update({name: str(error)}),
    )
    assert list(result) == ["good"] and failed == {"bad": "no such kernel"}
    with pytest.raises(RuntimeError, match="no such kernel"):
        time_interleaved({"bad": [broken]}, FakeClock())


@pytest.mark.parametrize(
    ("set_mb", "expected"), [(1, 64), (4, 38), (50, 3), (100, 2), (200, 2), (480, 1), (1000, 1)]
)
def test_input_sets_exceed_the_cache(set_mb: int, expected: int) -> None:
    sets = num_input_sets(set_mb * 10**6, 60 * 10**6)
    assert sets == expected
    if 1 < sets < 64:
        assert sets * set_mb >= 2.5 * 60


def test_no_cache_needs_no_rotation() -> None:
    assert num_input_sets(1000, 0) == 1


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.2) == 2.0
    assert percentile([5.0], 0.8) == 5.0


def test_host_clock_times_plain_calls() -> None:
    x = torch.randn(64, 64)
    clock = timer.make_clock("cpu")
    result = time_interleaved({"mm": [lambda: x @ x]}, clock, budget_ms=5)
    assert 0 < result["mm"].p20_us <= result["mm"].median_us <= result["mm"].p80_us < 1e5
    assert timer.host_time_us(lambda: None, "cpu", calls=50, rounds=3) < 1e4
