"""Converters of frozen declarations, typed so that a checker accepts any iterable or mapping for a field.

They refuse (HP402) what Python would take apart in silence: a text is no list of its letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hp_core.errors import DeclarationError


def as_tuple(value: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values as a tuple; HP402 for a single text and for what holds no values."""
    if isinstance(value, str):
        raise DeclarationError("HP402", f"the text {value!r} stands for a list", expected=f"({value!r},)")
    if not isinstance(value, Iterable):
        raise DeclarationError("HP402", f"{_shown(value)} stands for a list", expected="a tuple or a list")
    return tuple(value)


def as_patterns(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return the patterns as a tuple; a text is one pattern."""
    return (value,) if isinstance(value, str) else as_tuple(value)


def as_dict(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy, so that nobody else can change it; HP402 for what is no mapping."""
    if not isinstance(value, Mapping):
        raise DeclarationError("HP402", f"{_shown(value)} stands for a mapping", expected="a dict")
    return dict(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
