"""Plain data that cannot be changed: what a request holds, so that nobody can change it after it was checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from hp_core.errors import PlanError

_SCALARS = (bool, int, float, str)


class FrozenDict(dict[str, Any]):
    """A dict that refuses every change; equal to a dict with the same items, and pickled and written to JSON like one."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this mapping is frozen: copy it with dict(...)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def deep_freeze(value: Any) -> Any:
    """Return ``value`` with mappings frozen and lists as tuples, at every depth.

    HP560 for anything but plain data (None, texts, numbers, booleans, lists and mappings with text keys), which could
    change later or could not be written down.

    Example::

        deep_freeze({"rope": {"theta": 1e4}, "sizes": [1, 2]})["sizes"]  # (1, 2)
    """
    return _freeze(value, "a family request")


def frozen_mapping(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Attrs converter: :func:`deep_freeze` for a field that is a mapping."""
    return FrozenDict({_key(name): _freeze(item, f"argument {name!r}") for name, item in value.items()})


def _freeze(value: Any, where: str) -> Any:
    if value is None or type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        return FrozenDict({_key(name): _freeze(item, f"{where}[{name!r}]") for name, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_freeze(item, f"{where}[{index}]") for index, item in enumerate(value))
    raise PlanError(
        "HP560",
        f"{where} is a {type(value).__name__}",
        expected="plain data: null, a text, a number, a boolean, or lists and mappings of them",
    )


def _key(name: Any) -> str:
    if not isinstance(name, str):
        raise PlanError("HP560", f"a family request has the key {name!r}", expected="a text")
    return name
