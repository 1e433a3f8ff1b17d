"""Plans and inventories as JSON, and the digest of a plan. Two equal plans have one text; reading it gives an equal plan."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from hp_core.contracts import BuildPlan, Inventory, Partial, Placement, Replicate, Shard, Transform, View

_T = TypeVar("_T")
_SHARD = re.compile(r"Shard\((\d+)\)")


def plan_to_json(plan: BuildPlan) -> str:
    """Return the plan as indented JSON; placements are written ``"Shard(0)"``, ``"Replicate"``, ``"Partial"``."""
    return json.dumps(_converter().unstructure(plan), indent=1)


def plan_from_json(text: str) -> BuildPlan:
    """Return the plan that :func:`plan_to_json` wrote; a ``cattrs`` error for anything else."""
    return _read(text, BuildPlan)


def plan_digest(plan: BuildPlan) -> str:
    """Return the sha256 of the plan's canonical JSON: equal on all ranks iff their plans are equal."""
    text = json.dumps(_converter().unstructure(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def inventory_to_json(inventory: Inventory) -> str:
    """Return the inventory as indented JSON."""
    return json.dumps(_converter().unstructure(inventory), indent=1)


def inventory_from_json(text: str) -> Inventory:
    """Return the inventory that :func:`inventory_to_json` wrote."""
    return _read(text, Inventory)


def _read(text: str, cls: type[_T]) -> _T:
    return _converter().structure(json.loads(text), cls)


@functools.cache
def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
    for cls in (Shard, Replicate, Partial):
        converter.register_unstructure_hook(cls, str)
    converter.register_structure_hook(Placement, lambda text, _: _placement(text))
    converter.register_structure_hook(int | str, lambda value, _: value)  # sizes of a port
    for classes in (get_args(View), get_args(Transform)):
        _tag(converter, classes)
    return converter


def _placement(text: Any) -> Placement:
    if found := _SHARD.fullmatch(text):
        return Shard(int(found[1]))
    named: dict[str, Placement] = {"Replicate": Replicate(), "Partial": Partial()}
    return named[text]


def _tag(converter: Converter, classes: tuple[type, ...]) -> None:
    """Write each of ``classes`` with its name under ``kind``, and read their union, or None, by it."""
    readers: dict[str, Any] = {cls.__name__: make_dict_structure_fn(cls, converter) for cls in classes}

    def read(value: Any, _: Any) -> Any:
        if value is None:
            return None
        fields = dict(value)
        kind = fields.pop("kind")
        return readers[kind](fields, next(cls for cls in classes if cls.__name__ == kind))

    for cls in classes:
        converter.register_unstructure_hook(cls, _writer(converter, cls))
    union = functools.reduce(operator.or_, classes)
    converter.register_structure_hook(union, read)
    converter.register_structure_hook(union | None, read)


def _writer(converter: Converter, cls: type) -> Callable[[Any], dict[str, Any]]:
    write: Callable[[Any], dict[str, Any]] = make_dict_unstructure_fn(cls, converter)
    return lambda value: {"kind": cls.__name__, **write(value)}
