"""What a router product is (`Key`), how it may be run (`Plan`), the measured table and the analytic choice.

Pure Python on integers and flags; nothing here touches a tensor or a device.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

SHARED_MEMORY = 227 * 1024  # bytes a CTA of SM90 may use
MAX_SPLITS = 32
MAX_ROW_K = 8192  # a weight row of the row kernel lies in registers
STEP = 64  # K of one step of the tile kernel
SMALL_ROWS = 16  # weight rows of a CTA of the small kernel
BLOCK_K = 32  # K of one step of the portable kernel

# (block_m, block_n) of the tile kernel; 96 is 64 + 32.
TILES = ((64, 32), (64, 64), (64, 96), (64, 128), (128, 64), (128, 96), (128, 128))


@dataclass(frozen=True)
class Key:
    """Everything about a call that may change its plan."""

    gpu: str  # name, for the measured table
    sm90: bool
    sms: int
    m: int
    n: int
    k: int
    terms: int = 2
    aligned: bool = True  # rows of x and of the weights begin at multiples of 16 bytes


@dataclass(frozen=True)
class Plan:
    """One way to run a product.

    row: block_n weight rows a program, all of K, no matrix unit. small: mma.sync from registers, 16 weight rows and
    block_m tokens a CTA, warps * chunks * 32 of K. tile: wgmma, TMA pipeline of `stages`. block: portable.
    With splits > 1 a second kernel adds fp32 partials.
    """

    kernel: Literal["row", "small", "tile", "block"]
    block_m: int
    block_n: int
    splits: int = 1
    warps: int = 4
    chunks: int = 0
    stages: int = 0

    @property
    def pieces(self) -> tuple[int, int]:
        """block_n of the tile kernel as two powers of two."""
        return (64, 32) if self.block_n == 96 else (self.block_n, 0)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def topk_rows(m: int, sms: int) -> int:
    """Tokens that a program of the expert choice takes: one, until the programs fill every multiprocessor twice.

    About 1400 programs start a microsecond (measured with the prologue's), so thousands of one warp wait to start.
    """
    return min(4, max(1, m // (sms * 16)))


def stage_bytes(plan: Plan, terms: int) -> int:
    """Shared memory of one step of the tile kernel."""
    return (plan.block_m + terms * plan.block_n) * STEP * 2


def residents(plan: Plan, terms: int) -> int:
    """CTAs of the tile kernel that fit one multiprocessor."""
    return (
        2
        if plan.block_m == 64 and 2 * (stage_bytes(plan, terms) * plan.stages + 2048) <= SHARED_MEMORY
        else 1
    )


def is_legal(plan: Plan, key: Key) -> str | None:
    """None if the plan can run the call, else the reason why not."""
    if not 1 <= plan.splits <= MAX_SPLITS:
        return f"splits must be 1 to {MAX_SPLITS}"
    if plan.warps not in (1, 2, 4, 8):
        return "warps must be 1, 2, 4 or 8"
    if plan.kernel == "row":
        return _row_illegal(plan, key)
    if plan.kernel == "block":
        if plan.block_m not in (16, 32, 64, 128) or plan.block_n not in (16, 32, 64, 128):
            return "the portable kernel takes blocks of 16, 32, 64 or 128"
        return None if (plan.splits - 1) * BLOCK_K < max(key.k, 1) else "a split would be empty"
    if not key.sm90:
        return "the Gluon kernels need compute capability 9.0"
    if not key.aligned or key.k % 16:
        return "the Gluon kernels need k a multiple of 16 and rows that begin at multiples of 16 bytes"
    if plan.kernel == "small":
        return _small_illegal(plan, key)
    return _tile_illegal(plan, key)


def _row_illegal(plan: Plan, key: Key) -> str | None:
    if plan.splits != 1 or plan.block_n not in (1, 2) or plan.block_m < key.m:
        return "the row kernel takes one split, one or two weight rows and all tokens at once"
    if plan.block_m not in (1, 2, 4):
        return "the row kernel takes 1, 2 or 4 tokens"
    return None if 0 < key.k <= MAX_ROW_K else f"the row kernel takes k up to {MAX_ROW_K}"


def _small_illegal(plan: Plan, key: Key) -> str | None:
    if plan.block_m not in (8, 16, 32, 64) or plan.block_n != SMALL_ROWS or not 1 <= plan.chunks <= 12:
        return f"the small kernel takes 8 to 64 tokens, {SMALL_ROWS} weight rows and 1 to 12 chunks"
    if plan.chunks * (plan.block_m + SMALL_ROWS * key.terms) > 400:
        return "weights and tokens do not fit the registers"
    if plan.splits != ceil(key.k, plan.warps * plan.chunks * 32):
        return "splits must cover K"
    return None


def _tile_illegal(plan: Plan, key: Key) -> str | None:
    if (plan.block_m, plan.block_n) not in TILES:
        return f"tiles are {', '.join(f'{m}x{n}' for m, n in TILES)}"
    if key.terms == 3 and plan.block_n > 64:
        return "three parts take tiles of 32 or 64 weight rows"
    if plan.stages < 2 or stage_bytes(plan, key.terms) * plan.stages + 2048 > SHARED_MEMORY:
        return "the stages do not fit shared memory"
    if plan.splits > ceil(key.k, STEP):
        return "a split would be empty"
    return None


@lru_cache(maxsize=4096)
def choose(key: Key) -> Plan:
    """The measured plan of a known shape, else the analytic choice."""
    measured = _measured(key)
    return analytic(key) if measured is None else measured


def _measured(key: Key) -> Plan | None:
    """Exact on GPU, n and k; of the measured token counts the smallest that is at least m."""
    if not key.aligned or key.terms != 2:
        return None
    rows = table(key.gpu).get((key.n, key.k), ())
    for m, plan in rows:
        if key.m <= m and is_legal(plan, key) is None:
            return plan
    return None


@lru_cache(maxsize=None)
def table(gpu: str) -> dict[tuple[int, int], tuple[tuple[int, Plan], ...]]:
    """(n, k) -> measured (m, plan), m ascending; empty for a GPU without a file."""
    path = Path(__file__).parent / "configs" / f"{gpu.replace(' ', '_')}.json"
    if not path.exists():
        return {}
    return {
        (entry["n"], entry["k"]): tuple((row["m"], Plan(**row["plan"])) for row in entry["plans"])
        for entry in json.loads(path.read_text(encoding="utf-8"))
    }


def dump(entries: dict[tuple[int, int], dict[int, tuple[Plan, float]]]) -> str:
    """The text of a table file from (n, k) -> {m: (plan, microseconds)}."""
    defaults = asdict(Plan("row", 1, 1))

    def brief(plan: Plan) -> dict[str, Any]:
        keep = ("kernel", "block_m", "block_n")
        return {k: v for k, v in asdict(plan).items() if k in keep or v != defaults[k]}

    shapes = []
    for (n, k), plans in sorted(entries.items()):
        rows = [
            {"m": m, "time_us": round(us, 2), "plan": brief(plan)} for m, (plan, us) in sorted(plans.items())
        ]
        lines = ",\n    ".join(map(json.dumps, rows))
        shapes.append(f'  {{"n": {n}, "k": {k}, "plans": [\n    {lines}\n  ]}}')
    return "[\n" + ",\n".join(shapes) + "\n]\n"


def analytic(key: Key) -> Plan:
    """The plan with the least estimated time among those that can run the call."""
    plans = [plan for plan in candidates(key) if is_legal(plan, key) is None]
    return min(plans, key=lambda plan: estimate_us(plan, key)) if plans else _portable(key)


def candidates(key: Key) -> list[Plan]:
    """Plans worth estimating for SM90."""
    if not key.sm90 or key.m == 0:
        return []
    plans: list[Plan] = []
    if key.m <= 2:
        # Two rows a program and eight warps: 1.73 to 1.76 us in four runs (192x4096, m = 1), where one row and four
        # warps took 1.66 in two runs and 4.2 in another.
        plans.append(Plan("row", power_of_two(key.m), 2, warps=8))
    if key.m <= 64:
        block = max(8, power_of_two(key.m))
        for block_m in {block, max(8, block // 2)}:
            for chunks in (1, 2, 3, 4, 6):
                splits = ceil(key.k, 8 * chunks * 32)
                plans.append(Plan("small", block_m, SMALL_ROWS, splits, 8, chunks))
    for block_m, block_n in TILES:
        tiles = ceil(key.m, block_m) * ceil(key.n, block_n)
        for target in (1, key.sms // 2, key.sms * 3 // 4, key.sms, 2 * key.sms):
            splits = max(1, min(target // tiles, ceil(key.k, STEP) // 2, MAX_SPLITS))
            plan = Plan("tile", block_m, block_n, splits, 4 if block_m == 64 else 8)
            plans.append(Plan(**{**asdict(plan), "stages": _stages(plan, key.terms)}))
    return plans


def _stages(plan: Plan, terms: int) -> int:
    """As many stages as fit, up to 8; half of that for tiles of 64 tokens, so that two CTAs share a multiprocessor."""
    size = stage_bytes(plan, terms)
    return max(
        2, min(8, (SHARED_MEMORY // (2 if plan.block_m == 64 and plan.block_n <= 64 else 1) - 2048) // size)
    )


def estimate_us(plan: Plan, key: Key) -> float:
    """A model of the time on an H100 or H200; the constants are fitted to `configs/NVIDIA_H200.json`'s measurements."""
    weight_us = key.terms * key.n * key.k * 2 / 4.2e6
    if plan.kernel == "row":
        return max(1.6 + key.m * key.n * key.k * 6e-7 / key.sms, weight_us + 1.0)
    partials_us = 0.5 + plan.splits * key.m * key.n * 8 / 2.0e6 if plan.splits > 1 else 0.0
    if plan.kernel == "small":
        ctas = ceil(key.n, SMALL_ROWS) * ceil(key.m, plan.block_m) * plan.splits
        waves = ceil(ctas, key.sms)
        bytes_cta = (key.terms * SMALL_ROWS + plan.block_m) * plan.warps * plan.chunks * 64
        return max(1.3 + waves * bytes_cta / 70e3 + partials_us, weight_us + 1.5)
    tiles = ceil(key.m, plan.block_m) * ceil(key.n, plan.block_n) * plan.splits
    steps = ceil(ceil(key.k, STEP), plan.splits)
    flops = 2.0 * plan.block_m * key.terms * plan.block_n * STEP
    rate = 6.0e6 if plan.block_n == 128 and plan.block_m == 128 else 5.7e6 if plan.block_m == 128 else 5.2e6
    step_us = max(flops / rate, stage_bytes(plan, key.terms) / 130e3)
    waves = ceil(tiles, key.sms)
    epilogue_us = plan.block_m * plan.block_n * 4 / 40e3
    return max(2.0 + waves * (0.3 + steps * step_us + epilogue_us) + partials_us, weight_us + 2.0)


def _portable(key: Key) -> Plan:
    """The kernel that takes anything: blocks of 64 tokens, split until every multiprocessor has two programs."""
    block_m = min(64, max(16, power_of_two(key.m)))
    block_n = 64 if key.n > 32 else 32
    tiles = ceil(max(key.m, 1), block_m) * ceil(key.n, block_n)
    splits = max(1, min(2 * key.sms // tiles, ceil(key.k, 4 * BLOCK_K), MAX_SPLITS))
    return Plan("block", block_m, block_n, splits, 8 if block_m * block_n == 4096 else 4)
