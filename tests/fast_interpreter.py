"""Triton's interpreter without work that it repeats: twice as fast on the prologue's kernels, same results.

Three internals of Triton 3.6 are replaced for the tests of this process. Where Triton has changed, nothing happens.

- Every call of a device function patches the whole of `triton.language` again; inside a launch that is done already.
- A tuple type spells out its name when it is made, for every shape of every value; now when somebody asks.
- The table of numpy types is built anew for each value.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


class _Nothing:
    """The scope of a nested call, with nothing to restore."""

    def restore(self) -> None:
        return None


def _patch_once(interpreter: Any, language: Any) -> None:
    original = interpreter._patch_lang
    patched: set[int] = set()  # modules, while a launch runs

    @functools.lru_cache(maxsize=None)
    def modules(fn: Any) -> frozenset[int]:
        known = (language, language.core)
        return frozenset(
            id(each) for each in fn.__globals__.values() if inspect.ismodule(each) and each in known
        )

    def patch(fn: Any) -> Any:
        if patched and modules(fn) <= patched:
            return _Nothing()
        scope, outermost = original(fn), not patched
        patched.update(modules(fn))
        if outermost:
            restore = scope.restore

            def done() -> None:
                patched.clear()
                restore()

            scope.restore = done
        return scope

    interpreter._patch_lang = patch


def _name_when_asked(tuple_type: Any) -> None:
    def init(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def name(self: Any) -> str:
        pairs = zip(self.fields, self.types, strict=True)
        return "[" + ",".join(f"{field}:{each}" for field, each in pairs) + "]"

    tuple_type.__init__, tuple_type.name = init, property(name)


def _scalar_types_once(interpreter: Any, language: Any) -> None:
    original = interpreter._get_np_dtype
    of_scalar = functools.lru_cache(maxsize=None)(original)

    def np_dtype(tt_dtype: Any) -> Any:
        scalar = tt_dtype.element_ty if isinstance(tt_dtype, language.block_type) else tt_dtype
        return original(scalar) if isinstance(scalar, language.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = np_dtype


def install() -> None:
    """Replace them, in a process whose kernels are interpreted."""
    try:
        import triton
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    if not triton.__version__.startswith("3.6."):
        return
    _patch_once(interpreter, language)
    _name_when_asked(language.core.tuple_type)
    _scalar_types_once(interpreter, language)
