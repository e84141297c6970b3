"""What `hpc check` and `hpc bench` do with the prologue, on small cases and a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rope_support import make

from hpc.bench.check import check
from hpc.common.operator import Case
from hpc.rope import case_lists, cases, warm
from hpc.testing import assert_close

OPERATOR = cases.OPERATOR


def test_check_passes_and_finds_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = check(OPERATOR, "cpu")
    assert len(rows) == len(case_lists.interpret_cases()) and all(row.passed for row in rows), rows
    right = cases.prologue

    def wrong(inputs: cases.RopeInputs) -> object:
        result = right(inputs)
        if inputs.qkv is spoiled:
            inputs.cache.vcache.view(torch.uint8)[int(inputs.cache.block_ids[0, 0]), 0, 0, 0] ^= 1
        return result

    inputs = make((20,), (20,), (4, 2), head_dim=32, page_size=16, is_prefill=True)
    spoiled = inputs.qkv
    monkeypatch.setattr(cases, "prologue", wrong)
    monkeypatch.setattr(cases, "make_tensors", lambda *args: inputs)
    rows = check(OPERATOR, "cpu", cases=[Case("one", frozenset({"gpu"}), inputs.params)])
    assert not rows[0].passed and "vcache differs" in rows[0].note


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("norm_policy", [0, 2])
def test_the_rival_computes_the_same(dtype: str, norm_policy: int) -> None:
    """Queries within the operator's limits, and the same caches up to a last bit of the format."""
    inputs = make((70, 20), (5, 20), (4, 2), dtype=dtype, norm_policy=norm_policy, head_dim=32, rotary_dim=16)
    other = cases.copied(inputs)
    call = OPERATOR.providers()["torch"].prepare(other)
    assert_close(call(), OPERATOR.reference(inputs), cases.TOLERANCES[dtype], "torch")
    cases.prologue(inputs)
    request = torch.tensor([0] * 5 + [1] * 20)
    position = torch.cat((torch.arange(65, 70), torch.arange(20)))
    at = (inputs.cache.block_ids[request, position // 64].long(), position % 64)
    for name in ("kcache", "vcache"):
        have, want = (getattr(i.cache, name).float()[at] for i in (other, inputs))
        assert (have - want).norm() < 3e-2 * want.norm()


def test_the_floor_counts_every_byte_once() -> None:
    params = case_lists.RopeCase((65, 64), (1, 1), 8, 1, dtype="fp8")
    width, tails = 10 * 128, 63 * 2 * 128
    moved = 2 * width * 3 + tails + 4 * 2 * 8 + 2 * 128 * 4
    assert OPERATOR.floor(Case("x", frozenset({"gpu"}), params)).bytes == moved
    whole = replace(params, dtype="bf16")
    assert (
        OPERATOR.floor(Case("x", frozenset({"gpu"}), whole)).bytes == 2 * width * 4 + 2 * tails + 2 * 128 * 4
    )


def test_rotated_inputs_share_what_layers_share() -> None:
    inputs = make((70, 20), (1, 1), dtype="fp8")
    other = OPERATOR.rotate(inputs, 1)
    assert other.qkv is not inputs.qkv and other.cache.kcache is not inputs.cache.kcache
    assert other.cos_sin is inputs.cos_sin and other.q_index is inputs.q_index
    assert torch.equal(other.qkv, inputs.qkv)


def test_warmup_names_its_shapes() -> None:
    for sm90 in (True, False):
        shapes = warm.shapes(sm90)
        assert len(set(shapes)) == len(shapes) and {warm.label(p) for p, _ in shapes} >= {"fp8 8/1 decode"}
        reached = {(p.is_prefill, bool(chosen.tokens), chosen.unroll) for p, chosen in shapes}
        many = (True, True, 1) if sm90 else (True, False, 2)
        assert reached == {(True, False, 1), many, (False, False, 1)}, (
            "both plans of prefill, or its first long prompt compiles"
        )
