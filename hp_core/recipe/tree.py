"""The recipe as a tree of nodes that remember where they came from; read from YAML or from plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

from hp_core.errors import PlanError
from hp_core.recipe.values import shorten, show

DEPTH = 32  # of nesting; a recipe needs about eight levels
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}

Scalar = None | bool | int | float | str


@attrs.frozen(kw_only=True)
class Node:
    """A value of the recipe: ``where`` it was written, and the folder that relative paths in it start from."""

    value: Scalar | list[Node] | dict[str, Node]
    where: str
    base: Path

    def plain(self) -> Any:
        """Return the value as plain lists, dicts and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def children(self) -> list[tuple[str | int, Node]]:
        """Return the members of a mapping or list with their keys or indices; nothing of a scalar."""
        if isinstance(self.value, dict):
            return list(self.value.items())
        return list(enumerate(self.value)) if isinstance(self.value, list) else []

    def find(self, path: str) -> Node:
        """Return the node at a dotted path, or the deepest one above it that exists."""
        found = self
        for part in filter(None, path.split(".")):
            child = _child(found.value, part)
            if child is None:
                break
            found = child
        return found


def _child(value: Any, part: str) -> Node | None:
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and part.isdecimal() and len(part) < 9 and int(part) < len(value):
        return value[int(part)]
    return None


def join(path: str, key: object) -> str:
    """Return the dotted path of ``key`` below ``path``."""
    name = shorten(str(key), 60)
    return f"{path}.{name}" if path else name


