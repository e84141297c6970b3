"""The base of a kernel's compile-time facts: a frozen dataclass whose derived sizes are properties."""

from __future__ import annotations

from dataclasses import fields


class KernelFacts:
    """Gives a dataclass (made with `repr=False`) the text by which Triton's cache knows a kernel."""

    def __repr__(self) -> str:
        """Fields and derived values: a changed rule must change the text, or an old kernel would be found."""
        derived = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)}' for n in (*names, *derived))})"
