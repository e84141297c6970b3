"""The SM90 kernels' source on a CPU (see `gluon_emulator`), against the float64 reference.

Shows what a GPU would otherwise have to: that no role waits for ever, that every copy, mask and row goes to its place
for ragged batches, pages, packed heads and windows, and that V^T and P agree on the order of keys.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gluon_emulator import Deadlock, Desc, Ptr, emulate
from prefill_support import INT_MIN, combine, compare, entries, make, table

from hpc.attention.prefill import cases, plan
from hpc.attention.prefill.case_lists import PrefillCase, prompts

pytestmark = pytest.mark.interpret

CTAS = 3


def run(
    inputs: cases.PrefillInputs,
    ctas: int = CTAS,
    instead: Any = None,
    short: bool = False,
    parts: int = 1,
    placed: bool = True,
    **fields: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) of the kernel that the SM90 plan would launch, with the largest pack, or with other `fields`; parts
    are joined. `placed`: CTAs of parts find their tile themselves."""
    from hpc.attention.prefill import hopper, hopper_fp8

    p = inputs.params
    key = cases.key_of(p, True)
    chosen = plan.sm90(key)
    split = parts > 1
    chosen = replace(chosen, **{"pack": chosen.short_pack, **({"overlap": False} if split else {}), **fields})
    assert plan.is_legal(chosen, key) is None
    config = hopper.Config(
        D=p.head_dim, P=p.page_size, PACK=chosen.pack, HQ=p.q_heads, HKV=p.kv_heads, STAGES=chosen.stages,
        FP8=key.fp8, CAUSAL=p.causal, WINDOW=key.window, CAP=key.logit_cap, SINKS=p.sinks and not split, LSE=True,
        PDL=True, BN=chosen.block_n, OVERLAP=chosen.overlap, SPLIT=split,
    )  # fmt: skip
    out = torch.full((*inputs.q.shape[:2], p.head_dim), math.nan).bfloat16()
    lse = torch.full(inputs.q.shape[:2], math.nan)
    tiles = plan.bound(inputs.q.shape[0], len(p.lens), chosen.tile_tokens)
    placed = short or (split and placed)
    if placed:
        words = torch.full((plan.HEADER_WORDS + tiles * plan.ENTRY_WORDS,), INT_MIN, dtype=torch.int32)
    else:
        words = table(inputs, chosen.tile_tokens, chosen.block_n)
        assert entries(words)
    if placed or split:
        ctas = tiles * config.NH * parts
    q_box, kv_box = [config.QT, config.PACK, config.DB], [1, config.PB, 1, config.DB]
    descs = (
        Desc(inputs.q, q_box), Desc(inputs.k, kv_box), Desc(inputs.v, kv_box),
        Desc(out, [config.QT, config.PACK, config.O_COLS // config.OH]),
    )  # fmt: skip
    sinks = torch.zeros(1) if inputs.sinks is None else inputs.sinks
    to, to_lse = out, lse
    if split:
        to = torch.full((len(out) * parts, *out.shape[1:]), math.nan)
        to_lse = torch.full(to.shape[:2], math.nan)
    pointers = [
        Ptr(x) for x in (to, to_lse, words, inputs.cu_seqlens, inputs.seq_lens, inputs.block_ids, sinks)
    ]
    numbers: list[Any] = [
        len(p.lens) if placed else 0, inputs.q.shape[0], inputs.block_ids.shape[1] * p.page_size,
        inputs.block_ids.stride(0), parts if split else ctas, inputs.k.shape[0], p.window or 0,
        p.head_dim**-0.5, p.logit_cap or 1.0, *to.stride()[:2],
    ]  # fmt: skip
    kernel = hopper._prefill_sm90_bf16_kernel
    if key.fp8:
        kernel = hopper_fp8._prefill_sm90_fp8_kernel
        pointers += [Ptr(x) for x in (inputs.qscale, inputs.kscale, inputs.vscale)]
        numbers += [*inputs.qscale.stride()[:2], inputs.qscale.shape[2]]
    emulate(kernel, ctas, *descs, *pointers, *numbers, config, instead=instead)
    if split:
        assert not to_lse.isnan().any() and not to[to_lse > -math.inf].isnan().any()
        combine(to, to_lse, out, lse, inputs.sinks)
    return out, lse


def check(inputs: cases.PrefillInputs, **more: Any) -> None:
    compare(inputs, *run(inputs, **more), plan.sm90(cases.key_of(inputs.params, True)))


MIXED = ((20, 77), (1, 300), (7, 7), (0, 5), (40, 170), (3, 0))
SHAPES: dict[str, dict[str, Any]] = {
    "8/1": {"heads": (8, 1)},
    "12/2 HND, page 16": {"heads": (12, 2), "layout": "HND", "page_size": 16},
    "5/1 joint, page 128": {"heads": (5, 1), "layout": "joint", "page_size": 128},
    "64/1 page 256": {"heads": (64, 1), "page_size": 256},
    "4/4 page 32, extra rows": {"heads": (4, 4), "page_size": 32, "extra_rows": 70},
    "window": {"heads": (2, 1), "window": 50},
    "full": {"heads": (2, 1), "causal": False},
    "full window": {"heads": (4, 1), "causal": False, "window": 60},
    "cap, sinks": {"heads": (4, 2), "logit_cap": 1.5, "sinks": True},
}


# In both formats what the two kernels do each in its own way; the rest, which they share, in one unless asked for.
SLOW = {
    ("bf16", "5/1 joint, page 128"), ("fp8", "64/1 page 256"), ("bf16", "64/1 page 256"), ("bf16", "8/1"),
    ("fp8", "4/4 page 32, extra rows"), ("fp8", "12/2 HND, page 16"), ("fp8", "full"), ("bf16", "full window"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param(dtype, shape, marks=pytest.mark.slow if (dtype, shape) in SLOW else ())
        for shape in SHAPES
        for dtype in ("bf16", "fp8")
    ],
)
def test_equals_the_reference(dtype: str, shape: str) -> None:
    check(make(MIXED, device="cpu", dtype=dtype, **SHAPES[shape]))


@pytest.mark.parametrize(
    ("head_dim", "window"),
    [
        (64, None),
        (256, 100),
        pytest.param(64, 100, marks=pytest.mark.slow),
        pytest.param(256, None, marks=pytest.mark.slow),
    ],
)
def test_other_head_dims(head_dim: int, window: int | None) -> None:
    check(make(MIXED, (4, 2), device="cpu", head_dim=head_dim, window=window, page_size=32))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_whole_tiles_leave_by_tma(dtype: str) -> None:
    """128 rows of one head, and 16 tokens of eight: tiles without a row to spare, beside some that have."""
    check(make(prompts(256, 130), (1, 1), device="cpu", dtype=dtype))
    check(make(prompts(32, 9), (8, 1), device="cpu", dtype=dtype))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("ctas", [1, 5])
def test_any_number_of_ctas(dtype: str, ctas: int) -> None:
    check(make(((70, 200), (3, 140)), (2, 1), device="cpu", dtype=dtype), ctas=ctas)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("pack", [1, 4])
def test_short_calls_place_their_own_tiles(dtype: str, pack: int) -> None:
    """Requests without tokens or keys, and rows behind the last one; more CTAs than there are tiles."""
    lens = ((20, 77), (0, 5), (3, 0), (130, 140))
    check(make(lens, (4, 1), device="cpu", dtype=dtype, extra_rows=5), short=True, pack=pack)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_tiles_of_one_head(dtype: str) -> None:
    check(make(MIXED, (2, 1), device="cpu", dtype=dtype), pack=1)


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 200])
def test_any_number_of_stages(stages: int, window: int | None) -> None:
    inputs = make(
        ((20, 77), (1, 300), (0, 5), (40, 700), (3, 0)), (4, 2), device="cpu", dtype="fp8", window=window
    )
    check(inputs, stages=stages)
    check(inputs, short=True, stages=stages)


