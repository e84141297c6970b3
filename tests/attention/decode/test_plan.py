"""The planner as properties: every tile exactly once, balance, chunks and merges as a brute-force map has them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpc
from hpc.attention.decode import choose, launch, plan

LENGTHS = st.lists(
    st.one_of(
        st.integers(0, 300), st.integers(0, 20_000), st.sampled_from([0, 1, 63, 64, 65, 128, 129, 131072])
    ),
    max_size=40,
)
WINDOWS = st.one_of(st.none(), st.integers(1, 5000))
BINS = st.integers(1, 70)

# A cut moves back to a tile (under TILE_COST), or to the start of its request, or forward to the next request.
BACK = plan.SEGMENT_COST + plan.TILE_COST * plan.SNAP
FORWARD = plan.TILE_COST * plan.SNAP


def segments(bin_: plan.Bin, ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(request, first tile, past-the-end tile) that a CTA walks through, by the map's definition."""
    found, b, t = [], bin_.b, bin_.t0
    while b < bin_.b_end or (b == bin_.b_end and bin_.t_end > 0):
        end = ranges[b][1] if b < bin_.b_end else bin_.t_end
        found.append((b, t, end))
        b += 1
        t = ranges[b][0] if b < len(ranges) else 0
    return found


@given(lens=LENGTHS, new=st.integers(1, 16), n_bins=BINS, floor=st.integers(1, 12), window=WINDOWS)
def test_every_tile_exactly_once_and_in_order(lens, new, n_bins, floor, window):
    ranges = [plan.tile_range(length, new, window) for length in lens]
    bins = plan.build_bins(lens, new, n_bins, floor, window)
    assert len(bins) == n_bins
    walked = [(b, t) for bin_ in bins for b, lo, hi in segments(bin_, ranges) for t in range(lo, hi)]
    assert walked == [(b, t) for b, (lo, hi) in enumerate(ranges) for t in range(lo, hi)]
    for bin_ in bins:
        assert all(lo < hi for _, lo, hi in segments(bin_, ranges)), (
            "an empty segment would write zeros over a result"
        )


