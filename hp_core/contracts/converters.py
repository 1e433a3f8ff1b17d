"""Converters of frozen declarations, typed so that a checker accepts any iterable or mapping for a field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def as_tuple(value: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values as a tuple."""
    return tuple(value)


def as_dict(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy, so that nobody else can change it."""
    return dict(value)
