"""Plans of the fused MoE and the analytic choice between them, in pure Python: integers only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

ACTIVATIONS = ("silu", "gelu")
MAX_TOP_K = 128
# Up to here two launches without an index win: 11.4 us against 15.6 for one token, top-8, I = 192, H = 4096. At four
# tokens they are level (29 us), and weights shared by tokens start to be read twice.
TINY_PAIRS, TINY_INTER = 16, 256
WARPS = (1, 2, 4, 8, 16)  # of a Triton program
TINY_TOP_K = 16  # the tiny kernels keep the weights of all of a token's experts in registers
MAX_EXPERTS = 4096  # a histogram of this many bins is what one program of the index build holds
FUSED_PAIRS = 1024  # up to here one launch builds the index: each program counts every pair itself
SHORT_INTER, LONG_INTER = 256, 1024  # columns of the activations: two stages of the down product, eight
SM_SHARED = 227 * 1024  # bytes of an SM that its programs share


def tile_rows(average: int) -> int:
    """Rows of a tile of a grouped product by its average number of rows a group: part of its interface, since it
    decides how scales of tokens are laid out and what `count_and_gather` counts."""
    limits = ((8, 8), (16, 16), (32, 32), (48, 48), (64, 64), (96, 48), (128, 32), (144, 48))
    return next((tile for most, tile in limits if average <= most), 64)


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, ..."""
    return n > 0 and n & (n - 1) == 0


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Key:
    """What decides the plan: static shapes and the device, never what a tensor holds."""

    num_tokens: int
    top_k: int
    num_experts: int  # of this rank
    experts_total: int  # over which the pairs spread: all ranks'
    hidden: int
    inter: int
    block_scales: bool
    bf16_mul: bool
    sms: int
    sm90: bool
    hardware_fp8: bool  # the GPU converts fp32 to e4m3
    bf16_input: bool = False  # x is quantised inside
    activation: str = "silu"  # of the gate, one of ACTIVATIONS
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    bf16_weights: bool = False  # then nothing is quantised
    one_scale: bool = False  # block scales are found inside for x and activations, made of one for weights
    dynamic_act: bool = False  # the activations alone get a scale for each 128 columns of a row
    up_bias: bool = False
    down_bias: bool = False
    weight_on_input: bool = False  # the router's weight multiplies x, not y
    combined: bool = True  # False: y of every pair is the result
    shared_experts: int = 0  # of the experts, the last ones, which every token takes; top_k counts them too
    gpu: str = ""  # name, for the table of measured plans; empty: the analytic choice

    @property
    def quantised_input(self) -> bool:
        """x becomes e4m3 inside."""
        return self.bf16_input and not self.bf16_weights

    @property
    def act_groups(self) -> bool:
        """The activations have a scale for each 128 columns of a row."""
        return self.block_scales or self.dynamic_act

    @property
    def weighted(self) -> bool:
        """The router's weight multiplies y, so a pair of weight 0 need not be computed."""
        return self.combined and not self.weight_on_input

    @property
    def pairs(self) -> int:
        """(token, expert) pairs."""
        return self.num_tokens * self.top_k

    @property
    def groups(self) -> int:
        """128-column groups of the intermediate activations."""
        return ceil_div(self.inter, 128)

    @property
    def rows_per_expert(self) -> float:
        """Mean number of rows of an expert when routing is uniform."""
        return self.pairs / max(1, self.experts_total)


@dataclass(frozen=True)
class Product:
    """How the SM90 kernels run one of the two grouped products.

    `box` bytes along the contraction in a shared-memory box, `boxes` of them in a stage. `shared_order`: programs take
    items in turn, so that all of them work on the same weights at a time; else each takes an equal contiguous run,
    which the gate-up product cuts inside items. `fresh`: columns that the gate-up product adds up in one accumulator of
    the tensor core; block scales take 128 at most. `pair`: the kernels of `hopper_pair`, 256 weight rows a tile.
    """

    box: int
    boxes: int
    stages: int
    warps: int
    producer_warps: int
    per_sm: int
    shared_order: bool
    fresh: int = 128
    pair: bool = False


@dataclass(frozen=True)
class Tiny:
    """How the kernels for a handful of tokens cut the work: activations and outputs of a program, and its warps."""

    up_rows: int
    up_cols: int  # of x at a time
    up_warps: int
    down_cols: int
    down_warps: int


