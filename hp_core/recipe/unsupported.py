"""What a recipe may say but this version does not do yet: refused with its key and line, never accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from hp_core.errors import PlanError
from hp_core.recipe.structure import fields
from hp_core.recipe.tree import join
from hp_core.recipe.values import show


@attrs.frozen
class Refusal:
    """``key`` (``*`` is every member of a list) may only have one of the ``allowed`` values; ``why`` completes "but ..."."""

    key: str
    allowed: tuple[Any, ...]
    why: str


_HALF = "training in float16 needs loss scaling, which is not implemented in this version"

# Whoever implements a line deletes it.
REFUSED: tuple[Refusal, ...] = (
    Refusal("model.dtype", ("float32", "bfloat16", "float64"), _HALF),
    Refusal("mesh.pp", (1,), "pipeline parallelism is not implemented in this version"),
    Refusal("precision.compute", (None, "float32", "bfloat16", "float64"), _HALF),
    Refusal("fsdp.offload", (False,), "offloading to host memory is not implemented in this version"),
    Refusal("compile", ("off",), "compilation is not implemented in this version"),
)


def check_supported(recipe: Any) -> None:
    """Raise HP515 for the first value, of the core's sections or of a plugin's, that nothing implements yet."""
    for refusal in REFUSED:
        for path, value in _values(recipe, refusal.key.split("."), ""):
            if value not in refusal.allowed:
                expected = " or ".join(str(choice) if isinstance(choice, str) else show(choice) for choice in refusal.allowed)
                what = f"{path} is {show(value)}, but {refusal.why}"
                raise PlanError("HP515", what, expected=expected, where=recipe.where(path))
    for name, section in recipe.sections.items():
        for key, why in section.unsupported().items() if hasattr(section, "unsupported") else ():
            what = f"{join(name, key)} is {_shown(section, key)}, but {why}"
            raise PlanError("HP515", what, where=recipe.where(join(name, key)))


def _shown(section: Any, key: str) -> str:
    return ", ".join(show(value) for _, value in _values(section, key.split("."), "")) or "set"


def _values(value: Any, keys: list[str], path: str) -> Iterator[tuple[str, Any]]:
    """Yield every ``(path, value)`` that a key with ``*`` reaches; nothing below null."""
    if not keys:
        yield path, value
    elif keys[0] == "*":
        for index, item in enumerate(value):
            yield from _values(item, keys[1:], join(path, index))
    elif value is not None:
        yield from _values(_member(value, keys[0]), keys[1:], join(path, keys[0]))


def _member(value: Any, key: str) -> Any:
    names = {field.key: field.attribute.name for field in fields(type(value))}
    return getattr(value, names.get(key, key))
