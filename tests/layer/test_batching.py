"""Continuous batching: what a plan of steps promises."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hpc.bench.traces import Request
from hpc.layer import batching

REQUESTS = st.lists(st.builds(Request, st.integers(1, 500), st.integers(1, 40)), min_size=1, max_size=8)


@given(REQUESTS, st.integers(1, 6), st.integers(1, 60), st.integers(0, 99))
def test_every_request_grows_by_a_token_or_is_replaced(
    requests: list[Request], slots: int, steps: int, seed: int
) -> None:
    batches = batching.plan(requests, slots, steps, seed)
    assert len(batches) == steps and batches[0].joined == set(range(slots))
    prompts = {request.prompt for request in requests}
    for before, now in itertools.pairwise(batches):
        for slot in range(slots):
            if slot in now.joined:
                assert now.lens[slot] - 1 in prompts, "a new request has its prompt and one token"
            else:
                assert now.lens[slot] == before.lens[slot] + 1
    longest = max(request.prompt + request.generated for request in requests)
    assert all(1 <= length <= longest for batch in batches for length in batch.lens)
    assert batching.capacity(batches) == tuple(max(b.lens[s] for b in batches) for s in range(slots))


def test_the_last_slot_changes_at_once() -> None:
    batches = batching.plan([Request(100, 50)], 4, 2)
    assert 3 in batches[1].joined and batches[1].lens[3] == 101


def test_lengths_can_be_divided() -> None:
    (batch,) = batching.plan([Request(1000, 1)], 2, 1, shrink=4)
    assert batch.lens == (250, 250)