TINY = Tiny(4, 1024, 4, 32, 8)  # the analytic choice


@dataclass(frozen=True)
class Plan:
    """How a call runs.

    `tile`: rows of a tile, the token side of the matrix products. `chunk`: pairs that one program of the index build
    places. `fused_index`: one launch builds the index. `up`, `down`: only for the backend "sm90".
    """

    backend: str  # "tiny", "sm90" or "portable"
    tile: int
    chunk: int
    fused_index: bool
    up: Product | None = None
    down: Product | None = None
    tiny: Tiny | None = None


def portable_reason(key: Key) -> str | None:
    """Which part of the call only the portable kernels have, or None."""
    parts = {
        "BF16 weights": key.bf16_weights,
        "scales found inside for the activations alone": key.dynamic_act,
        "a bias": key.up_bias or key.down_bias,
        "the router's weight on the input": key.weight_on_input,
    }
    found = [name for name, asked in parts.items() if asked]
    return f"only the portable kernels know {' and '.join(found)}" if found else None


def sm90_reason(key: Key) -> str | None:
    """Why the SM90 kernels cannot run `key`, or None."""
    if not key.sm90:
        return "needs a GPU of compute capability 9.x"
    if (reason := portable_reason(key)) is not None:
        return reason
    if key.block_scales and key.inter % 64:
        return "with block scales, I must be a multiple of 64: the blocks of gate and up rows would not meet tiles"
    return None


def tiny_reason(tiny: Tiny | None, key: Key) -> str | None:
    """Why the kernels for a handful of tokens cannot run `key`, or None."""
    if tiny is None:
        return "no sizes for the tiny kernels"
    if not key.combined:
        return "the tiny kernels add up the experts of a token as they go"
    if (reason := portable_reason(key)) is not None:
        return reason
    if key.top_k > TINY_TOP_K or key.pairs > 65535:
        return f"at most {TINY_TOP_K} experts a token and 65535 pairs"
    if tiny.up_rows not in (1, 2, 4, 8, 16) or tiny.down_cols not in (1, 2, 4, 8, 16, 32, 64):
        return "slices must divide 16 rows and 64 columns"
    if not is_power_of_two(tiny.up_cols):
        return f"{tiny.up_cols} columns at a time are no power of two"
    if tiny.up_warps not in WARPS or tiny.down_warps not in WARPS:
        return f"{tiny.up_warps} and {tiny.down_warps} warps"
    return None


def stage_bytes(key: Key, tile: int, product: Product, up: bool) -> int:
    """Shared memory of one stage."""
    scales = 4 * tile if up and key.block_scales else 0
    return product.boxes * (((256 if product.pair else 128) + tile) * product.box + scales)


def reserve(tile: int, up: bool) -> int:
    """Shared memory of a program beside its stages: barriers, the system's share, and a tile on its way out."""
    return 3072 + (64 if up else 256) * tile


def is_legal(plan: Plan, key: Key) -> str | None:
    """Why `plan` cannot run `key`, or None."""
    if plan.backend == "tiny":
        return tiny_reason(plan.tiny, key)
    if plan.backend not in ("sm90", "portable"):
        return f"unknown backend {plan.backend!r}"
    if plan.tile not in (8, 16, 32, 64, 128, 256) or (
        plan.backend == "portable" and not 16 <= plan.tile <= 128
    ):
        return f"tile {plan.tile}"
    if plan.chunk < 16 or not is_power_of_two(plan.chunk):
        return f"chunk {plan.chunk} is no power of two >= 16"
    if plan.fused_index and key.pairs > FUSED_PAIRS:
        return f"one launch counts at most {FUSED_PAIRS} pairs"
    if plan.backend == "portable":
        return None
    reason = sm90_reason(key)
    if reason is not None:
        return reason
    for name, product in (("up", plan.up), ("down", plan.down)):
        if product is None:
            return f"no {name} product"
        why = product_reason(key, plan.tile, product, name == "up")
        if why is not None:
            return f"{name}: {why}"
    return None


