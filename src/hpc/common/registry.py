"""The list of operators. Adding one takes a folder, a line here and its public names in `hpc/__init__.py`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # it imports torch, and shell completion reads this table
    from hpc.common.operator import Operator

# Operator name -> module with its `OPERATOR`.
OPERATORS: dict[str, str] = {
    "attention.decode": "hpc.attention.decode.cases",
    "attention.prefill": "hpc.attention.prefill.cases",
    "gemm.router": "hpc.gemm.router.cases",
    "gemm.router_topk": "hpc.gemm.router.cases_topk",
    "rope.prologue": "hpc.rope.cases",
    "moe.fused": "hpc.moe.cases",
}


def names() -> list[str]:
    """Names of all operators, in the order of the table."""
    return list(OPERATORS)


def get(name: str) -> Operator:
    """The operator called `name`, for example `attention.decode`."""
    module = OPERATORS.get(name)
    if module is None:
        raise KeyError(f"unknown operator {name!r}; known are: {', '.join(OPERATORS)}")
    return cast("Operator", importlib.import_module(module).OPERATOR)


def load_all() -> dict[str, Operator]:
    """Every operator, by name."""
    return {name: get(name) for name in OPERATORS}
