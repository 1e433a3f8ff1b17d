"""The draft of a boundary's contract, from its forward signature and its parameters, as a recipe would write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_core.contracts import ModuleInfo
from hp_core.recipe.values import placement_text

WHOLE = "{tp: replicate}"  # what a draft says where nothing is known: the tensor is whole on every rank


def draft(info: ModuleInfo, parameters: Sequence[str], *, given: Mapping[str, Any]) -> str:
    """Return all layout fields in YAML's flow style, with what ``given`` declares already and ``replicate`` elsewhere.

    Example::

        draft(info, ["weight"], given={})  # "params: {weight: {tp: replicate}}, in_src: {x: {tp: replicate}}, ..."
    """
    outputs = list(given.get("out_src", {}) or given.get("out_dst", {})) or ["output"]
    names = {
        "params": parameters,
        "in_src": info.forward_args,
        "in_dst": info.forward_args,
        "out_src": outputs,
        "out_dst": outputs,
    }
    return ", ".join(f"{field}: {_field(keys, given.get(field))}" for field, keys in names.items())


def _field(keys: Sequence[str], given: Mapping[str, Any] | None) -> str:
    given = given or {}
    every = dict.fromkeys((*keys, *given))
    return "{" + ", ".join(f"{key}: {_layout(given.get(key))}" for key in every) + "}"


def _layout(layout: Any) -> str:
    if layout is None or layout == "auto":
        return WHOLE
    return "{" + ", ".join(f"{axis}: {placement_text(placement)}" for axis, placement in layout.items()) + "}"
