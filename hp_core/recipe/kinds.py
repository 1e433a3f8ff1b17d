"""The kinds of value a schema class may ask for, how each is called in an error, and which plain values fit it."""

from __future__ import annotations

import collections.abc
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from hp_core.contracts.placement import Placement

_SCALARS: dict[Any, tuple[str, str]] = {  # kind -> (one, many)
    bool: ("true or false", "true or false values"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a path", "paths"),
    type(None): ("null", "nulls"),
    Any: ("anything", "anything"),
}
EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")  # YAML 1.1 readers leave 1e-3 a string


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the kind alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def is_list(kind: Any) -> bool:
    """Whether the kind is a list or tuple of something."""
    return typing.get_origin(kind) in (tuple, list, collections.abc.Sequence)


def is_mapping(kind: Any) -> bool:
    """Whether the kind is a mapping with free keys."""
    return typing.get_origin(kind) in (dict, Mapping, collections.abc.Mapping)


def describe(kind: Any) -> str:
    """Return what an error or a table calls the kind: ``an integer``, ``one of off, full``, ``a list of strings``."""
    if is_placement(kind):
        return "shard(N), replicate or partial"
    members = alternatives(kind)
    if len(members) > 1:
        return " or ".join(describe(member) for member in sorted(members, key=lambda member: member is type(None)))
    if typing.get_origin(kind) is Literal:
        words = [str(choice) for choice in typing.get_args(kind)]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if is_list(kind):
        return _describe_list(typing.get_args(kind))
    return "a mapping" if is_mapping(kind) or attrs.has(kind) else _SCALARS[kind][0]


def _describe_list(members: tuple[Any, ...]) -> str:
    if len(members) == 2 and members[1] is not Ellipsis:
        return f"a list of 2 {_many(members[0])}"
    if len(members) > 2:
        return f"a list of {len(members)} values"
    return f"a list of {_many(members[0])}"


def _many(kind: Any) -> str:
    members = alternatives(kind)
    if len(members) > 1:
        return " or ".join(_many(member) for member in members)
    return _SCALARS[kind][1] if kind in _SCALARS else "mappings" if is_mapping(kind) or attrs.has(kind) else "values"


def kind_of(value: Any) -> str:
    """Return what a plain value is: ``an integer``, ``a string``, ``a boolean``, ``a list``, ``a mapping``."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else _SCALARS[type(value)][0]


def fits(value: Any, kind: Any) -> bool:
    """Whether the shape of a plain value is that of the kind, its members unseen. A boolean is never a number."""
    if kind is Any:
        return True
    if is_placement(kind):
        return isinstance(value, str)
    if typing.get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(kind))
    if is_list(kind):
        return isinstance(value, list)
    if is_mapping(kind) or attrs.has(kind):
        return isinstance(value, dict)
    if kind is float:
        return type(value) in (int, float) or (isinstance(value, str) and EXPONENT.fullmatch(value) is not None)
    return type(value) is (str if kind is Path else kind)


def supported(kind: Any) -> bool:
    """Whether a schema class may have a field of this kind."""
    members = alternatives(kind)
    if is_placement(kind):
        return True
    if len(members) > 1:
        return all(supported(member) for member in members)
    if typing.get_origin(kind) is Literal:
        return True
    if is_mapping(kind):
        key, inner = typing.get_args(kind)
        return (key is str or typing.get_origin(key) is Literal) and supported(inner)
    if is_list(kind):
        return all(member is Ellipsis or supported(member) for member in typing.get_args(kind))
    return kind in _SCALARS or attrs.has(kind)


def is_placement(kind: Any) -> bool:
    """Whether the kind is a placement, which a recipe writes as text."""
    return set(alternatives(kind)) == set(typing.get_args(Placement))
