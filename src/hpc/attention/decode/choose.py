"""What a decode call is (`Key`), how it may be run (`Plan`), and the choice between plans.

Pure Python on integers and flags; nothing here touches a tensor or a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from hpc.attention.decode.plan import NUM_VARIANTS
from hpc.common import plan_table

CONFIGS = Path(__file__).parent / "configs"  # tables that `hpc tune` wrote

TMA_HEAD_DIMS = (64, 128, 256)
TMA_PAGE_SIZES = (16, 32, 64, 128, 256)
SHARED_MEMORY = 227 * 1024  # bytes a CTA of SM90 may use
IN_FLIGHT = 96 * 1024  # bytes of K and V under way in one SM
RESERVED = 2304  # of it a compute warp, for exchanges between warps; barriers included
ROWS_FROM = 17  # query rows a KV head from which the kernel with rows on the M side is taken


@dataclass(frozen=True)
class Key:
    """Everything about a call that may change its plan."""

    sm90: bool
    sms: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    page_size: int
    max_pages: int
    num_new_tokens: int
    quant_type: int  # -1 for BF16 caches
    window: bool = False
    logit_cap: bool = False
    sinks: bool = False
    return_lse: bool = False
    dynamic: bool = True
    new_kv_included: bool = True
    splitk: bool = True
    batch_invariant: bool = False
    tma: bool = True  # base addresses and strides of the caches are multiples of 16 bytes
    gpu: str = ""  # name, for the table of measured plans; empty: the analytic choice

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows a kv head: new tokens times heads of the group."""
        return self.num_new_tokens * self.group

    @property
    def fp8(self) -> bool:
        return self.quant_type >= 0


@dataclass(frozen=True)
class Plan:
    """One way to run a call. `ctas_per_sm` also picks the schedule variant of the task map. `kernel`, of the backend
    sm90: "tokens" has tokens on the M side of the products (`hopper`), "rows" 64 query rows (`hopper_rows`)."""

    backend: Literal["sm90", "portable"]
    ctas_per_sm: int
    block_rows: int
    warps_tok: int
    warps_row: int
    stages: int
    max_registers: int | None = None
    num_splits: int = 1
    min_chunk: int = 1
    kernel: Literal["tokens", "rows"] = "tokens"

    @property
    def variant(self) -> int:
        return self.ctas_per_sm - 1


