"""`count_and_gather` and `reduce`: permutations, boundaries, bad ids, and the kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_support import InterpretedKernel
from torch._subclasses.fake_tensor import FakeTensorMode

import hpc
from hpc.common.errors import InvalidArgument, InvalidDtype
from hpc.common.operator import Tolerance
from hpc.moe import ops, parts, plan
from hpc.testing import assert_close

assert ops  # registers torch.ops.hpc.*

HERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BF16 = Tolerance(rms=2.5e-3, max=6e-3)


def routing(tokens: int, top_k: int, total: int, seed: int = 0) -> torch.Tensor:
    """Ids of which some are -1 or past the end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(total, (tokens, top_k), generator=generator)
    bad = torch.rand(tokens, top_k, generator=generator)
    return torch.where(bad < 0.1, -1, torch.where(bad > 0.95, 2**31 - 1, ids)).to(torch.int32)


def check(
    x: torch.Tensor, ids: torch.Tensor, experts: int, rank: int, average: int, result: tuple[Any, ...]
) -> None:
    gathered, buffer, position, seqlens, cu_seqlens, tiles, cu_tiles, *descriptors = result
    tokens, top_k = ids.shape
    local = ids.cpu().flatten().long() - rank * experts
    ours = (local >= 0) & (local < experts)
    pos = position.cpu().flatten().long()
    counts = torch.bincount(local[ours], minlength=experts)
    assert (pos[~ours] == -1).all()
    assert torch.equal(pos[ours].sort().values, torch.arange(int(ours.sum()))), "a permutation"
    order = local.where(ours, experts).argsort(stable=True)[: int(ours.sum())]
    assert torch.equal(pos[order], torch.arange(order.numel())), "by expert, in the order of pairs"
    assert torch.equal(seqlens.cpu().long(), counts)
    zero = torch.zeros(1, dtype=torch.long)
    assert torch.equal(cu_seqlens.cpu().long(), torch.cat([zero, counts.cumsum(0)]))
    tile = plan.tile_rows(average)
    expected = (counts + tile - 1) // tile
    assert torch.equal(tiles.cpu().long(), expected)
    assert torch.equal(cu_tiles.cpu().long(), torch.cat([zero, expected.cumsum(0)]))
    rows = parts._raw(gathered).cpu()[: order.numel()]
    assert torch.equal(rows, parts._raw(x).cpu()[order // top_k])
    assert gathered.dtype == x.dtype and gathered.shape == (tokens * top_k, x.shape[1])
    assert buffer.shape == (tokens * top_k, 48) and buffer.dtype == torch.bfloat16
    assert all(d.shape == (2 * experts, 128) and d.dtype == torch.int8 for d in descriptors)
    assert len(descriptors) == 2


@HERE
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "rank"), [(0, 4, 2, 0), (1, 1, 1, 0), (37, 5, 3, 1)])
def test_count_and_gather(
    where: str, dtype: torch.dtype, tokens: int, experts: int, top_k: int, rank: int
) -> None:
    ids = routing(tokens, top_k, 2 * experts).to(where)
    x = torch.randn(tokens, 36).to(dtype).to(where)
    check(x, ids, experts, rank, 20, hpc.count_and_gather(x, ids, experts, rank, 48, 20))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [255, 256, 257, 511, 513, 1025])
@pytest.mark.parametrize("experts", [127, 128, 129, 255, 256, 511, 512])
@pytest.mark.parametrize("top_k", [1, 8])
def test_boundaries(tokens: int, experts: int, top_k: int) -> None:
    """Around the sizes of chunks and histograms."""
    ids = routing(tokens, top_k, experts, tokens + experts).cuda()
    x = torch.randn(tokens, 64, device="cuda").bfloat16()
    check(x, ids, experts, 0, 100, hpc.count_and_gather(x, ids, experts, 0, 48, 100))


@pytest.mark.gpu
def test_many_pairs() -> None:
    ids = routing(100_000, 22, 512).cuda()
    x = torch.randn(100_000, 16, device="cuda").bfloat16()
    check(x, ids, 512, 0, 4000, hpc.count_and_gather(x, ids, 512, 0, 48, 4000))


def test_tile_rows_of_averages() -> None:
    """The contract's table, at its edges."""
    edges = {
        0: 8, 8: 8, 9: 16, 16: 16, 32: 32, 33: 48, 48: 48, 64: 64, 65: 48, 96: 48, 97: 32, 128: 32, 129: 48, 144: 48,
        145: 64, 10**6: 64,
    }  # fmt: skip
    assert {average: plan.tile_rows(average) for average in edges} == edges


