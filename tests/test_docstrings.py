"""Every public function says what it takes and gives: arguments, shapes, dtypes, units, errors, source."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import hpc

SECTIONS = ("Args:", "Returns:", "Raises:", "Source:")
DTYPE = re.compile(
    r"\b(BF16|bf16|float32|fp32|float8_e4m3fn|float8|int8|int32|int64|bool|uint8|dtype|bytes an element)\b"
)
SHAPE = re.compile(r"\[[^\]]+\]|\bshape|element|one value|scalar", re.IGNORECASE)
LIKEWISE = re.compile(r"\b(as in|as `|likewise|as [a-z_]+[.,;:]|as q\b|of that name|the given ones)")
# An argument whose number has a unit is named by it, or its text states it.
UNITS = {
    "mtp": "token", "window": "token|key", "eps": "mean square", "max_seqlen": "token|length", "max_seqlens": "token",
    "max_seqlens_q": "token", "max_num_batch": "request|batch", "min_process_len": "token", "page_size": "token|size",
    "seconds": "second",
}  # fmt: skip

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value for name in sorted(hpc.__all__) if inspect.isfunction(value := getattr(hpc, name))
}
EVERY = pytest.mark.parametrize("name", FUNCTIONS)


def sections(name: str) -> dict[str, str]:
    """Section heading -> its text; "" is what stands before the first."""
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    parts = re.split(rf"^({'|'.join(SECTIONS)})", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def arguments(name: str) -> dict[str, str]:
    """Argument -> the text that describes it. One entry may describe several, "kcache, vcache: ...", and a line may
    hold two, "x: ...; x_scale: ..."."""
    described: dict[str, str] = {}
    text = sections(name).get("Args:", "").strip("\n")
    for entry in re.split(r"\n(?= {4}\w)|; (?=[a-z]\w*: )", f"\n{text}"):
        names, colon, text = entry.strip().partition(":")
        if colon:
            described.update({word.strip(): " ".join(text.split()) for word in names.split(",")})
    return described


def tensors(name: str) -> list[str]:
    """Arguments that are, or may be, tensors."""
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    return [p.name for p in parameters if "Tensor" in str(p.annotation)]


def test_public_functions_are_found() -> None:
    assert len(FUNCTIONS) >= 10 and "attention_decode_bf16" in FUNCTIONS


@pytest.mark.parametrize("module", ["hpc.bench", "hpc.testing", "hpc.common.errors", "hpc.common.plan_table"])
def test_helpers_are_described_and_annotated(module: str) -> None:
    """The public helpers around the operators: every function and class."""
    found = importlib.import_module(module)
    for name in getattr(found, "__all__", [n for n in vars(found) if not n.startswith("_")]):
        value = getattr(found, name)
        if not (inspect.isfunction(value) or inspect.isclass(value)) or not value.__module__.startswith(
            "hpc"
        ):
            continue
        text = (value.__doc__ or "").strip()
        assert text and not text.startswith(f"{name}("), (
            f"{module}.{name}: no docstring but a dataclass's own"
        )
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            bare = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
            assert not bare and signature.return_annotation is not inspect.Signature.empty, f"{name}: {bare}"


@EVERY
def test_docstring_has_its_sections(name: str) -> None:
    found = sections(name)
    assert found[""].strip(), "no summary"
    needed = [section for section in SECTIONS if section != "Returns:" or _returns(name)]
    missing = [section for section in needed if not found.get(section, "").strip()]
    assert not missing, f"{name}: {missing}"


def _returns(name: str) -> bool:
    return str(inspect.signature(FUNCTIONS[name]).return_annotation) != "None"


@EVERY
def test_every_argument_is_described(name: str) -> None:
    described = arguments(name)
    missing = [p for p in inspect.signature(FUNCTIONS[name]).parameters if not described.get(p)]
    assert not missing, f"{name}: Args does not describe {missing}"
    gone = set(described) - set(inspect.signature(FUNCTIONS[name]).parameters)
    assert not gone, f"{name}: Args describes {gone}, which it does not take"


@EVERY
def test_tensors_have_shape_and_dtype(name: str) -> None:
    """In the argument's own text, or by "as in" a function where it has them."""
    described = arguments(name)
    for argument in tensors(name):
        text = described.get(argument, "")
        if LIKEWISE.search(text) or "accepted for compatibility" in text or "not read" in text:
            continue
        assert SHAPE.search(text), f"{name}: no shape of {argument}: {text!r}"
        assert DTYPE.search(text), f"{name}: no dtype of {argument}: {text!r}"


@EVERY
def test_returned_tensors_have_shape_and_dtype(name: str) -> None:
    if "Tensor" in str(inspect.signature(FUNCTIONS[name]).return_annotation):
        text = sections(name)["Returns:"]
        assert LIKEWISE.search(text) or (SHAPE.search(text) and DTYPE.search(text)), f"{name}: {text!r}"


@EVERY
def test_numbers_have_units(name: str) -> None:
    described = arguments(name)
    for argument, unit in UNITS.items():
        text = described.get(argument)
        if text is not None and not LIKEWISE.search(text):
            assert re.search(unit, text), f"{name}: no unit of {argument}: {text!r}"


@EVERY
def test_errors_are_named(name: str) -> None:
    """The exceptions that checks raise, by name."""
    text = sections(name)["Raises:"]
    assert re.search(r"\b(InvalidArgument|KeyError|UnsupportedDevice)\b", text), f"{name}: {text!r}"


@EVERY
def test_source_names_a_method(name: str) -> None:
    """A year, a function that names one, or a statement that there is none."""
    text = sections(name)["Source:"]
    assert re.search(r"\b(19|20)\d\d\b|`[a-z_ 0-9]+`|\bown\b|interface", text), f"{name}: {text!r}"
