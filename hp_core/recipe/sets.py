"""``--set a.b=value``: values from the command line, read and typed like those of the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from hp_core.errors import PlanError
from hp_core.recipe.tree import Node, join, parse_yaml
from hp_core.recipe.values import counted, shorten, show

_FORM = "--set KEY=VALUE, such as --set mesh.tp=2"


def apply_sets(root: Node, *, sets: Sequence[str]) -> Node:
    """Return the tree with each ``a.b=value`` put in, in order; the value is YAML, an empty one is null.

    A relative path in a value starts from the working directory. HP518 for a malformed argument or a key below a value that
    has no keys.
    """
    for text in sets:
        key, separator, value = text.partition("=")
        where = shorten(f"--set {text}", 80)
        if not separator or not all(key.split(".")):
            raise PlanError("HP518", f"{show(text)} is not a key and its value", expected=_FORM)
        node = parse_yaml(value, where=lambda _, where=where: where, base=Path.cwd(), path=key)  # type: ignore[misc]
        root = _put(root, key.split("."), node, path="")
    return root


def _put(parent: Node, keys: list[str], node: Node, *, path: str) -> Node:
    """Return ``parent`` with ``node`` at ``keys`` below it; what was null or absent on the way becomes a mapping."""
    if not keys:
        return node
    key, inner = keys[0], join(path, keys[0])
    if isinstance(parent.value, list):
        if not key.isdecimal() or len(key) > 8 or int(key) >= len(parent.value):
            members = counted(len(parent.value), "member")
            raise PlanError("HP518", f"{path} has {members}, none called {show(key)}", where=node.where)
        items = [_put(item, keys[1:], node, path=inner) if i == int(key) else item for i, item in enumerate(parent.value)]
        return attrs.evolve(parent, value=items)
    if parent.value is not None and not isinstance(parent.value, dict):
        raise PlanError("HP518", f"{path} is {show(parent.value)}, which has no key {show(key)}", where=node.where)
    known = parent.value or {}
    child = known.get(key) or Node(value=None, where=node.where, base=node.base)
    return attrs.evolve(parent, value=known | {key: _put(child, keys[1:], node, path=inner)})