def product_reason(key: Key, tile: int, product: Product, up: bool) -> str | None:
    """Why the SM90 kernels cannot run this product with tiles of so many rows, or None."""
    if product.box not in ((128,) if up else (64, 128)):
        return f"box {product.box}"
    # of the gate-up product's pieces in a stage a power of two is in flight at a time
    if product.boxes < 1 or (up and not is_power_of_two(product.boxes)):
        return f"{product.boxes} boxes"
    if product.fresh not in (32, 64, 128, 256):
        return f"fresh {product.fresh}"
    if product.pair and not (
        product.boxes == 1 and product.shared_order and product.warps == 8 and tile == 128
        and product.fresh in (64, 128)
    ):  # fmt: skip
        return "pairs take items in turn, a box a stage, eight warps, 128 rows, 64 or 128 fresh columns"
    if product.warps not in (4, 8) or product.producer_warps not in (1, 2, 4):
        return f"{product.warps} + {product.producer_warps} warps"
    if product.stages < 2 or product.per_sm < 1:
        return f"{product.stages} stages, {product.per_sm} programs an SM"
    stages = product.stages * stage_bytes(key, tile, product, up)
    needed = product.per_sm * (stages + reserve(tile, up))
    return f"{needed} bytes of shared memory on an SM" if needed > SM_SHARED else None


def index_chunk(pairs: int) -> int:
    """Pairs a program of the index build places. It compares all of them with one another: 128 registers a thread at
    128 pairs and four warps, so a larger chunk would spill."""
    return max(16, min(power_of_two(pairs), 128))


def analytic(key: Key) -> Plan:
    """The choice without measurements, each branch with its reason."""
    fused = key.pairs <= FUSED_PAIRS
    chunk = index_chunk(key.pairs)
    rows = key.rows_per_expert
    few = key.sm90 and key.pairs <= TINY_PAIRS and key.inter <= TINY_INTER
    if few and tiny_reason(TINY, key) is None:
        return Plan("tiny", 16, chunk, fused, tiny=TINY)
    if sm90_reason(key) is None:
        tile, up, down = analytic_sm90(key)
        return Plan("sm90", tile, chunk, fused, up, down)
    # matrix instructions of the portable kernels take 16 rows at least; a taller tile would mostly multiply zeros
    tile = 16 if rows <= 12 else 32 if rows <= 24 else 64
    return Plan("portable", tile, chunk, fused)


def fresh_columns(tile: int, block_scales: bool) -> int:
    """Columns of H in one accumulator of the tensor core. While weights are what is waited for, the extra additions
    are free: 256 additions a thread for a stage of 256 columns at 32 rows, in 1700 cycles that its weights take."""
    return 32 if tile <= 32 or block_scales else 64


def tile_for(key: Key) -> int:
    """Rows of a tile with room for the spread of random routing around the mean: a second tile of an expert reads its
    weights again."""
    rows = key.rows_per_expert
    return next((n for n, most in ((8, 4), (16, 11), (32, 24), (64, 48)) if rows <= most), 128)


def analytic_sm90(key: Key) -> tuple[int, Product, Product]:
    """(tile, up, down) for the SM90 kernels; times are of an H200."""
    if tile_for(key) <= 32:
        return few_rows(key, tile_for(key))
    return many_rows_of_blocks(key) if key.block_scales else many_rows(key)


def few_rows(key: Key, tile: int) -> tuple[int, Product, Product]:
    """The choice while reading weights is what takes time. In turn, a block of weights is read once for all tiles of an
    expert (`order`), and nobody adds up parts of items."""
    rows = key.rows_per_expert
    if key.inter <= SHORT_INTER and not key.block_scales:
        # A quarter of an item's time is its end; a second program reads on meanwhile. In turn against equal runs, 4 to
        # 256 tokens: E = 192 0.96, 1.00, 1.02, 0.98, 0.99, 0.98, 0.97; E = 128 0.95, 0.99, 0.99, 1.00, 0.99, 0.99, 0.97
        two = two_programs(key, tile)
        return two if last_round_is_empty(key, two[1]) else items_in_turn(two)
    if key.inter <= SHORT_INTER:
        return sm90_of_tile(key, tile) if rows > 8 else _with_room(sm90_of_tile(key, tile))
    if key.inter < LONG_INTER:
        # I = 768, 1 to 256 tokens, against equal runs: 0.92, 0.90, 0.96, 0.97, 0.98, 0.97, 0.97, 0.95; block scales,
        # two programs an SM: 0.97, 0.93, 0.97, 0.96, 0.98, 0.94, 0.96, 0.95, where one would give 0.97 to 1.00
        return items_in_turn((two_programs if key.block_scales else sm90_of_tile)(key, tile))
    if key.block_scales:
        # I = 1536, 1 to 64 tokens: three stages 0.99, 1.00, 1.00, 0.99, 0.98, 0.98, in turn 0.97, 0.97, 1.00, 1.03
        choice = _with_room(sm90_of_tile(key, tile))
        return items_in_turn(choice) if rows <= 2 else choice
    # I = 1536, in turn against equal runs, 1 to 64 tokens: 1.02, 0.97, 0.99, 0.98, 0.96, 0.97
    return items_in_turn(sm90_of_tile(key, tile)) if rows >= 1 else sm90_of_tile(key, tile)


