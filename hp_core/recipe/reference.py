"""The recipe's keys as a table: what the reference page is made of and checked against."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import attrs

from hp_core.recipe.kinds import alternatives, describe, is_list, is_placement
from hp_core.recipe.structure import Field, fields
from hp_core.recipe.tree import join
from hp_core.recipe.unstructure import plain
from hp_core.recipe.values import show

_BULLET = re.compile(r"^- ``(?P<key>[^`]+)``: (?P<text>(?:.+\n?(?:  .+\n?)*))", re.MULTILINE)


@attrs.frozen(kw_only=True)
class Row:
    """One key: its dotted name (``*`` is every member of a list), kind of value, default, and what it means."""

    key: str
    kind: str
    default: str
    meaning: str

    def markdown(self) -> str:
        """Return the row of a Markdown table."""
        return f"| `{self.key}` | {self.kind} | {self.default} | {self.meaning} |"


def rows(cls: type, *, prefix: str) -> tuple[Row, ...]:
    """Return a row per key of a schema class and of the classes below it; meanings come from the docstrings' lists."""
    return tuple(_rows(cls, prefix))


def _rows(cls: type, prefix: str) -> Iterator[Row]:
    meanings = {found["key"]: _sentence(found["text"]) for found in _BULLET.finditer(inspect.getdoc(cls) or "")}
    for field in fields(cls):
        if field.attribute.metadata.get("kind") is Any:
            continue
        key = join(prefix, field.key)
        inner = _inner(field.kind)
        if inner is None or field.kind is not inner:
            yield Row(key=key, kind=describe(field.kind), default=_default(field), meaning=meanings.get(field.key, ""))
        if inner is not None:
            yield from _rows(inner, f"{key}.*" if is_list(_listed(field.kind)) else key)


def _sentence(text: str) -> str:
    words = " ".join(text.split()).replace("``", "`").removesuffix(".")
    return words[:1].upper() + words[1:]


def _listed(kind: Any) -> Any:
    return next((member for member in alternatives(kind) if is_list(member)), kind)


def _inner(kind: Any) -> Any:
    """Return the schema class among the alternatives of a kind, or of the members of its list."""
    if is_placement(kind):
        return None
    members = [item for member in alternatives(kind) for item in (typing.get_args(member) if is_list(member) else (member,))]
    return next((member for member in members if attrs.has(member)), None)


def _default(field: Field) -> str:
    default = field.attribute.default
    if default is attrs.NOTHING:
        return "required"
    factory = getattr(default, "factory", None)
    value = plain(factory() if factory else default)
    if value in ([], {}):
        return f"`{value}`"
    if isinstance(value, dict):  # a mapping that its first member stands for
        return f"`{next(iter(value.values()))}`"
    return f"`{value if isinstance(value, str) else show(value)}`"
