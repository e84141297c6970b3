"""The rows that DeepGEMM's products are given, with a stand-in that multiplies in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hpc.bench import CannotRun
from hpc.bench.rivals import deepgemm, moe
from hpc.moe import cases, reference
from hpc.testing import measure


def grouped(a, b, d, owner):
    """d[r] = a[r] . b[owner[r]]^T with scales of 128 columns and of 128 x 128 blocks; tiles belong to one expert."""
    (a, a_scale), (w, w_scale) = a, b
    assert len(owner) % 128 == 0 and a_scale.shape == (len(a), a.shape[1] // 128)
    for tile in owner.view(-1, 128):
        assert len(set(tile[tile >= 0].tolist())) == 1 and (tile.diff() <= 0).all()
    left = a.double() * a_scale.double().repeat_interleave(128, 1)
    d.fill_(float("nan"))
    for expert in set(owner[owner >= 0].tolist()):
        mine = owner == expert
        right = w[expert].double() * reference.expand_blocks(w_scale[expert].double(), *w.shape[1:])
        d[mine] = (left[mine] @ right.T).to(d.dtype)


STAND_IN = SimpleNamespace(
    get_mn_major_tma_aligned_tensor=lambda x: x, m_grouped_fp8_gemm_nt_contiguous=grouped
)


@pytest.mark.parametrize("routing", ["uniform", "one"])
def test_the_two_products_and_the_sum_are_the_operator(routing: str) -> None:
    inputs = cases.make_inputs(
        cases.MoeCase(70, 4, 256, 128, top_k=2, block=True, routing=routing), "cpu", seed=1
    )
    call = deepgemm.products(cases.rival_inputs(inputs), STAND_IN)
    error = measure(call(), cases.reference(inputs))
    assert error.rms_rel <= moe.TOLERANCE.rms
    assert torch.equal(call(), call())


def test_rows_are_whole_tiles() -> None:
    ids = torch.tensor([[2, 0], [2, 2], [0, 3]], dtype=torch.int32)
    position, owner = deepgemm.lay_out(ids, 5, 2)
    assert owner.tolist() == [0, 0, 2, 2, 2, -1, 3, -1]
    assert position.tolist() == [[2, 0], [3, 4], [1, 6]]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (cases.MoeCase(5, 4, 256, 128, top_k=2), "block scales only"),
        (cases.MoeCase(5, 4, 256, 192, top_k=2, block=True), "multiples of 128"),
        (cases.MoeCase(5, 4, 256, 128, top_k=2, block=True, ranks=2), "only plain calls"),
    ],
)
def test_what_it_cannot_run(case: cases.MoeCase, why: str) -> None:
    with pytest.raises(CannotRun, match=why):
        deepgemm.products(cases.rival_inputs(cases.make_inputs(case, "cpu", seed=1)), STAND_IN)