def last_round_is_empty(key: Key, up: Product) -> bool:
    """Whether items in turn would keep all programs for the sake of a few: uniform routing would give each program a
    little more than one. 16 tokens of 192 experts: 280 items for 264 programs, 68.2 us for 66.7 by runs."""
    met = 1.0 - (1.0 - 1.0 / max(1, key.experts_total)) ** key.pairs
    rounds = key.num_experts * met * ceil_div(key.inter, 64) / (key.sms * up.per_sm)
    return 1.0 < rounds < 1.2


def many_rows(key: Key) -> tuple[int, Product, Product]:
    """The choice for more than 24 rows of an expert, one scale a tensor: programs take whole items in turn, since
    partial sums grow with the rows, and what all of them read at a time stays in the L2.

    Pairs of warpgroups once their tiles of 128 rows are filled; with 64 fresh columns where 128 gave an error beyond
    5e-3. Otherwise in turn.
    """
    rows = key.rows_per_expert
    if key.inter >= LONG_INTER:
        # I = 1536: 85 rows 159.0 us in turn against 161.5 by pairs; 170 rows 266.0 against 215.4
        return pair_plan(key, 128) if rows > 120 else items_in_turn(sm90_of_tile(key, tile_for(key)))
    if key.inter > SHORT_INTER:
        # Few stages an item: two programs an SM, one multiplies while the other ends an item. I = 768: 32 rows 172.5 us
        # against 176.0 by pairs; 64 rows 205.9 against 191.9
        return pair_plan(key, 128) if rows > 50 else items_in_turn(two_programs(key, 64))
    # I = 192: 43 rows 180.5 us by two, 181.8 by pairs of 64 columns; 64 rows 149.9 and 143.5; 171 rows 394.4, and 399.4
    # by pairs of 128; 256 rows 378.8 and 356.9
    if rows > 210:
        return pair_plan(key, 128)
    return pair_plan(key, 64) if 50 < rows <= 100 else items_in_turn(two_programs(key, 64))


def many_rows_of_blocks(key: Key) -> tuple[int, Product, Product]:
    """The choice for more than 24 rows of an expert, block scales. With weights on the M side of the product a thread
    multiplies by as many scales as it has sums, and all warps do so at once. 128 fresh columns would cost a tenth less
    from 170 rows on (1213 against 1353 us for 4096 tokens, I = 1536), with an error of 5.0e-3 to 6.2e-3."""
    return pair_plan(key, 64)


def sm90_of_tile(key: Key, tile: int) -> tuple[int, Product, Product]:
    """(tile, up, down) with tiles of so many rows."""
    warps = 4 if tile <= 32 else 8
    boxes = 2 if tile <= 32 or (tile == 64 and not key.block_scales) else 1
    producer = {8: 1, 16: 2}.get(tile, 4)
    fresh = fresh_columns(tile, key.block_scales)
    up = fill(key, tile, Product(128, boxes, 1, warps, producer, 1, False, fresh), True)
    box, boxes = down_boxes(key, tile)
    return tile, up, fill(key, tile, Product(box, boxes, 1, warps, 1, 1, False), False)


def down_boxes(key: Key, tile: int) -> tuple[int, int]:
    """(bytes of a box along I, boxes of a stage)."""
    # 64-byte boxes where a last box of 128 would be mostly past the end of a row
    box = 64 if 0 < key.inter % 128 <= 64 else 128
    count = ceil_div(key.inter, box)
    if count <= 3 and tile <= 32:
        return box, count
    return box, 2 if count % 2 == 0 and (tile <= 32 or not key.block_scales) else 1


