"""Running batches of real length: drawn from traces of production requests.

A trace is a CSV with the columns ``ContextTokens`` (prompt) and ``GeneratedTokens`` (output); others are
ignored. Two extracts come with the package, "conversation" and "code": see ``data/README.md``.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

BUILTIN = {
    "conversation": "azure_llm_2023_conversation.csv",
    "code": "azure_llm_2023_code.csv",
}


class Request(NamedTuple):
    """Tokens of one request: its prompt and what it generated."""

    prompt: int
    generated: int


def load(source: str | Path) -> list[Request]:
    """Requests of a CSV file, or of the extract called "conversation" or "code".

    Raises ``FileNotFoundError`` naming the extracts, ``ValueError`` naming the column or line at fault.
    """
    name = str(source)
    if name in BUILTIN:
        text = (
            resources.files("hpc.bench").joinpath("data").joinpath(BUILTIN[name]).read_text(encoding="utf-8")
        )
    elif Path(source).is_file():
        text = Path(source).read_text(encoding="utf-8-sig")
    else:
        raise FileNotFoundError(f"no trace file {name!r}; extracts in the package: {', '.join(BUILTIN)}")
    reader = csv.DictReader(text.splitlines())
    for column in ("ContextTokens", "GeneratedTokens"):
        if column not in (reader.fieldnames or ()):
            raise ValueError(f"{name}: no column {column!r}, only {reader.fieldnames}")
    requests = []
    for number, line in enumerate(reader, start=2):
        try:
            requests.append(Request(int(line["ContextTokens"]), int(line["GeneratedTokens"])))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}, line {number}: {error}") from error
    if not requests:
        raise ValueError(f"{name}: no requests")
    return requests


def draw_batch(
    requests: Sequence[Request], num_requests: int, seed: int = 0, max_len: int | None = None
) -> list[int]:
    """KV lengths of a batch in the middle of decoding.

    A request stays in the batch for one step per generated token, so the chance to meet it there is in
    proportion to ``generated``; at that moment its prompt and a uniform part of its output are cached:
    ``prompt + uniform{1 .. generated}``. Requests that generate nothing never decode.

    Args:
        requests: from :func:`load`.
        num_requests: size of the batch; drawn with replacement.
        seed: same seed, same batch, on any platform.
        max_len: longer contexts are cut to this.

    Returns:
        ``num_requests`` lengths in tokens.
    """
    generator = random.Random(seed)
    weights = [max(0, request.generated) for request in requests]
    if not any(weights):
        raise ValueError("the trace has no request that generates a token")
    lens = []
    for request in generator.choices(requests, weights, k=num_requests):
        length = request.prompt + 1 + int(generator.random() * request.generated)
        lens.append(length if max_len is None else min(length, max_len))
    return lens