@pytest.mark.interpret
@pytest.mark.parametrize(("tokens", "top_k", "experts", "average"), [(9, 2, 5, 40), (700, 2, 3, 8)])
def test_kernels_interpreted(
    tokens: int, top_k: int, experts: int, average: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches of the GPU path with the interpreter behind them; one launch for the index, and three."""
    from hpc.moe import route

    monkeypatch.setattr(parts, "raw_stream", lambda index: 0)
    monkeypatch.setattr(parts, "_kernel", lambda name, *facts: InterpretedKernel(getattr(route, name), name))
    monkeypatch.setattr(plan, "FUSED_PAIRS", 512)
    ids, x = routing(tokens, top_k, 2 * experts), torch.randn(tokens, 6).bfloat16()
    tile, bins = plan.tile_rows(average), max(16, plan.power_of_two(experts))
    position = torch.full((tokens, top_k), -7, dtype=torch.int32)
    totals, tiles = (torch.full((n,), -7, dtype=torch.int32) for n in (bins, experts))
    first_row, first_tile = (torch.full((experts + 1,), -7, dtype=torch.int32) for _ in range(2))
    gathered = torch.full((tokens * top_k, 6), torch.nan).bfloat16()
    parts.build_index(ids, experts, 1, tile, position, totals)
    parts._bounds(totals, first_row, tiles, first_tile, experts, bins, tile)
    if tokens < 100:  # a program a pair
        parts._gather(x, position, gathered, top_k)
    else:
        gathered = hpc.count_and_gather(x, ids, experts, 1, 48, average)[0]
    buffers = [torch.empty(tokens * top_k, 48, dtype=torch.bfloat16)]
    rest = [torch.empty(2 * experts, 128, dtype=torch.int8)] * 2
    result = (gathered, *buffers, position, totals[:experts], first_row, tiles, first_tile, *rest)
    check(x, ids, experts, 1, average, result)


@HERE
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "rows"), [(7, 3, 11), (1, 1, 1), (5, 9, 40)])
def test_reduce(where: str, shared: bool, tokens: int, top_k: int, rows: int) -> None:
    """N differs from T; positions below 0 and past the end contribute nothing, whatever their weight."""
    generator = torch.Generator().manual_seed(rows)
    position = torch.randint(-2, rows + 2, (tokens, top_k), generator=generator).to(torch.int32)
    weight = torch.rand(tokens, top_k, generator=generator)
    weight = weight.masked_fill((position < 0) | (position >= rows), torch.nan)
    x = torch.randn(rows, 96, generator=generator).bfloat16()
    other = torch.randn(tokens, 96, generator=generator).bfloat16() if shared else None
    args = [t if t is None else t.to(where) for t in (x, position, weight, other)]
    out = hpc.reduce(*args)
    assert_close(out, parts.reduce_reference(*args), BF16)


@pytest.mark.interpret
def test_reduce_interpreted() -> None:
    from hpc.moe.route import _moe_reduce_kernel

    x, position = torch.randn(5, 40).bfloat16(), torch.tensor([[0, 4], [-1, 5], [2, 2]], dtype=torch.int32)
    weight = torch.tensor([[0.5, 2.0], [torch.nan, torch.nan], [1.0, -0.25]])
    out = torch.full((3, 40), torch.nan).bfloat16()
    _moe_reduce_kernel[(3, 2)](
        x, position, weight, x, out, 5, 40, 40, 1.0, 2, 32, True, False, 2, False, True
    )
    assert_close(out, parts.reduce_reference(x, position, weight, None), BF16)
    assert (out[1] == 0).all()


def test_an_empty_reduce() -> None:
    none = torch.empty(0, 2)
    out = hpc.reduce(torch.empty(3, 8).bfloat16(), none.int(), none)
    assert out.shape == (0, 8)


def test_bad_arguments() -> None:
    x, ids = torch.zeros(3, 8).bfloat16(), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(InvalidDtype, match=r"hpc\.count_and_gather: argument 'topk_ids'"):
        hpc.count_and_gather(x, ids.long(), 4, 0, 16, 8)
    with pytest.raises(InvalidArgument, match="'num_expert'"):
        hpc.count_and_gather(x, ids, 0, 0, 16, 8)
    with pytest.raises(InvalidArgument, match="'topk_ids': expected shape"):
        hpc.count_and_gather(x, ids[:2], 4, 0, 16, 8)
    with pytest.raises(InvalidArgument, match=r"hpc\.reduce: argument 'shared_output'"):
        hpc.reduce(x, ids, torch.zeros(3, 2), torch.zeros(4, 8).bfloat16())
    with pytest.raises(InvalidDtype, match="'x'"):
        hpc.reduce(x.float(), ids, torch.zeros(3, 2))


def test_ops_and_fakes_agree() -> None:
    x, ids = torch.zeros(3, 8).bfloat16(), torch.zeros(3, 2, dtype=torch.int32)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.hpc.count_and_gather, (x, ids, 4, 0, 16, 8)),
        (torch.ops.hpc.reduce, (x, ids, torch.zeros(3, 2), None)),
    ]
    for op, args in calls:
        real = op(*args)
        with FakeTensorMode() as mode:
            fake = op(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args])
        for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (real, fake)), strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert one.device == other.device and one.stride() == other.stride()
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op.default, args, test_utils=tests)
