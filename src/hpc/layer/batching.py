"""Continuous batching over request lengths of a trace: which lengths each decode step has. Pure Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hpc.bench.traces import Request


@dataclass(frozen=True)
class Batch:
    """One decode step: KV length of each slot, its new token included, and the slots whose request is new here."""

    lens: tuple[int, ...]
    joined: frozenset[int]


def plan(
    requests: Sequence[Request], num_slots: int, num_steps: int, seed: int = 0, shrink: int = 1
) -> list[Batch]:
    """Steps of a server in the middle of its work: every request grows by a token a step, and one that has ended makes
    room for another, whose prompt then is in the cache.

    Requests are drawn in proportion to the tokens that they generate, as they are met in a running batch, each at a
    uniform point of its answer; all lengths are divided by `shrink`. The last slot's request is at its last token, so
    that a change is seen in any run of two steps.
    """
    generator = random.Random(seed)
    weights = [max(0, request.generated) for request in requests]

    def draw(fresh: bool) -> tuple[int, int]:
        """(KV length at its next step, tokens after that one)."""
        request = generator.choices(requests, weights)[0]
        done = 1 if fresh else 1 + int(generator.random() * request.generated)
        return max(1, (request.prompt + done) // shrink), max(0, (request.generated - done) // shrink)

    slots = [draw(fresh=False) for _ in range(num_slots)]
    slots[-1] = (slots[-1][0], 0)
    batches = [Batch(tuple(length for length, _ in slots), frozenset(range(num_slots)))]
    while len(batches) < num_steps:
        joined = frozenset(index for index, (_, left) in enumerate(slots) if left == 0)
        slots = [draw(fresh=True) if i in joined else (s[0] + 1, s[1] - 1) for i, s in enumerate(slots)]
        batches.append(Batch(tuple(length for length, _ in slots), joined))
    return batches


def capacity(batches: Sequence[Batch]) -> tuple[int, ...]:
    """Longest KV length of each slot."""
    return tuple(max(column) for column in zip(*(batch.lens for batch in batches), strict=True))