OVERLAP: dict[str, dict[str, Any]] = {
    "causal": {"heads": (2, 1), "pack": 1},
    "8/1": {"heads": (8, 1)},
    "page 16, extra rows": {"heads": (3, 1), "page_size": 16, "extra_rows": 70},
    "window": {"heads": (2, 1), "window": 50, "pack": 1},
    "full window": {"heads": (4, 1), "causal": False, "window": 60},
    "full": {"heads": (2, 1), "causal": False},
    "cap, sinks, d64": {"heads": (4, 2), "logit_cap": 1.5, "sinks": True, "head_dim": 64},
}


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape == "causal" else pytest.mark.slow) for shape in OVERLAP]
)
def test_the_end_of_a_tile_beside_the_start_of_the_next_one(shape: str) -> None:
    """Tiles of one block and of several, masked at the top, at the window's edge or not at all, cut off or whole."""
    fields = dict(OVERLAP[shape])
    plan_fields = {"pack": fields.pop("pack")} if "pack" in fields else {}
    check(make((*MIXED, (9, 128)), device="cpu", **fields), overlap=True, **plan_fields)
    if shape != "causal":
        lens = ((200, 500), (1, 900), (130, 131), (60, 320), (128, 256))
        check(make(lens, device="cpu", **fields), overlap=True, ctas=2, **plan_fields)


