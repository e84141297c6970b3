"""Paged caches: every live row a number, every dead one poison, the page table a bijection."""

from __future__ import annotations

import pytest
import torch

from hpc.testing import make_paged_cache, quantize_per_token_head

LENS = [0, 1, 15, 16, 17, 40]
DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float32]


def _live(cache_rows: torch.Tensor, built: object, length: int, request: int) -> torch.Tensor:
    ids = built.block_ids[request, : -(-length // 16)].long()  # type: ignore[attr-defined]
    return cache_rows[ids].flatten(0, 1)[:length]


@pytest.mark.parametrize("layout", ["NHD", "HND", "joint"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_live_rows_are_numbers_and_all_others_nan(layout: str, dtype: torch.dtype) -> None:
    built = make_paged_cache(LENS, 2, 64, 16, dtype, layout=layout)
    for cache in (built.kcache, built.vcache):
        assert cache.shape == (sum(-(-n // 16) for n in LENS) + 3, 16, 2, 64) and cache.stride(3) == 1
        rows = cache.float()
        for request, length in enumerate(LENS):
            assert torch.isfinite(_live(rows, built, length, request)).all()
        assert int(torch.isfinite(rows).all(-1).sum()) == sum(LENS) * 2
        assert int(torch.isnan(rows).all(-1).sum()) == rows[..., 0].numel() - sum(LENS) * 2


def test_strides_are_those_of_the_layout() -> None:
    hnd = make_paged_cache([20], 2, 64, 16, torch.bfloat16, layout="HND")
    assert hnd.kcache.stride() == (2 * 16 * 64, 64, 16 * 64, 1)
    joint = make_paged_cache([20], 2, 64, 16, torch.bfloat16, layout="joint")
    assert joint.kcache.stride() == (2 * 16 * 2 * 64, 2 * 64, 64, 1)
    assert joint.kcache.untyped_storage().data_ptr() == joint.vcache.untyped_storage().data_ptr()


def test_page_table_gives_each_page_once_and_ends_in_garbage() -> None:
    built = make_paged_cache(LENS, 1, 64, 16, torch.bfloat16)
    num_pages = built.kcache.shape[0]
    live, dead = [], []
    for row, length in zip(built.block_ids.tolist(), LENS, strict=True):
        count = -(-length // 16)
        live += row[:count]
        dead += row[count:]
        assert len(row) > count
    assert sorted(set(live)) == sorted(live) and all(0 <= page < num_pages for page in live)
    assert live != sorted(live), "pages must be shuffled"
    assert set(dead) == {-1, 2**31 - 1, num_pages}
    assert built.seq_lens.tolist() == LENS and built.seq_lens.dtype == torch.int32


def test_seed_decides_everything() -> None:
    first, same, other = (
        make_paged_cache([33], 1, 64, 16, torch.bfloat16, seed=s, dead="zero") for s in (1, 1, 2)
    )
    assert torch.equal(first.kcache, same.kcache) and torch.equal(first.block_ids, same.block_ids)
    assert not torch.equal(first.kcache, other.kcache)
    assert not torch.equal(first.kcache, first.vcache)


def test_zero_dead_rows_and_clean_tail() -> None:
    built = make_paged_cache([5], 1, 64, 16, torch.bfloat16, dead="zero", garbage_tail=False, max_pages=4)
    assert torch.isfinite(built.kcache.float()).all()
    assert built.block_ids.shape == (1, 4) and (built.block_ids[0, 1:] == 0).all()


def test_token_scales_follow_the_stored_form() -> None:
    built = make_paged_cache([70, 3], 2, 128, 64, torch.float8_e4m3fn, token_scales=True)
    scales = built.kscale_float
    assert built.kscale is not None and scales is not None
    assert built.kscale.shape[1:] == (2, 2, 128) and scales.shape[1:] == (2, 2, 32)
    assert built.kcache.untyped_storage().data_ptr() == built.kscale.untyped_storage().data_ptr()
    page = int(built.block_ids[0, 1])  # tokens 64..69
    assert torch.isfinite(scales[page, 0, :, :6]).all() and torch.isnan(scales[page, 0, :, 6:]).all()
    assert int(torch.isfinite(scales).sum()) == 73 * 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layout": "DHN"}, "layout"),
        ({"dead": "one"}, "dead"),
        ({"layout": "joint", "v_head_dim": 32}, "v_head_dim"),
        ({"token_scales": True}, "token_scales"),
        ({"max_pages": 1}, "max_pages"),
    ],
)
def test_bad_requests_are_named(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_paged_cache([40], 1, 64, 16, torch.bfloat16, **change)  # type: ignore[arg-type]


def test_value_dim_may_differ() -> None:
    built = make_paged_cache([10], 1, 192, 16, torch.bfloat16, v_head_dim=128)
    assert built.kcache.shape[3] == 192 and built.vcache.shape[3] == 128


def test_quantised_rows_come_back_within_half_a_step() -> None:
    x = torch.randn(6, 4, 128) * 3
    x[2, 1] = 0
    x8, scale = quantize_per_token_head(x)
    assert x8.dtype == torch.float8_e4m3fn and scale.shape == (6, 4) and scale.dtype == torch.float32
    back = x8.float() * scale.unsqueeze(-1)
    assert torch.isfinite(back).all()
    assert ((back - x).abs() <= x.abs() / 16 + scale.unsqueeze(-1) * 2**-9).all()
    assert torch.allclose(x8.float().abs().amax(-1)[x.abs().amax(-1) > 0], torch.tensor(448.0))
