"""Rivals on a machine that has none of them, and the repacked cache that they read."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from hpc.bench import CannotRun
from hpc.bench.rivals import fa3, flashinfer
from hpc.bench.rivals.decode import DecodeInputs, repack
from hpc.common import arch
from hpc.testing import make_paged_cache, quantize_per_token_head

LENS = (1, 64, 65, 300, 0)


def _inputs(
    dtype: torch.dtype, layout: str = "NHD", lens: tuple[int, ...] = LENS, new: int = 1
) -> DecodeInputs:
    cache = make_paged_cache(lens, 2, 64, 64, dtype, layout=layout)
    q = torch.randn(len(lens) * new, 8, 64, dtype=torch.bfloat16)
    scales: dict[str, torch.Tensor] = {}
    if dtype == torch.float8_e4m3fn:
        q, qscale = quantize_per_token_head(q)
        scales = {"qscale": qscale, "kscale": torch.tensor([0.5]), "vscale": torch.tensor([0.25])}
    return DecodeInputs(q, cache.kcache, cache.vcache, cache.block_ids, lens, new, 0.125, **scales)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("layout", ["NHD", "HND", "joint"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_repacked_tokens_are_the_same_and_the_rest_zero(
    dtype: torch.dtype, layout: str, page_size: int
) -> None:
    inputs = _inputs(dtype, layout)
    kcache, vcache, table, used = repack(inputs, page_size)
    for old, new in ((inputs.kcache, kcache), (inputs.vcache, vcache)):
        assert new.is_contiguous() and new.shape == (sum(used), page_size, 2, 64)
        for request, length in enumerate(LENS):
            old_ids = inputs.block_ids[request, : -(-length // 64)].long()
            new_ids = table[request, : used[request]].long()
            rows = new.float()[new_ids].flatten(0, 1)
            assert torch.equal(old.float()[old_ids].flatten(0, 1)[:length], rows[:length])
            assert not rows[length:].any()
    pages = [page for row, count in zip(table.tolist(), used, strict=True) for page in row[:count]]
    assert sorted(pages) == list(range(sum(used)))


def test_requantised_queries_stay_close() -> None:
    inputs = _inputs(torch.float8_e4m3fn, new=2)
    q8, descale = fa3._queries(inputs, 2)
    assert descale is not None and descale.shape == (5, 2)
    back = q8.float().view(5, 2, 2, 4, 64) * descale.view(5, 1, 2, 1, 1)
    want = inputs.q_float().view(5, 2, 2, 4, 64)
    assert float((back - want).norm() / want.norm()) < 0.04


@pytest.mark.skipif(arch.gpu_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("rival", [fa3, flashinfer])
def test_absent_rivals_say_why(rival: object) -> None:
    reason = rival.provider(lambda inputs: inputs).available()  # type: ignore[attr-defined]
    assert reason is not None
    if importlib.util.find_spec("sgl_kernel") is None and rival is fa3:
        assert reason == "not installed: pip install sglang-kernel"


def test_unsupported_requests_are_refused_before_anything_is_imported() -> None:
    inputs = _inputs(torch.bfloat16, new=2)
    with pytest.raises(CannotRun, match="one new token"):
        flashinfer.prepare(inputs)
    with pytest.raises(CannotRun, match="empty"):
        flashinfer.prepare(_inputs(torch.bfloat16))
    capped = DecodeInputs(
        inputs.q, inputs.kcache, inputs.vcache, inputs.block_ids, LENS, 2, 0.1, logit_cap=30.0
    )
    with pytest.raises(CannotRun, match="caps"):
        fa3.prepare(capped)
    narrow = replace(inputs, q=inputs.q[..., :32])
    with pytest.raises(CannotRun, match="head_dim 64, 128, 256"):
        fa3.prepare(narrow)


def test_rival_limits_follow_the_inputs() -> None:
    provider = fa3.provider(lambda inputs: inputs)
    default = object()
    wide = provider.limits(_inputs(torch.float8_e4m3fn), default)  # type: ignore[arg-type]
    narrow = provider.limits(_inputs(torch.bfloat16), default)  # type: ignore[arg-type]
    assert wide.rms > narrow.rms and not provider.own
