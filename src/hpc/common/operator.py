"""What an operator offers to the tests, `hpc check`, `hpc bench` and `hpc warmup`.

The `cases.py` of an operator's folder holds one object `OPERATOR` with the attributes of `Operator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch

if TYPE_CHECKING:
    from hpc.bench.providers import Provider

# The runs that a case can be part of.
TAGS = frozenset({"interpret", "gpu", "bench", "target", "demo"})

# Called as progress(label, done, total) after each step of a long job.
Progress: TypeAlias = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Case:
    """One named input of an operator; `params` is the operator's own frozen dataclass."""

    name: str
    tags: frozenset[str] = field(default_factory=frozenset)
    params: Any = None

    def __post_init__(self) -> None:
        unknown = self.tags - TAGS
        if unknown:
            raise ValueError(f"case {self.name!r}: unknown tags {sorted(unknown)}; known are {sorted(TAGS)}")


@dataclass(frozen=True)
class Tolerance:
    """Largest error allowed against the float64 reference.

    `rms`: root mean square of the error / root mean square of the reference.
    `max`: largest absolute error / largest absolute reference.
    """

    rms: float
    max: float


@dataclass(frozen=True)
class Floor:
    """The work that no implementation can avoid.

    `bytes` must be read from memory and `flops` computed at the matrix rate `kind` ("bf16" or "fp8"), so
    time = max(bytes / read rate, flops / matrix rate).
    """

    bytes: int
    flops: float
    kind: str


@runtime_checkable
class Operator(Protocol):
    """The interface of one operator."""

    name: str
    """For example `attention.decode`."""
    functions: tuple[str, ...]
    """The public names that belong to it."""

    def cases(self, tag: str) -> list[Case]:
        """Cases that carry `tag`."""
        ...

    def make_inputs(self, case: Case, device: torch.device, seed: int) -> Any:
        """Fresh random inputs; the returned object owns every tensor of the call."""
        ...

    def call(self, inputs: Any) -> torch.Tensor:
        """The public function, eager."""
        ...

    def reference(self, inputs: Any) -> torch.Tensor:
        """The same result in float64 by plain PyTorch, on the inputs' device."""
        ...

    def tolerance(self, case: Case) -> Tolerance:
        """Error allowed for `case`."""
        ...

    def floor(self, case: Case) -> Floor:
        """Unavoidable work of `case`."""
        ...

    def providers(self) -> Mapping[str, Provider]:
        """Implementations that `hpc bench` compares, by name: own paths and rivals that can be imported."""
        ...

    def warmup(self, device: torch.device | str, progress: Progress | None) -> int:
        """Compile every plan that calls on `device` can reach; returns how many were compiled or loaded."""
        ...
