"""Plans of the fused MoE for `hpc tune`: which calls to measure, and which plans beside the analytic one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hpc.common.operator import Case
from hpc.moe import case_lists, cases, choose, plan, warm
from hpc.moe.cases import MoeInputs
from hpc.moe.plan import Key, Plan, Product

# Columns in one accumulator of the tensor core that keep the error within 5e-3 on every measured shape. 128 do on some
# and not on others, and a draw that passes proves little: they are searched only where the analytic choice has them.
FRESH = 64
DEPTHS = (2, 3, 4, 6)  # stages at most, in both products
TINY_PAIRS = (
    4 * plan.TINY_PAIRS
)  # beyond, every pair reads weights that others have read: milliseconds a call
# Rows of a tile. Beyond, sums and factors spill, 1 to 11 KB at 256 rows, and pairs are the kernels for so many rows.
MOST_ROWS, MOST_ROWS_OF_BLOCKS = 128, 64
PAIR_ROWS = 16  # of an expert on average: below, most of a pair's 128 rows are empty


class MoeTuning:
    """See `hpc.bench.tune.Tuning`."""

    folder = choose.CONFIGS

    def cases(self) -> list[Case]:
        """All timed cases: the routings of one number of tokens share a point."""
        return [*case_lists.target_cases(), *case_lists.bench_cases()]

    def key(self, inputs: MoeInputs) -> Key:
        """The key of the public call on these inputs; one pass holds all of their tokens."""
        return cases.key_of(inputs)

    def point(self, key: Key) -> tuple[dict[str, int | bool | str], int]:
        return choose.point(key)

    def analytic(self, key: Key) -> Plan:
        return plan.analytic(key)

    def candidates(self, key: Key) -> Iterator[Plan]:
        """Other kernels, tiles and shares of an SM; and the analytic plan with one thing changed."""
        base = plan.analytic(key)
        if base.backend == "portable":
            yield from (replace(base, tile=tile) for tile in (16, 32, 64, 128))
            return
        if key.pairs <= TINY_PAIRS and key.inter <= plan.TINY_INTER:
            yield from _tiny(key, base)
        most = FRESH if base.up is None else max(FRESH, base.up.fresh)
        for each in (*_tiles(key, base), *_changes(key, base)):
            if each.up is not None and each.up.fresh <= most:
                yield each

    def is_legal(self, chosen: Plan, key: Key) -> str | None:
        return plan.is_legal(chosen, key)

    def prepare(self, inputs: MoeInputs, chosen: Plan) -> Callable[[], torch.Tensor]:
        """The whole call, as a layer makes it."""
        return lambda: cases.run(inputs, plan=chosen)

    def compile(self, case: Case, chosen: Plan, target: str) -> None:
        warm.compile_shape(case.params, target, chosen)


def _tiny(key: Key, base: Plan) -> Iterator[Plan]:
    """The two launches without an index, one size changed at a time."""
    sizes = base.tiny or plan.TINY
    changes = (
        *({"up_rows": n} for n in (1, 2, 4, 8)), *({"up_cols": n} for n in (512, 1024, 2048)),
        *({"up_warps": n} for n in (2, 4, 8)), *({"down_cols": n} for n in (16, 32, 64)),
        *({"down_warps": n} for n in (4, 8)),
    )  # fmt: skip
    for change in changes:
        yield replace(base, backend="tiny", tile=16, up=None, down=None, tiny=replace(sizes, **change))


def _tiles(key: Key, base: Plan) -> Iterator[Plan]:
    """Tiles of half, the same and twice the rows, one or two programs an SM, in runs or in turn; pairs."""
    rows = plan.tile_for(key)
    for tile in (rows // 2, rows, 2 * rows):
        if tile > (MOST_ROWS_OF_BLOCKS if key.block_scales else MOST_ROWS):
            continue
        for choice in (plan.sm90_of_tile(key, tile), plan.two_programs(key, tile)):
            yield _sm90(base, *choice)
            yield _sm90(base, *plan.items_in_turn(choice))
    if key.rows_per_expert > PAIR_ROWS:
        for fresh in (64, 128):
            yield _sm90(base, *plan.pair_plan(key, fresh))


def _changes(key: Key, base: Plan) -> Iterator[Plan]:
    """The analytic plan with one thing changed, in one product or both."""
    if base.up is None or base.down is None:
        return
    tile, up, down = base.tile, base.up, base.down

    def with_up(**changes: Any) -> Plan:
        return replace(base, up=plan.fill(key, tile, replace(up, **changes), True))

    def with_down(**changes: Any) -> Plan:
        return replace(base, down=plan.fill(key, tile, replace(down, **changes), False))

    for depth in DEPTHS:
        yield _sm90(base, tile, _cut(up, depth), _cut(down, depth))
    for warps in (1, 2, 4):
        yield replace(base, up=replace(up, producer_warps=warps))
    for fresh in (32, 64, 128):
        yield replace(base, up=replace(up, fresh=fresh))
    for boxes in (1, 2):
        yield with_up(boxes=boxes)
    for boxes in (1, 2, 3):
        if plan.ceil_div(key.inter, down.box) % boxes == 0:  # else a part of the last stage is of zeros
            yield with_down(boxes=boxes)
    if not up.pair:
        yield replace(base, up=replace(up, shared_order=not up.shared_order))
        yield replace(base, down=replace(down, shared_order=not down.shared_order))
    if tile <= 64:  # the sums of more rows fit the registers of eight warps only
        for programs in (1, 2):
            yield with_up(per_sm=programs, warps=4)
            yield with_down(per_sm=programs, warps=4)


def _sm90(base: Plan, tile: int, up: Product, down: Product) -> Plan:
    """These products behind the index of the analytic plan."""
    return replace(base, backend="sm90", tile=tile, up=up, down=down, tiny=None)


def _cut(product: Product, depth: int) -> Product:
    return replace(product, stages=min(product.stages, depth))


TUNING = MoeTuning()