@given(lens=LENGTHS, n_bins=BINS, floor=st.integers(1, 12))
def test_no_bin_costs_much_more_than_its_share(lens, n_bins, floor):
    ranges = [plan.tile_range(length, 1, None) for length in lens]
    tiles = [hi - lo for lo, hi in ranges]
    total = sum(plan.TILE_COST * n + plan.SEGMENT_COST for n in tiles)
    share = max(-(-total // n_bins), plan.TILE_COST * floor + plan.SEGMENT_COST)
    # A request that a bin continues costs its set-up a second time.
    bound = share + BACK + FORWARD + plan.SEGMENT_COST
    for bin_ in plan.build_bins(lens, 1, n_bins, floor):
        parts = segments(bin_, ranges)
        cost = sum(plan.TILE_COST * (hi - lo) + plan.SEGMENT_COST for _, lo, hi in parts)
        assert cost <= bound, (bin_, cost, bound)


def test_the_floor_keeps_short_requests_whole_and_yields_to_a_long_one():
    floor = 8
    whole = plan.build_bins([floor * plan.TILE] * 64, 1, 132, floor)
    assert all(bin_.n_chunks == 0 for bin_ in whole)
    long = plan.build_bins([16384] + [64] * 15, 1, 132, floor)
    chunks = max(bin_.n_chunks for bin_ in long)
    assert 0 <= chunks - 16384 // (floor * plan.TILE) <= 1, chunks


@given(lens=LENGTHS, new=st.integers(1, 16), n_bins=BINS, floor=st.integers(1, 12), window=WINDOWS)
def test_chunks_and_merges_agree_with_an_owner_map(lens, new, n_bins, floor, window):
    ranges = [plan.tile_range(length, new, window) for length in lens]
    bins = plan.build_bins(lens, new, n_bins, floor, window)
    owners: dict[int, list[int]] = defaultdict(list)
    for g, bin_ in enumerate(bins):
        for b, _, _ in segments(bin_, ranges):
            owners[b].append(g)
    for touching in owners.values():
        assert touching == list(range(touching[0], touching[-1] + 1)), "chunk j of a request is in bin g0 + j"

    for g, bin_ in enumerate(bins):
        if bin_.b == len(lens):
            assert (bin_.t0, bin_.b_end, bin_.t_end, bin_.n_chunks, bin_.g0) == (0, len(lens), 0, 0, g)
            continue
        assert bin_.length == lens[bin_.b]
        if bin_.t0 > ranges[bin_.b][0]:
            assert (bin_.g0, bin_.n_chunks) == (owners[bin_.b][0], len(owners[bin_.b]))
        else:
            assert (bin_.g0, bin_.n_chunks) == (g, 0)

    split = {b: touching for b, touching in owners.items() if len(touching) > 1}
    words = plan.merge_entries(bins, len(lens), 77)
    assert len(words) == plan.MERGE_WORDS * n_bins
    entries = [words[i : i + plan.MERGE_WORDS] for i in range(0, len(words), plan.MERGE_WORDS)]
    used = plan.num_merges(len(lens), n_bins)
    due = {b: (g0, chunks) for sig, b, g0, chunks in entries[:used] if chunks and sig == 77}
    assert due == {b: (touching[0], len(touching)) for b, touching in split.items()}
    assert all(entry == [0] * plan.MERGE_WORDS for entry in entries[used:])


@given(lens=LENGTHS, n_bins=BINS, floor=st.integers(1, 12))
def test_every_partial_slot_has_one_writer(lens, n_bins, floor):
    ranges = [plan.tile_range(length, 1, None) for length in lens]
    writers = [
        2 * g + (lo == ranges[b][0])
        for g, bin_ in enumerate(plan.build_bins(lens, 1, n_bins, floor))
        for b, lo, hi in segments(bin_, ranges)
        if (lo, hi) != ranges[b]
    ]
    assert len(writers) == len(set(writers)) and all(slot < 2 * n_bins for slot in writers)


@given(length=st.integers(0, 10_000), new=st.integers(1, 16), window=WINDOWS)
def test_tiles_are_those_with_a_visible_key(length, new, window):
    lo, hi = plan.tile_range(length, new, window)
    keys = {
        j
        for i in range(new)
        for j in range(max(0, length - new + 1 + i - (window or length + new)), max(0, length - new + 1 + i))
    }
    tiles = {j // plan.TILE for j in keys}
    assert lo < hi and tiles <= set(range(lo, hi))
    if tiles:
        assert lo == min(tiles) and hi - 1 == max(tiles)


@given(lens=LENGTHS, kv_heads=st.sampled_from([1, 2, 8]), process=st.sampled_from([0, 64, 256, 512, 4096]))
def test_header_and_size_of_the_map(lens, kv_heads, process):
    sms = 20
    words = plan.build_task_map(
        lens,
        sms=sms,
        num_kv_heads=kv_heads,
        num_new_tokens=1,
        sig=9,
        min_process_len=process,
        max_num_batch=3,
    )
    assert len(words) == plan.workspace_words(sms, kv_heads)
    bins = plan.build_bins(lens, 1, plan.num_bins(sms, kv_heads, 1), plan.floor_tiles(1, process))
    most = max((bin_.n_chunks for bin_ in bins), default=0)
    assert words[5] >= max(1, most) and words[5] <= len(bins)
    assert words[1:4] == [len(bins) * kv_heads, kv_heads, 3]
    assert words[6:8] == [9, plan.LAYOUT_VERSION]
    assert words[4] == 4 * (plan.variant_offset(sms, kv_heads, plan.NUM_VARIANTS) - plan.HEADER_WORDS)
    assert not any(words[plan.variant_offset(sms, kv_heads, plan.NUM_VARIANTS) :]), (
        "merge counters start at zero"
    )


def test_a_smaller_min_process_len_cuts_finer_and_a_larger_one_never_past_the_floor():
    for v in range(plan.NUM_VARIANTS):
        floors = [plan.floor_tiles(v, n) for n in (0, 64, 128, 512, 4096, 10**9)]
        assert floors == sorted(floors) and floors[0] == 1 and floors[-1] == plan.FLOOR_TILES[v]


@given(length=st.integers(0, 200_000), splits=st.integers(1, 64), least=st.integers(1, 16), window=WINDOWS)
def test_static_chunks_cover_a_request(length, splits, least, window):
    lo, hi = plan.tile_range(length, 1, window)
    chunk = plan.static_chunk_tiles(hi - lo, splits, least)
    pieces = [(lo + i * chunk, min(lo + (i + 1) * chunk, hi)) for i in range(splits) if i * chunk < hi - lo]
    assert [t for a, b in pieces for t in range(a, b)] == list(range(lo, hi))
    assert chunk >= least


def test_signature_mixes_every_part():
    grid = itertools.product(
        (1, 2, 4, 8), range(1, 17), (0, 1, 2, 64, 256, 512), (None, 1, 128, 4096), (False, True)
    )
    seen = {plan.signature(*parts): parts for parts in grid}
    assert len(seen) == 4 * 16 * 6 * 4 * 2
    assert all(0 < value < 2**31 for value in seen)


def keys(sm90: bool = True):
    grid = itertools.product(
        (1, 3, 64, 512), ((8, 1), (64, 8), (64, 1), (7, 1), (128, 128), (24, 2)), ((64, 64), (128, 128), (256, 256),
        (192, 128), (72, 72), (64, 256)), (1, 16, 64, 128, 256), (1, 4, 16), (-1, 0, 1), (True, False),
    )  # fmt: skip
    for batch, heads, dims, page, new, quant, dynamic in grid:
        yield choose.Key(
            sm90=sm90, sms=132, batch=batch, q_heads=heads[0], kv_heads=heads[1], head_dim=dims[0], v_dim=dims[1],
            page_size=page, max_pages=9, num_new_tokens=new, quant_type=quant, dynamic=dynamic,
        )  # fmt: skip


@pytest.mark.parametrize("sm90", [True, False])
def test_every_choice_is_legal(sm90):
    backends = set()
    for key in keys(sm90):
        chosen = choose.choose(key)
        assert choose.is_legal(chosen, key) is None, (key, chosen)
        assert 0 <= chosen.variant < plan.NUM_VARIANTS
        assert -(-key.rows // chosen.block_rows) <= plan.MAX_ROW_BLOCKS, (
            "the map has no counters for more row blocks"
        )
        backends.add(chosen.backend)
    assert backends == ({"sm90", "portable"} if sm90 else {"portable"})


def test_unaligned_caches_and_other_gpus_get_the_portable_kernel():
    key = next(keys())
    assert choose.choose(key).backend == "portable"  # page 1
    key = replace(key, page_size=64)
    assert choose.choose(key).backend == "sm90"
    assert choose.choose(replace(key, tma=False)).backend == "portable"
    assert choose.choose(replace(key, sm90=False)).backend == "portable"
    assert choose.choose(replace(key, quant_type=0)).backend == "portable"


def test_batch_invariant_plans_do_not_look_at_the_batch():
    for key in keys():
        if not key.dynamic:
            plans = {choose.choose(replace(key, batch=b, batch_invariant=True)) for b in (1, 2, 64, 4096)}
            assert len(plans) == 1


def test_the_size_helper_is_the_scratch_of_a_call():
    for key in keys():
        chosen = choose.choose(key)
        size = hpc.get_attention_decode_scratch_size(
            key.batch, key.q_heads, key.kv_heads, key.head_dim, key.v_dim, key.num_new_tokens - 1,
            page_size=key.page_size, quant_type=None if key.quant_type < 0 else key.quant_type, dynamic=key.dynamic,
            device="cpu",
        )  # fmt: skip
        assert size == 4 * launch.scratch(key, chosen)[2]
        if key.dynamic:
            slots = 2 * plan.num_bins(132, key.kv_heads, chosen.variant)
        else:
            slots = key.batch * chosen.num_splits if chosen.num_splits > 1 else 0
        rows = slots * key.kv_heads * key.rows
        # m and l, padded so that the partials start at a multiple of 256 bytes, then the partials
        assert size == (4 * (-(-2 * rows // 64) * 64 + rows * key.v_dim) if rows else 0)


def test_dynamic_scratch_does_not_grow_with_the_batch():
    sizes = {hpc.get_attention_decode_scratch_size(b, 64, 8, device="cpu") for b in (1, 64, 512, 100_000)}
    assert len(sizes) == 1 and sizes.pop() <= 2 * 264 * 8 * 130 * 4 + 256
