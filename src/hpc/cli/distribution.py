"""Length distributions on the command line: the `NxL+NxL` grammar."""

from __future__ import annotations

import re

MAX_REQUESTS = 1 << 16
MAX_LENGTH = 1 << 30
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_TERM = re.compile(r"(?:(\d+)\s*[xX*]\s*)?(\d+(?:\.\d+)?)\s*([kKmM]?)")
GRAMMAR = (
    "terms NxL joined by '+': N requests of L tokens each, K = 1024, M = 1048576, "
    "such as 1x128K+31x4K or 64x0.5K"
)


def parse(text: str) -> list[int]:
    """KV lengths in tokens from `NxL` terms joined by `+`; `N` may be left out for one request.

    `1x128K+31x4K` is one request of 131072 tokens followed by 31 of 4096. Raises ValueError with the term
    at fault.
    """
    lens: list[int] = []
    for term in text.split("+"):
        count, length = _parse_term(term, text)
        if len(lens) + count > MAX_REQUESTS:
            raise ValueError(f"more than {MAX_REQUESTS} requests in '{text}'")
        lens.extend([length] * count)
    return lens


def _parse_term(term: str, text: str) -> tuple[int, int]:
    match = _TERM.fullmatch(term.strip())
    if match is None:
        where = f"term '{term.strip()}' of '{text}'" if term.strip() else f"an empty term in '{text}'"
        raise ValueError(f"cannot read {where}; expected {GRAMMAR}")
    count = int(match[1]) if match[1] else 1
    length = float(match[2]) * _UNITS[match[3].lower()]
    if count < 1:
        raise ValueError(f"term '{term.strip()}' asks for no request; expected {GRAMMAR}")
    if length != int(length):
        raise ValueError(f"term '{term.strip()}' is {length} tokens, not a whole number; expected {GRAMMAR}")
    if length > MAX_LENGTH:
        raise ValueError(f"term '{term.strip()}' is longer than {MAX_LENGTH} tokens")
    return count, int(length)


def describe(lens: list[int]) -> str:
    """The shortest `NxL` text of a list of lengths, or a summary when they are all different."""
    terms: list[list[int]] = []
    for length in lens:
        if terms and terms[-1][1] == length:
            terms[-1][0] += 1
        else:
            terms.append([1, length])
    if len(terms) > 6:
        ordered = sorted(lens)
        return f"{len(lens)} requests, {ordered[0]} to {ordered[-1]} tokens, median {ordered[len(lens) // 2]}"
    return "+".join(f"{count}x{_short(length)}" for count, length in terms)


def _short(length: int) -> str:
    if length >= 1 << 20 and length % (1 << 18) == 0:
        return f"{length / (1 << 20):g}M"
    if length >= 1 << 9 and length % (1 << 7) == 0:
        return f"{length / (1 << 10):g}K"
    return str(length)
