"""Turn a tree of nodes into frozen attrs classes, strictly: nothing unknown, nothing missing, no type bent."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from hp_core.contracts.placement import Placement
from hp_core.errors import DeclarationError, HPError, PlanError, suggest
from hp_core.recipe.kinds import alternatives, describe, fits, is_list, is_mapping, is_placement, kind_of, supported
from hp_core.recipe.tree import Node, join, scalar
from hp_core.recipe.values import IllegalValueError, counted, placement, show

_NO_WORDS: Mapping[str, str] = {}
_BOOLEAN_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


@attrs.frozen(kw_only=True)
class Field:
    """A field of a schema class as the recipe sees it: its key there, and the kind of value it takes."""

    key: str
    kind: Any
    attribute: Any

    @property
    def required(self) -> bool:
        """Whether the recipe must give it."""
        return self.attribute.default is attrs.NOTHING


def fields(cls: type) -> tuple[Field, ...]:
    """Return the fields of a schema class. Metadata may give another ``key`` and the ``kind`` that its converter takes.

    HP402 for a field whose annotation a recipe cannot hold.
    """
    return _fields(cls)


def _read_fields(cls: type) -> tuple[Field, ...]:
    hints = typing.get_type_hints(cls)
    found = []
    for attribute in attrs.fields(cls):
        kind = attribute.metadata.get("kind", hints.get(attribute.name))
        if not supported(kind):
            raise DeclarationError(
                "HP402",
                f"field {attribute.name!r} of {cls.__qualname__} has the type {kind!r}",
                expected="bool, int, float, str, Path, Literal, attrs classes, and unions, tuples and str mappings of them",
            )
        found.append(Field(key=attribute.metadata.get("key", attribute.name), kind=kind, attribute=attribute))
    return tuple(found)


_fields: Callable[[type], tuple[Field, ...]] = functools.cache(_read_fields)  # resolving annotations is slow


def structure(node: Node, kind: Any, *, path: str) -> Any:
    """Return the value of ``node`` as ``kind``; ``path`` is its dotted path.

    Errors carry path and place: HP512 unknown key, HP513 wrong type, HP514 illegal value, HP516 missing key.
    """
    if len(alternatives(kind)) > 1 and not is_placement(kind):
        return _structure_union(node, kind, path)
    if not fits(node.value, kind):
        raise misfit(node, kind, path=path)
    if attrs.has(kind):
        return structure_class(node, kind, path=path)
    if is_list(kind):
        return _structure_list(node, kind, path)
    if is_mapping(kind):
        return _structure_mapping(node, kind, path)
    return _structure_scalar(node, kind, path)


def _structure_union(node: Node, kind: Any, path: str) -> Any:
    for member in alternatives(kind):
        if fits(node.value, member):
            return structure(node, member, path=path)
    raise misfit(node, kind, path=path)


def _structure_mapping(node: Node, kind: Any, path: str) -> dict[str, Any]:
    assert isinstance(node.value, dict)
    keys, inner = typing.get_args(kind)
    known = typing.get_args(keys)
    for key, child in node.value.items():
        if known and key not in known:
            raise unknown_key(key, known, path=path, where=child.where)
    return {key: structure(child, inner, path=join(path, key)) for key, child in node.value.items()}


def _structure_scalar(node: Node, kind: Any, path: str) -> Any:
    if kind is Any:
        _check_finite(node, path)
        return node.plain()
    if is_placement(kind):
        return _structure_placement(node, path)
    if kind is Path:
        return _structure_path(node, path)
    if kind is not float:
        return node.value
    number = float(str(node.value))
    if not math.isfinite(number):
        raise illegal(node, path, expected="a finite number")
    return number


def _structure_placement(node: Node, path: str) -> Placement:
    try:
        return placement(str(node.value))
    except ValueError as error:
        raise illegal(node, path, expected=str(error)) from error


def _structure_path(node: Node, path: str) -> Path:
    text = str(node.value)
    if not text or "\0" in text:
        raise illegal(node, path, expected="a path")
    return node.base / text


def _check_finite(node: Node, path: str) -> None:
    """A value that is not equal to itself can never be compared, stored and found again."""
    if isinstance(node.value, float) and math.isnan(node.value):
        raise illegal(node, path, expected="a number")
    for key, child in node.children():
        _check_finite(child, join(path, key))


def _structure_list(node: Node, kind: Any, path: str) -> Any:
    assert isinstance(node.value, list)
    kinds = typing.get_args(kind)
    if len(kinds) > 1 and kinds[1] is not Ellipsis:
        if len(node.value) != len(kinds):
            raise PlanError(
                "HP514", f"{path} has {counted(len(node.value), 'member')}", expected=describe(kind), where=node.where
            )
    else:
        kinds = (kinds[0],) * len(node.value)
    pairs = enumerate(zip(node.value, kinds, strict=True))
    items = [structure(item, inner, path=join(path, index)) for index, (item, inner) in pairs]
    return items if typing.get_origin(kind) is list else tuple(items)


def structure_class(node: Node, cls: type, *, path: str) -> Any:
    """Return an instance of the attrs class; see :func:`structure` for the errors."""
    assert isinstance(node.value, dict)
    known = {field.key: field for field in fields(cls)}
    for key, child in node.value.items():
        if key not in known:
            raise unknown_key(key, known, path=path, where=child.where, meant=getattr(cls, "meant", {}))
    values = {}
    for key, field in known.items():
        if key in node.value:
            value = structure(node.value[key], field.kind, path=join(path, key))
            values[field.attribute.alias] = _converted(value, field, node=node.value[key], path=join(path, key))
        elif field.required:
            raise missing(join(path, key), field.kind, where=node.where)
    return _construct(cls, values, node=node, path=path)


def _converted(value: Any, field: Field, *, node: Node, path: str) -> Any:
    """Run the field's own converter first, so that what it refuses is told at the field's own line."""
    if not callable(field.attribute.converter):
        return value
    try:
        return field.attribute.converter(value)
    except IllegalValueError as error:
        raise _located(error, node=node, path=path) from error
    except ValueError as error:
        raise illegal(node, path, expected=str(error)) from error


def _construct(cls: type, values: Mapping[str, Any], *, node: Node, path: str) -> Any:
    try:
        return cls(**values)
    except IllegalValueError as error:
        inner = join(path, error.key)
        raise _located(error, node=node.find(error.key), path=inner) from error
    except ValueError as error:
        text = str(error.args[0]) if error.args else "a value is not legal"
        raise _told(text, {field.key for field in fields(cls)}, node=node, path=path) from error


def _located(error: IllegalValueError, *, node: Node, path: str) -> HPError:
    what = f"{path} is {show(error.value)}"
    return PlanError(error.code, what, expected=error.expected, where=node.where, fix=error.fix)


def _told(text: str, keys: set[str], *, node: Node, path: str) -> HPError:
    """Place a plain ValueError: at the field that its first word names, quoted or not, else at the section."""
    first, _, rest = text.partition(" ")
    name = first.strip("'\":,`")
    if name.split(".")[0] in keys:
        return PlanError("HP514", f"{join(path, name)} {rest}", where=node.find(name).where)
    return PlanError("HP514", f"{path}: {text}", where=node.where)


def illegal(node: Node, path: str, *, expected: str, fix: str = "") -> HPError:
    """Return the error for a value of the right type that is not legal."""
    return PlanError("HP514", f"{path} is {show(node.plain())}", expected=expected, where=node.where, fix=fix)


def missing(path: str, kind: Any, *, where: str) -> HPError:
    """Return the error for a required key that is not there."""
    return PlanError("HP516", f"{path} is missing", expected=describe(kind), where=where, fix=f"add {path}")


def unknown_key(
    key: str, known: typing.Iterable[str], *, path: str, where: str, meant: Mapping[str, str] = _NO_WORDS
) -> HPError:
    """Return the error for a key that the schema does not have: what to do instead, the closest one, or all of them."""
    fix = meant.get(key, "")
    close = "" if fix else suggest(key, known)
    expected = "" if close else f"one of {', '.join(sorted(known))}"
    return PlanError("HP512", f"unknown key '{join(path, key)}'{close}", expected=expected, where=where, fix=fix)


def misfit(node: Node, kind: Any, *, path: str) -> HPError:
    """Return the error for a value that is not of the kind: HP514 for a wrong word, HP513 for a wrong type."""
    choices = [
        choice for member in alternatives(kind) if typing.get_origin(member) is Literal for choice in typing.get_args(member)
    ]
    if isinstance(node.value, str) and choices:
        close = suggest(node.value, map(str, choices)).removeprefix("; ")
        return illegal(node, path, expected=describe(kind), fix=close)
    value = node.plain()
    shown = show(value) if isinstance(value, (dict, list)) or value is None else f"{show(value)} ({kind_of(value)})"
    return PlanError(
        "HP513", f"{path} is {shown}", expected=describe(kind), where=node.where, fix=_fix(value, alternatives(kind))
    )


def _fix(value: Any, kinds: tuple[Any, ...]) -> str:
    """Return how to write the value so that it is of one of the kinds, where that is plain to see."""
    if bool in kinds and isinstance(value, str) and value.lower() in _BOOLEAN_WORDS:
        return f"write {_BOOLEAN_WORDS[value.lower()]}"
    if int in kinds and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return f"write {int(value)}"
    if isinstance(value, str) and type(_quoted(value)) in kinds and _quoted(value) is not None:
        return f"write {show(_quoted(value))}{'' if '_' in value else ' without quotes'}"
    if value is False and any(fits("off", kind) for kind in kinds if typing.get_origin(kind) is Literal):
        return "write off"
    if str in kinds and isinstance(value, (bool, int, float)):
        return f"write it in quotes: '{show(value)}'"
    if any(is_list(kind) for kind in kinds) and not isinstance(value, (dict, list)) and value is not None:
        return f"write {show([value])}"
    if value is None and any(map(attrs.has, kinds)):
        return "write {} or leave the key out"
    classes = [kind for kind in kinds if attrs.has(kind) and kind not in typing.get_args(Placement)]
    places = [field.key for cls in classes for field in fields(cls) if any(fits(value, k) for k in alternatives(field.kind))]
    return f"write {{{places[0]}: {show(value)}}}" if len(places) == 1 else ""


def _quoted(text: str) -> Any:
    """Return what the text of a string would mean without its quotes; an underscore in a number is Python's, not YAML's."""
    try:
        return scalar(text.replace("_", ""))
    except ValueError:
        return None