SPLIT: dict[str, dict[str, Any]] = {
    "bf16": {"heads": (2, 1), "extra_rows": 5},
    "fp8": {"heads": (4, 1), "dtype": "fp8", "extra_rows": 5},
    "bf16 window, sinks, page 16": {"heads": (2, 1), "window": 420, "sinks": True, "page_size": 16},
    "fp8 window, cap, page 32": {"heads": (4, 2), "dtype": "fp8", "window": 300, "logit_cap": 5.0, "page_size": 32},
    "bf16 full, d64": {"heads": (2, 1), "causal": False, "head_dim": 64},
    "fp8 full window, sinks": {"heads": (2, 1), "dtype": "fp8", "causal": False, "window": 260, "sinks": True},
    "bf16 5/1, d256, cap": {"heads": (5, 1), "head_dim": 256, "logit_cap": 5.0},
}  # fmt: skip


@pytest.mark.parametrize(
    "shape", [pytest.param(x, marks=() if x in ("bf16", "fp8") else pytest.mark.slow) for x in SPLIT]
)
def test_parts_of_the_keys_join_to_the_whole(shape: str) -> None:
    """Requests of many parts, of one, of one token, without tokens or keys; rows behind the last; parts that end inside
    the diagonal, at the window's edge, and that have no block."""
    lens = ((140, 900), (1, 70), (0, 5), (3, 0), (1, 640), (9, 6))
    for parts, placed in ((2, True), (5, False)):
        check(make(lens, device="cpu", **SPLIT[shape]), parts=parts, placed=placed)


def test_the_maximum_follows_scores_that_grow_block_by_block() -> None:
    """From the last block to the first each score is far above those before: everything held must shrink to nothing."""
    for dtype in ("bf16", "fp8"):
        inputs = make(((20, 900),), (4, 1), device="cpu", dtype=dtype)
        pages = inputs.block_ids[0, :15].long()
        factor = torch.linspace(8.0, 0.5, 15)[:, None, None, None]
        grown = inputs.q[0, 0].float().sign() * factor
        inputs.k[pages] = grown.expand(15, 64, 1, 128).to(inputs.k.dtype)
        check(inputs)


def test_a_zero_query_scale_weighs_all_keys_alike() -> None:
    inputs = make(((9, 200),), (4, 1), device="cpu", dtype="fp8")
    inputs.qscale[:, :, :9] = 0.0
    check(inputs)


def test_nan_keys_of_a_request_stay_with_it() -> None:
    for dtype in ("bf16", "fp8"):
        inputs = make(prompts(20, 30, 25), (4, 1), device="cpu", dtype=dtype)
        clean, _ = run(inputs)
        bits = inputs.k.view(torch.uint8 if dtype == "fp8" else torch.int16)
        bits[inputs.block_ids[1, :1].long()] = 0x7F if dtype == "fp8" else 0x7FC0
        dirty, _ = run(inputs)
        assert torch.equal(dirty[:20], clean[:20]) and torch.equal(dirty[50:], clean[50:])


def test_no_request_but_rows() -> None:
    inputs = cases.make_tensors(PrefillCase(((0, 3),), 8, 1, extra_rows=9), "cpu", 1)
    out, lse = run(replace(inputs))
    assert (out == 0).all() and (lse == -math.inf).all()


# --- would it show? ---------------------------------------------------------------------------------------------


def test_a_role_that_never_comes_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="roles of CTA 0 wait"):
        run(make(((9, 20),), (4, 1), device="cpu"), instead={"producer": lambda *args: None})


@pytest.mark.parametrize(
    "instead",
    [
        {"first_keys": lambda keys, block, col, C: col},  # rows not shifted
        {"blocks_of": lambda tokens, first, start, keys, window, ctas, C: (1, 1, 1, 0)},  # one block only
        {"work_of": lambda it, cta, ctas, n_work, C: it * ctas},  # every CTA the same tiles
        {"_unpair": lambda x: x},  # V not transposed
        {"_plus": lambda o, shrink, pv: o + pv},  # old sums keep their scale
    ],
    ids=lambda x: next(iter(x)),
)
def test_a_wrong_formulation_is_seen(instead: dict[str, Any]) -> None:
    inputs = make(((40, 300), (5, 99)), (4, 1), device="cpu", dtype="fp8")
    inputs.k.copy_(
        (inputs.k.float() * torch.linspace(0.2, 3.0, inputs.k.shape[0])[:, None, None, None]).to(
            inputs.k.dtype
        )
    )
    check(inputs)
    with pytest.raises(AssertionError):
        check(inputs, instead=instead)
