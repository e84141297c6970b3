"""docs/errors.md quotes what the library says: each message of its table is provoked here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hpc

E4M3 = torch.float8_e4m3fn


def call(**changed: object) -> None:
    """A right decode call on the CPU, but for what is changed."""
    kcache, vcache = (torch.zeros(4, 64, 1, 128).bfloat16() for _ in range(2))
    arguments = {
        "q": torch.zeros(2, 8, 128).bfloat16(),
        "kcache": kcache,
        "vcache": vcache,
        "block_ids": torch.arange(4, dtype=torch.int32).view(2, 2),
        "num_seq_kvcache": torch.tensor([100, 3], dtype=torch.int32),
        **changed,
    }
    hpc.attention_decode_bf16(**arguments)  # type: ignore[arg-type]


def call_fp8(kcache: torch.Tensor) -> None:
    q, cache = torch.zeros(2, 8, 128).to(E4M3), torch.zeros(4, 64, 1, 128).to(E4M3)
    pages, lens = torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([100, 3], dtype=torch.int32)
    one = torch.ones(1)
    hpc.attention_decode_fp8(q, kcache, cache, pages, lens, torch.ones(2, 8), one, one)


def workspace() -> torch.Tensor:
    return hpc.get_attention_decode_task_workspace(8, 8192, 1, device="cpu")


def assign() -> None:
    hpc.assign_attention_decode_task(
        torch.ones(2, dtype=torch.int32), workspace(), 1, mtp=0, new_kv_included=True
    )


PROVOKE: list[Callable[[], None]] = [
    lambda: call_fp8(torch.zeros(4, 64, 1, 128).bfloat16()),
    lambda: call_fp8(torch.zeros(4, 64, 1, 128).to(torch.float8_e5m2)),
    lambda: call(num_seq_kvcache=torch.tensor([100, 3])),
    lambda: call(q=torch.zeros(2, 128, 8).bfloat16().transpose(1, 2)),
    lambda: call(mtp=1),
    assign,
    lambda: call(task_map=workspace()[:100]),
    lambda: call(task_map=workspace(), splitk=False),
    lambda: call(q=torch.zeros(2, 8, 128, device="meta").bfloat16()),
]


def quoted(root: Path) -> list[str]:
    """First cells of the table of messages."""
    return re.findall(r"^\| `(expected .*?)` \|", (root / "docs" / "errors.md").read_text(), re.MULTILINE)


def said(provoke: Callable[[], None]) -> str:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        provoke()
    return str(caught.value)


def test_quoted_messages_are_the_librarys(root: Path) -> None:
    messages = [said(provoke) for provoke in PROVOKE]
    table = quoted(root)
    assert len(table) == len(messages)
    for text, message in zip(table, messages, strict=True):
        assert text in message, message


def test_the_example_message_is_the_librarys(root: Path) -> None:
    example = re.search(r"^    (hpc\..*)$", (root / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert example and example[1] == said(PROVOKE[2])
