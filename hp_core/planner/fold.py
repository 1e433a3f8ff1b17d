"""Rows about repeated layers become one row: ``model.layers.{0..93}.self_attn``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|:|$)")


def fold(rows: Iterable[tuple[str, Sequence[str]]]) -> list[tuple[str, int, tuple[str, ...]]]:
    """Return (name, how many, cells) of rows (name, cells), in order of first appearance.

    Rows with equal cells whose names differ in their first index only become one.

    Example::

        fold([("layers.0.mlp", ["x"]), ("layers.1.mlp", ["x"])])  # [("layers.{0..1}.mlp", 2, ("x",))]
    """
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[str, int | None]]] = {}
    for name, cells in rows:
        found = _INDEX.search(name)
        pattern = name if found is None else f"{name[: found.start()]}\0{name[found.end() :]}"
        groups.setdefault((pattern, tuple(cells)), []).append((name, None if found is None else int(found[0])))
    return [(_name(pattern, members), len(members), cells) for (pattern, cells), members in groups.items()]


def _name(pattern: str, members: Sequence[tuple[str, int | None]]) -> str:
    indices = sorted({index for _, index in members if index is not None})
    if len(indices) < 2:
        return members[0][0]
    return pattern.replace("\0", "{" + ",".join(_ranges(indices)) + "}")


def _ranges(indices: Sequence[int]) -> Iterable[str]:
    first = last = indices[0]
    for index in (*indices[1:], None):
        if index == last + 1:
            last += 1
            continue
        yield str(first) if first == last else f"{first}..{last}"
        if index is not None:
            first = last = index
