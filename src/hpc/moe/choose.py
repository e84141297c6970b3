"""The plan of a call: the one that `hpc tune` measured on this GPU for its sizes, else the analytic choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpc.common import plan_table
from hpc.moe.plan import Key, Plan, analytic, is_legal, portable_reason

CONFIGS = Path(__file__).parent / "configs"  # tables that `hpc tune` wrote

AXES = ("num_experts", "experts_total", "hidden", "inter", "top_k", "block_scales")


def choose(key: Key) -> Plan:
    """The measured plan of a known call, else the analytic choice."""
    return _measured(key) or analytic(key)


def point(key: Key) -> tuple[dict[str, int | bool | str], int]:
    """By what the table is looked up: shapes and the kind of scales.

    Gates, rounding of their product and BF16 x are no axes: the first two are a few instructions at the end of an item,
    and x is quantised by a launch of its own, so the products run as they do without.
    """
    return {name: getattr(key, name) for name in AXES}, key.num_tokens


def _measured(key: Key) -> Plan | None:
    """The table's plan where its measurement says something about this call."""
    if not key.gpu or portable_reason(key) is not None or key.shared_experts:
        return None  # never searched, and what they add to the products could turn the order of plans
    table = plan_table.load(CONFIGS, key.gpu, key.sms)
    entry = table.find(*point(key)) if table is not None else None
    if entry is None or entry.plan is None:
        return None
    # It beat the analytic plan of its own size. Where fewer tokens, or y of every pair, have another, nothing is known.
    there = replace(key, num_tokens=entry.size, combined=True)
    if analytic(there) != analytic(key):
        return None
    try:
        plan = plan_table.from_fields(Plan, entry.plan)
        why = is_legal(plan, there)
    except ValueError as error:
        why = str(error)
    if why is not None:
        plan_table.refuse(CONFIGS, key.gpu, entry, why, "moe.fused")
        return None
    return plan if is_legal(plan, key) is None else None
