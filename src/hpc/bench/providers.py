"""What the bench compares: a named way to compute an operator's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpc.common.operator import Tolerance


class CannotRun(RuntimeError):
    """Raised by ``prepare`` when a provider does not support a case; the message goes into the row."""


def always_available() -> str | None:
    """The answer of a provider that needs nothing beyond the library."""
    return None


BOUND = "bound: "  # begins the note of a provider that is a yardstick, not a rival


@dataclass(frozen=True)
class Provider:
    """One implementation of an operator.

    Attributes:
        name: as shown in tables. The library's own begin with "hpc": "hpc" is what users get by default,
            "hpc/static" and the like are its other paths. Everything else is a rival.
        prepare: ``prepare(inputs)`` does all that users do once and not per call (task maps, workspaces,
            layouts, compilation) and returns the call to time, which takes nothing and returns the result
            tensor. The call must not synchronise with the host. May raise ``CannotRun``.
        available: returns why the provider cannot run on this machine, or None if it can.
        tolerance: error limit of a rival of another precision, or a function of the inputs; None means the
            operator's own.
        note: one line for the report, such as what differs from the operator's inputs. One that begins with `BOUND`
            marks what does less than the operator: shown beside it, but no rival.
    """

    name: str
    prepare: Callable[[Any], Callable[[], torch.Tensor]]
    available: Callable[[], str | None] = always_available
    tolerance: Tolerance | Callable[[Any], Tolerance] | None = None
    note: str = ""

    def limits(self, inputs: Any, default: Tolerance) -> Tolerance:
        """Error limits for these inputs; ``default`` is the operator's."""
        if self.tolerance is None:
            return default
        return self.tolerance(inputs) if callable(self.tolerance) else self.tolerance

    @property
    def own(self) -> bool:
        """True for this library's paths."""
        return is_own(self.name)


def is_own(name: str) -> bool:
    """True for the name of one of this library's paths: ``hpc`` or ``hpc/...``."""
    return name == "hpc" or name.startswith("hpc/")
