"""Legal values: the exception that says what is wrong with one, validators and converters for schema classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hp_core.contracts.placement import Partial, Placement, Replicate, Shard

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}  # short form -> name


class IllegalValueError(ValueError):
    """A value of the right type that is not legal: ``key`` of the class being built, the value, what was expected, the fix.

    The loader turns it into an :class:`hp_core.errors.PlanError` with the recipe's path and line. A schema class of a plugin
    may raise it, or a plain ``ValueError`` whose text starts with the name of the field it is about.
    """

    def __init__(self, key: str, value: object, *, expected: str, fix: str = "", code: str = "HP514") -> None:
        super().__init__(f"{key} is {show(value)}; expected {expected}")
        self.key = key
        self.value = value
        self.expected = expected
        self.fix = fix
        self.code = code


def show(value: object) -> str:
    """Return a value as an error prints it, on one line of at most 60 characters; a collection that is longer by its kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        text = f"[{', '.join(show(item) for item in value[:20])}]" if value else "an empty list"
        return text if len(text) <= 60 and len(value) <= 20 else "a list"
    return shorten(repr(value), 60)


def counted(number: int, noun: str) -> str:
    """Return ``"1 member"``, ``"2 members"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten(text: str, length: int) -> str:
    """Return ``text`` with everything unprintable escaped, cut to ``length`` characters."""
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= length else f"{text[: length - 3]}..."


def at_least(low: int | float) -> Callable[[Any, Any, Any], None]:
    """Return an attrs validator: the number is ``low`` or more."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        if value < low:
            raise IllegalValueError(attribute.name, value, expected=f"{low} or more")

    return check


def degree(_: Any, attribute: Any, value: Any) -> None:
    """Attrs validator: a mesh degree is a positive integer."""
    if type(value) is not int or value < 1:
        raise IllegalValueError(attribute.name, value, expected="a positive integer", code="HP503")


def degree_or_fill(_: Any, attribute: Any, value: Any) -> None:
    """Attrs validator: a positive integer, or -1 to take what the other degrees leave."""
    if type(value) is not int or (value < 1 and value != -1):
        raise IllegalValueError(attribute.name, value, expected="a positive integer, or -1 to fill the mesh", code="HP503")


def filled(_: Any, attribute: Any, value: Any) -> None:
    """Attrs validator: a string or list with something in it, and no empty string among its members."""
    if not value or (not isinstance(value, str) and "" in value):
        raise IllegalValueError(attribute.name, value, expected="something that is not empty")


def dtype_name(value: Any) -> Any:
    """Return the full name of a dtype; anything that is not a short form is returned as it is."""
    return DTYPES.get(value, value) if isinstance(value, str) else value


def placement(value: str | Placement) -> Placement:
    """Return the placement written as ``shard(N)``, ``replicate`` or ``partial``; ``ValueError`` for anything else."""
    if not isinstance(value, str):
        return value
    if value == "replicate":
        return Replicate()
    if value == "partial":
        return Partial()
    dim = value.removeprefix("shard(").removesuffix(")")
    if f"shard({dim})" == value and dim.isdecimal() and dim.isascii() and len(dim) < 4:
        return Shard(int(dim))
    raise ValueError("shard(N), replicate or partial")


def placement_text(value: Placement) -> str:
    """Return a placement as the recipe writes it; the inverse of :func:`placement`."""
    return str(value).lower()
