"""The `NxL` grammar and request traces."""

from __future__ import annotations

import pytest

from hpc.cli import distribution


@pytest.mark.parametrize(
    ("text", "lens"),
    [
        ("4096", [4096]),
        ("2x4K", [4096, 4096]),
        ("1x128K+2x64", [131072, 64, 64]),
        (" 1x16k + 1X0.5K ", [16384, 512]),
        ("1x1M", [1 << 20]),
        ("3x0", [0, 0, 0]),
    ],
)
def test_parse(text: str, lens: list[int]) -> None:
    assert distribution.parse(text) == lens


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty term"),
        ("1x4K+", "empty term in '1x4K+'"),
        ("4Kx1", "'4Kx1'"),
        ("1x4K,2x8K", "'1x4K,2x8K'"),
        ("0x4K", "no request"),
        ("-1x4K", "'-1x4K'"),
        ("1x0.3K", "not a whole number"),
        ("1x4G", "'1x4G'"),
        ("1x2048M", "longer than"),
        ("70000x1", "more than"),
    ],
)
def test_parse_names_the_fault(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        distribution.parse(text)
    assert fault in str(caught.value)


@pytest.mark.parametrize("text", ["1x128K+31x4K", "64x0.5K", "3x7", "1x1.5M+2x64"])
def test_describe_is_the_inverse(text: str) -> None:
    assert distribution.describe(distribution.parse(text)) == text


def test_describe_summarises_mixed_lengths() -> None:
    assert distribution.describe(list(range(1, 11))) == "10 requests, 1 to 10 tokens, median 6"