def scalar(text: str) -> Scalar:
    """Return what a plain scalar means in YAML 1.2's core schema: ``off`` and ``1:30`` are strings, ``1e-3`` is a number.

    ``ValueError`` if an integer does not fit into 64 bits.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _integer(text: str) -> int:
    digits = text.lstrip("+-")
    if len(digits) > 24:
        raise ValueError("an integer of at most 64 bits")
    return _fitting(int(text, 0) if digits[:2] in ("0x", "0o") else int(text))


def _fitting(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise ValueError("an integer of at most 64 bits")
    return value


def parse_yaml(text: str, *, where: Callable[[int], str], base: Path, path: str = "") -> Node:
    """Return the tree of one YAML document; ``where`` names a place from its line (from 1), ``path`` is the root's own.

    HP511 if it is not YAML, or uses tags, anchors or several documents; HP517 for a key that occurs twice.
    """
    builder = _Builder(where=where, base=base, path=path)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.add(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise _malformed(str(what), where(mark.line + 1 if mark else 1)) from error
    except (
        ValueError,
        OverflowError,
    ) as error:  # PyYAML lets "\UFFFFFFFF" and %YAML 1.<5,000 digits> through to int() and chr()
        raise _malformed("a number or an escape is out of range", where(1)) from error
    return builder.root or Node(value=None, where=where(1), base=base)


def _malformed(what: str, where: str, *, expected: str = "", fix: str = "") -> PlanError:
    return PlanError("HP511", f"not valid YAML: {what}", expected=expected, where=where, fix=fix)


@attrs.define
class _Open:
    """A list or mapping that is being read, and the key that waits for its value."""

    node: Node
    path: str
    key: str | None = None
    line: int = 0


@attrs.define(kw_only=True)
class _Builder:
    """Builds the tree from parser events without recursion, so that no nesting can exhaust the stack."""

    where: Callable[[int], str]
    base: Path
    path: str
    root: Node | None = None
    open: list[_Open] = attrs.field(factory=list)

    def add(self, event: yaml.Event) -> None:
        assert event.start_mark is not None
        line = event.start_mark.line + 1
        if isinstance(event, yaml.NodeEvent):
            self._check(event, line)
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._start([], line)
        elif isinstance(event, yaml.MappingStartEvent):
            self._start({}, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            self.open.pop()

    def _check(self, event: yaml.NodeEvent, line: int) -> None:
        if event.anchor is not None:
            raise _malformed("anchors and aliases are not supported", self.where(line), fix="write the value out")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _malformed(f"the tag {tag} is not supported", self.where(line), fix="write the value without a tag")
        if self.root is not None and not self.open:
            raise _malformed("a second document starts here", self.where(line), expected="one document")

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        if not _encodable(event.value):
            raise _malformed("a string holds half of a surrogate pair", self.where(line))
        if self.open and isinstance(self.open[-1].node.value, dict) and self.open[-1].key is None:
            self._key(event.value, line)
            return
        plain = event.style is None
        try:
            value = scalar(event.value) if plain else event.value
        except ValueError as error:
            path = self._path()
            raise PlanError("HP514", f"{path} is {show(event.value)}", expected=str(error), where=self.where(line)) from error
        self._place(value, line)

    def _key(self, key: str, line: int) -> None:
        top = self.open[-1]
        assert isinstance(top.node.value, dict)
        if key in top.node.value:
            first = top.node.value[key].where
            raise PlanError(
                "HP517",
                f"the key '{join(top.path, key)}' occurs twice, first at {first}",
                where=self.where(line),
                fix="remove one of them",
            )
        top.key, top.line = key, line

    def _start(self, value: list[Node] | dict[str, Node], line: int) -> None:
        if self.open and isinstance(self.open[-1].node.value, dict) and self.open[-1].key is None:
            raise _malformed("a key is a list or a mapping", self.where(line), expected="a string")
        if len(self.open) >= DEPTH:
            raise _malformed(f"nested deeper than {DEPTH} levels", self.where(line))
        path = self._path()
        self.open.append(_Open(self._place(value, line), path))

    def _path(self) -> str:
        if not self.open:
            return self.path
        top = self.open[-1]
        return join(top.path, top.key if top.key is not None else len(top.node.value))  # type: ignore[arg-type]

    def _place(self, value: Any, line: int) -> Node:
        """Put a value where the open collection expects it; a member of a mapping lies where its key does."""
        top = self.open[-1] if self.open else None
        node = Node(value=value, where=self.where(top.line if top and top.key is not None else line), base=self.base)
        if top is None:
            self.root = node
        elif isinstance(top.node.value, dict):
            assert top.key is not None
            top.node.value[top.key], top.key = node, None
        elif isinstance(top.node.value, list):
            top.node.value.append(node)
        return node


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def in_recipe(path: str) -> str:
    """Return the place of a dotted path in a recipe that lies in no file."""
    return f"recipe: {path}" if path else "recipe"


def node_of(data: Any, *, base: Path, path: str = "", where: Callable[[str], str] = in_recipe) -> Node:
    """Return the tree of plain data (dicts, lists, tuples, scalars, paths); ``where`` names a place from its dotted path.

    HP511 if it is nested too deeply, HP513 if it holds anything else or a key that is not a string.
    """
    place = where(path)
    if path.count(".") > DEPTH:
        raise PlanError("HP511", f"nested deeper than {DEPTH} levels", where=place)
    if isinstance(data, Mapping):
        members = {_text_key(key, path=path, where=place): value for key, value in data.items()}
        inner = {key: node_of(value, base=base, path=join(path, key), where=where) for key, value in members.items()}
        return Node(value=inner, where=place, base=base)
    if isinstance(data, (list, tuple)):
        items = [node_of(item, base=base, path=join(path, index), where=where) for index, item in enumerate(data)]
        return Node(value=items, where=place, base=base)
    return Node(value=_plain_scalar(data, path=path, where=place), where=place, base=base)


def _text_key(key: Any, *, path: str, where: str) -> str:
    if not isinstance(key, str) or not _encodable(key):
        raise PlanError("HP513", f"a key of {path or 'the recipe'} is {show(key)}", expected="a string", where=where)
    return key


def _plain_scalar(data: Any, *, path: str, where: str) -> Scalar:
    if isinstance(data, Path):
        return str(data)
    if isinstance(data, str) and not _encodable(data):
        raise PlanError("HP514", f"{path} holds half of a surrogate pair", expected="text", where=where)
    if data is None or isinstance(data, (bool, float, str)):
        return data
    if not isinstance(data, int):
        raise PlanError("HP513", f"{path or 'the recipe'} is of type {type(data).__name__}", expected="plain data", where=where)
    try:
        return _fitting(data)
    except ValueError as error:
        raise PlanError("HP514", f"{path} has {data.bit_length()} bits", expected=str(error), where=where) from error