def pair_plan(key: Key, fresh: int) -> tuple[int, Product, Product]:
    """(tile, up, down) by the kernels of `hopper_pair`."""
    up = Product(128, 1, 1, 8, 4, 1, True, fresh, True)
    down = replace(up, box=down_boxes(key, 128)[0], producer_warps=1, fresh=128)
    return 128, fill(key, 128, up, True), fill(key, 128, down, False)


ALTERNATIVES = (
    "portable", "tiny", "tiles", "room", "two", "shared", "two shared", "half tile", "double tile", "fresh 32",
    "fresh 64", "fresh 128", "pair 64", "pair 128",
)  # fmt: skip


def alternatives(key: Key) -> dict[str, Plan]:
    """Legal plans other than the analytic one by name, for measurements.

    "tiles": the SM90 kernels where the choice is another. "room": so few stages that the down kernel finds room beside
    the gate-up kernel. "two": two programs an SM, of half the rows each where eight warps would be needed. "shared":
    programs take items in turn. "fresh": other sums in the tensor core: larger ones cost less and flip more roundings.
    "pair": two warpgroups of 64 tokens each, tiles of 256 weight rows.
    """
    chosen = analytic(key)
    base = replace(chosen, tiny=None)
    tiny = replace(base, backend="tiny", tile=16, up=None, down=None, tiny=TINY)
    plans = {"tiny": tiny}
    rows = key.rows_per_expert
    plans["portable"] = Plan("portable", 16 if rows <= 12 else 32, base.chunk, base.fused_index)
    if sm90_reason(key) is None:
        tile, up, down = sm90_of_tile(key, min(tile_for(key), 64 if key.block_scales else 128))
        tiles = Plan("sm90", tile, base.chunk, base.fused_index, up, down)
        plans["tiles"] = tiles
        plans["room"] = replace(tiles, **_fields(_with_room((tile, up, down))))
        plans["shared"] = _in_turn(tiles)
        for fresh in (32, 64, 128):
            plans[f"fresh {fresh}"] = replace(tiles, up=replace(up, fresh=fresh))
        for other, name in ((tile // 2, "half tile"), (tile * 2, "double tile")):
            plans[name] = replace(tiles, **_fields(sm90_of_tile(key, other)))
        plans["two"] = replace(tiles, **_fields(two_programs(key, tile)))
        plans["two shared"] = _in_turn(plans["two"])
        for fresh in (64, 128):
            plans[f"pair {fresh}"] = replace(tiles, **_fields(pair_plan(key, fresh)))
    return {name: plan for name, plan in plans.items() if is_legal(plan, key) is None and plan != chosen}


def _fields(choice: tuple[int, Product, Product]) -> dict[str, Any]:
    return dict(zip(("tile", "up", "down"), choice, strict=True))


def _in_turn(plan: Plan) -> Plan:
    assert plan.up is not None and plan.down is not None
    return replace(plan, **_fields(items_in_turn((plan.tile, plan.up, plan.down))))


def items_in_turn(choice: tuple[int, Product, Product]) -> tuple[int, Product, Product]:
    """Both products with programs that take items in turn."""
    tile, up, down = choice
    return tile, replace(up, shared_order=True), replace(down, shared_order=True)


def _with_room(choice: tuple[int, Product, Product]) -> tuple[int, Product, Product]:
    """Three stages, so that the down kernel's programs start beside the gate-up kernel's."""
    tile, up, down = choice
    return tile, replace(up, stages=min(up.stages, 3)), replace(down, stages=3)


def two_programs(key: Key, tile: int) -> tuple[int, Product, Product]:
    """(tile, up, down) with two programs an SM, of four warps and at most 64 rows each."""
    small, up, down = sm90_of_tile(key, min(tile, 64))
    changes: dict[str, Any] = {"warps": 4, "per_sm": 2, **({"boxes": 1} if small == 64 else {})}
    return (
        small,
        fill(key, small, replace(up, **changes), True),
        fill(key, small, replace(down, **changes), False),
    )


def fill(key: Key, tile: int, product: Product, up: bool) -> Product:
    """The product with as many stages as shared memory holds, at most 8."""
    room = SM_SHARED // product.per_sm - reserve(tile, up)
    return replace(product, stages=max(2, min(8, room // stage_bytes(key, tile, product, up))))