def is_legal(plan: Plan, key: Key) -> str | None:
    """None if the plan can run the call, else the reason why not."""
    if not 1 <= plan.ctas_per_sm <= NUM_VARIANTS:
        return f"the task map holds schedules for 1 to {NUM_VARIANTS} CTAs a multiprocessor"
    if plan.backend == "portable":
        return None if plan.block_rows in (16, 32, 64) else "portable kernels take 16, 32 or 64 rows a CTA"
    if not key.sm90:
        return "the Gluon kernel needs compute capability 9.0"
    if key.head_dim not in TMA_HEAD_DIMS or key.v_dim not in TMA_HEAD_DIMS:
        return "the Gluon kernel takes head dims 64, 128 and 256"
    if key.page_size not in TMA_PAGE_SIZES:
        return "the Gluon kernel takes pages of 16 to 256 tokens"
    if key.quant_type == 0:
        return "scales per token are read by the portable kernel only"
    if not key.tma:
        return "TMA needs caches whose address and strides are multiples of 16 bytes"
    if plan.kernel == "rows":
        return _is_legal_rows(plan, key)
    if plan.block_rows // plan.warps_row % 8 or plan.warps_tok not in (1, 2, 4, 8):
        return "a warp takes multiples of 8 rows and of 16 tokens"
    if plan.warps_tok * plan.warps_row not in (4, 8, 16):
        return "a CTA takes 4, 8 or 16 compute warps"
    reserved = RESERVED * plan.warps_tok * plan.warps_row
    if stage_bytes(key) * max(1, plan.warps_tok // 4) * plan.stages + reserved > SHARED_MEMORY:
        return "the stages do not fit shared memory"
    return None


def _is_legal_rows(plan: Plan, key: Key) -> str | None:
    if max(key.head_dim, key.v_dim) > 128:
        return "the kernel with rows on the M side takes head dims 64 and 128"
    if (plan.ctas_per_sm, plan.block_rows, plan.warps_tok, plan.warps_row) != (1, 64, 1, 4):
        return "the kernel with rows on the M side has one CTA an SM, with four warps of 16 rows"
    if plan.stages < 2:
        return "scores of a step and values of the one before it need two stages"
    if rows_shared_memory(key, plan.stages) > SHARED_MEMORY:
        return "the stages do not fit shared memory"
    return None


def rows_consumers(key: Key) -> int:
    """Warpgroups of 64 query rows in a CTA: they share keys, values and their conversion."""
    return 1 if key.rows <= 64 else 2


def rows_shared_memory(key: Key, stages: int) -> int:
    """Bytes of a CTA: queries, steps of 128 tokens, two of them with V as f16 for FP8, barriers and exchanges."""
    queries = 64 * rows_consumers(key) * key.head_dim * (1 if key.fp8 else 2)
    converted = 2 * 128 * key.v_dim * 2 if key.fp8 else 0
    return queries + stages * 2 * stage_bytes(key) + converted + 2048


def stage_bytes(key: Key) -> int:
    """Shared memory of one 64-token tile of K and V."""
    return 64 * (key.head_dim + key.v_dim) * (1 if key.fp8 else 2)


@lru_cache(maxsize=4096)
def choose(key: Key) -> Plan:
    """The measured plan of a known call, else the analytic choice."""
    return _measured(key) or analytic(key)


def point(key: Key) -> tuple[dict[str, int | bool | str], int]:
    """By what the table is looked up: nothing that the exact size of the scratch is not known by."""
    axes = (
        "q_heads",
        "kv_heads",
        "head_dim",
        "v_dim",
        "page_size",
        "num_new_tokens",
        "quant_type",
        "dynamic",
    )
    return {name: getattr(key, name) for name in axes}, key.batch


def _measured(key: Key) -> Plan | None:
    if not key.gpu or not key.splitk or key.batch_invariant:
        return None
    table = plan_table.load(CONFIGS, key.gpu, key.sms)
    entry = table.find(*point(key)) if table is not None else None
    if entry is None or entry.plan is None:
        return None
    try:
        plan = plan_table.from_fields(Plan, entry.plan)
    except ValueError as error:
        plan_table.refuse(CONFIGS, key.gpu, entry, str(error), "attention.decode")
        return None
    return plan if is_legal(plan, key) is None else None


def analytic(key: Key) -> Plan:
    """The choice without measurements, each number with its reason."""
    plans = (rows_plan(key), tokens_plan(key)) if key.rows >= ROWS_FROM else (tokens_plan(key),)
    return next((plan for plan in plans if is_legal(plan, key) is None), _portable_plan(key))


def tokens_plan(key: Key) -> Plan:
    """Of `hopper`: each group of 16 rows loads and converts K and V anew."""
    rows = min(32, max(8, 1 << (key.rows - 1).bit_length()))
    # Eight rows a warp: the accumulators take head_dim / 4 registers then. Eight compute warps and one CTA an SM leave
    # the fewest chunks to merge; two CTAs of four warps were slower on 16 of 24 targets tried (fp8 64/8 64x4K:
    # 129.9 against 123.6 us), up to 3.3 % faster on the others.
    warps_row = rows // 8
    warps_tok, ctas = 8 // warps_row, 1
    step = max(64, 16 * warps_tok)
    while step > 64 and 2 * step // 64 * stage_bytes(key) + 8 * RESERVED > SHARED_MEMORY:
        warps_tok //= 2
        step = max(64, 16 * warps_tok)
    warps = warps_tok * warps_row
    room = (SHARED_MEMORY // ctas - RESERVED * warps) // (step // 64 * stage_bytes(key))
    # About 96 KiB in flight an SM; more was slower (127.4 against 122.9 us with 192 KiB, fp8 64/8 64x4K).
    wanted = -(-IN_FLIGHT // (ctas * (step // 64) * stage_bytes(key)))
    stages = max(2, min(max(3, wanted), room))
    splits, chunk = static_split(key, ctas)
    return Plan("sm90", ctas, rows, warps_tok, warps_row, stages, registers(warps, ctas), splits, chunk)


def rows_plan(key: Key) -> Plan:
    """Of `hopper_rows`: K and V are read once for all rows of a CTA."""
    stages = max(n for n in range(1, 7) if n <= 2 or rows_shared_memory(key, n) <= SHARED_MEMORY)
    # The consumers take over what producer and converter leave: see `hopper_rows_config`.
    launch_registers = 128 if key.fp8 else 152 if rows_consumers(key) == 1 else 168
    splits, chunk = static_split(key, 1)
    return Plan("sm90", 1, 64, 1, 4, stages, launch_registers, splits, chunk, "rows")


def registers(warps: int, ctas: int) -> int:
    """Registers a thread at launch: the register file over all warps, with four for the producer's warpgroup.

    The compute warps take over what the producer's warpgroup gives up: 216 to 240 a thread.
    """
    return min(168 if warps > 4 else 144, 65536 // (32 * (warps + 4)) // ctas // 8 * 8)


def _portable_plan(key: Key) -> Plan:
    rows = 16 if key.rows <= 16 else 32 if key.rows <= 32 or max(key.head_dim, key.v_dim) > 128 else 64
    splits, chunk = static_split(key, 2)
    return Plan("portable", 2, rows, 4, 1, 2, None, splits, chunk)


def static_split(key: Key, ctas_per_sm: int) -> tuple[int, int]:
    """(chunks a request at most, tiles a chunk at least) of the static path, from shapes alone.

    Enough chunks that the batch fills the machine four times over (lengths are unknown here, most chunks of a mixed
    batch are empty), at most 64; a batch-invariant call splits by the request's own length only.
    """
    if not key.splitk:
        return 1, 1
    if key.batch_invariant:
        return 32, 8
    wanted = -(-4 * key.sms * ctas_per_sm // max(1, key.batch * key.kv_heads))
    return max(1, min(64, wanted)), 8
