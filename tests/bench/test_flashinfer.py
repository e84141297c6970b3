"""FlashInfer's providers against a stand-in that attends from what it was planned with: page lists, scales, masks."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from hpc.attention.decode import cases as decode
from hpc.attention.decode.case_lists import DecodeCase
from hpc.attention.prefill import cases as prefill
from hpc.attention.prefill.case_lists import PrefillCase
from hpc.bench import CannotRun
from hpc.bench.rivals import flashinfer, flashinfer_prefill
from hpc.testing import measure


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window_left: int, causal: bool
) -> torch.Tensor:
    """One request, ``q [n, Hq, D]`` with all scales applied, ``k, v [keys, Hkv, D]``."""
    group, n, keys = q.shape[1] // k.shape[1], q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    behind = torch.arange(keys - n, keys)[:, None] - torch.arange(keys)
    hidden = (behind < 0) & causal
    if window_left >= 0:
        hidden |= behind > window_left
    scores = torch.einsum("nhd,khd->hnk", q, k).masked_fill(hidden, float("-inf"))
    return torch.einsum("hnk,khd->nhd", scores.softmax(-1), v)


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD" and workspace.numel() >= 1 << 27
        self.options, self.planned = options, {}

    def _run(
        self, q: torch.Tensor, keys: Any, factors: Any, first_rows: list[int], causal: bool
    ) -> torch.Tensor:
        q_scale, v_scale = factors
        pieces = []
        for b, (k, v) in enumerate(keys):
            rows = q[first_rows[b] : first_rows[b + 1]].float() * q_scale * self.planned["sm_scale"]
            pieces.append(_attend(rows, k.float(), v.float() * v_scale, self.planned["window_left"], causal))
        return torch.cat(pieces).to(torch.bfloat16)

    def _paged(self, cache: Any) -> list[tuple[torch.Tensor, ...]]:
        p = self.planned
        requests = []
        for b, last in enumerate(p["last"].tolist()):
            ids = p["indices"][p["indptr"][b] : p["indptr"][b + 1]].long()
            length = (len(ids) - 1) * p["page_size"] + last
            requests.append(tuple(x.float()[ids].flatten(0, 1)[:length] for x in cache))
        return requests


class _Decode(_Wrapper):
    def plan(
        self,
        indptr: Any,
        indices: Any,
        last: Any,
        num_q: int,
        num_kv: int,
        dim: int,
        page_size: int,
        **more: Any,
    ) -> None:
        assert self.options["use_tensor_cores"] and more["logits_soft_cap"] == 0.0
        for buffer, given in (("indptr", indptr), ("indices", indices), ("last_page_len", last)):
            assert self.options[f"paged_kv_{buffer}_buffer"].shape == given.shape
        self.planned = {"indptr": indptr, "indices": indices, "last": last, "page_size": page_size, **more}
        self.shape = (len(last), num_q, dim), (page_size, num_kv, dim)

    def run(self, q: torch.Tensor, cache: Any, k_scale: Any, v_scale: Any) -> torch.Tensor:
        assert q.shape == self.shape[0] and q.dtype == self.planned["q_data_type"] == torch.bfloat16
        assert all(x.shape[1:] == self.shape[1] and x.dtype == self.planned["kv_data_type"] for x in cache)
        factors = k_scale or 1.0, v_scale or 1.0
        return self._run(q, self._paged(cache), factors, list(range(len(q) + 1)), causal=False)


class _Prefill(_Wrapper):
    def _finish(self, q: torch.Tensor, keys: Any, scales: Any, out: torch.Tensor) -> torch.Tensor:
        p = self.planned
        assert self.options["backend"] == "fa3" and q.dtype == p["q_data_type"] and p["causal"]
        q_scale, k_scale, v_scale = scales or (torch.ones(1), 1.0, 1.0)
        result = self._run(
            q, keys, (q_scale[:, None] * k_scale, v_scale), p["qo_indptr"].tolist(), causal=True
        )
        return out.copy_(result)


class _PagedPrefill(_Prefill):
    def plan(self, qo_indptr: Any, indptr: Any, indices: Any, last: Any, **more: Any) -> None:
        self.planned = {"qo_indptr": qo_indptr, "indptr": indptr, "indices": indices, "last": last, **more}

    def run(self, q: torch.Tensor, cache: Any, *scales: Any, out: torch.Tensor) -> torch.Tensor:
        return self._finish(q, self._paged(cache), scales, out)


class _RaggedPrefill(_Prefill):
    def plan(self, qo_indptr: Any, kv_indptr: Any, **more: Any) -> None:
        self.planned = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr.tolist(), **more}

    def run(self, q: torch.Tensor, k: Any, v: Any, *scales: Any, out: torch.Tensor) -> torch.Tensor:
        ends = self.planned["kv_indptr"]
        assert k.is_contiguous() and len(k) == len(v) == ends[-1] and k.dtype == self.planned["kv_data_type"]
        spans = [slice(*pair) for pair in itertools.pairwise(ends)]
        return self._finish(q, [(k[span], v[span]) for span in spans], scales, out)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = _Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = _PagedPrefill  # type: ignore[attr-defined]
    module.BatchPrefillWithRaggedKVCacheWrapper = _RaggedPrefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_decode_plans_the_call(dtype: str, window: int | None) -> None:
    params = DecodeCase((200, 1, 64, 130), 16, 2, 64, page_size=128, dtype=dtype, window=window)
    inputs = decode.make_tensors(params, "cpu", 0)
    rival = decode.neutral(inputs)
    expected = decode.reference(inputs)[0]
    got = flashinfer.prepare(rival)().reshape(expected.shape)
    accuracy = measure(got, expected)
    assert accuracy.within(flashinfer.rival_tolerance(rival)) and accuracy.rms_rel < 5e-3


@pytest.mark.parametrize("form", [flashinfer_prefill.paged, flashinfer_prefill.ragged])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_prefill_plans_the_call(dtype: str, window: int | None, form: Any) -> None:
    params = PrefillCase(
        ((20, 200), (1, 33), (64, 64), (90, 130)), 8, 2, 64, page_size=32, dtype=dtype, window=window
    )
    inputs = prefill.make_tensors(params, "cpu", 0)
    expected = prefill.reference(inputs)[0]
    accuracy = measure(form(inputs)(), expected)
    assert accuracy.within(flashinfer_prefill.tolerance(inputs))
    assert accuracy.rms_rel < {"bf16": 3e-3, "fp8": 6e-2}[dtype]


def test_ragged_keys_are_taken_as_they_are_and_refused_in_pages() -> None:
    inputs = prefill.make_tensors(PrefillCase(((20, 20), (70, 70)), 4, 1, 64, page_size=0), "cpu", 0)
    expected = prefill.reference(inputs)[0]
    assert measure(flashinfer_prefill.ragged(inputs)(), expected).rms_rel < 3e-3
    with pytest.raises(CannotRun, match="over pages only"):
        flashinfer_prefill.paged(inputs)


@pytest.mark.parametrize(
    "change, reason",
    [({"head_dim": 80}, "head_dim"), ({"sinks": True}, "sinks"), ({"lens": ((0, 0), (5, 5))}, "empty")],
)
def test_what_is_not_compared_is_refused(change: dict[str, Any], reason: str) -> None:
    params = PrefillCase(**{"lens": ((5, 5),), "q_heads": 2, "kv_heads": 1, "head_dim": 64, **change})
    with pytest.raises(CannotRun, match=reason):
        flashinfer_prefill.paged(prefill.make_tensors(params, "cpu", 0))
