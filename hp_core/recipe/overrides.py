"""Overrides: recipe entries that replace a module, change a layout, choose a scheme or freeze parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from hp_core.contracts.placement import Placement
from hp_core.recipe.values import IllegalValueError, filled

Axis = Literal["tp", "cp", "ep"]
Layouts = Literal["auto"] | Mapping[str, Literal["auto"] | Mapping[Axis, Placement]]


def _patterns(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen(kw_only=True)
class Replace:
    """What comes in place of the matched modules or of a method of theirs.

    - ``kind``: replace whole modules, or one method of their class.
    - ``implementation``: name of a registered family or component; never an import path.
    - ``source_type``: class name of what is replaced, compared as text, with or without its module path.
    - ``exact_type``: refuse subclasses of ``source_type``.
    - ``with``: arguments and selectors of the implementation, checked against its declaration.
    """

    kind: Literal["module", "method"]
    implementation: str = attrs.field(validator=filled)
    source_type: str | None = None
    exact_type: bool = False
    arguments: Mapping[str, Any] = attrs.field(factory=dict, metadata={"key": "with"})

    def __attrs_post_init__(self) -> None:
        if "." in self.implementation or ":" in self.implementation:
            expected = "the name of a registered family, since a recipe cannot name code to import"
            raise IllegalValueError("implementation", self.implementation, expected=expected)
        if self.kind == "module" and not self.source_type:
            expected = "the class name of the modules to replace"
            raise IllegalValueError("source_type", self.source_type, expected=expected, code="HP516")


@attrs.frozen(kw_only=True)
class Override:
    """One entry of ``overrides``: which modules, and what changes.

    - ``match``: fnmatch pattern on module names, ``*`` crosses dots; a list only to replace modules.
    - ``replace``: put another module or method in place.
    - ``when``: apply the layout fields only when that axis or precision is in use; null is always.
    - ``params``: layouts of parameters, by path below the module: ``auto`` inherits, ``{}`` is none.
    - ``in_src``: layouts of arguments as they arrive.
    - ``in_dst``: layouts of arguments as the body needs them.
    - ``out_src``: layouts of outputs as the body produces them.
    - ``out_dst``: layouts of outputs as the consumer gets them.
    - ``scheme``: precision scheme of the subtree.
    - ``freeze``: fnmatch patterns of parameters below the module that are not trained.
    """

    match: tuple[str, ...] = attrs.field(converter=_patterns, validator=filled, metadata={"kind": str | tuple[str, ...]})
    replace: Replace | None = None
    when: Literal["cp", "ep", "low_precision"] | None = None
    params: Layouts = "auto"
    in_src: Layouts = "auto"
    in_dst: Layouts = "auto"
    out_src: Layouts = "auto"
    out_dst: Layouts = "auto"
    scheme: str | None = None
    freeze: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        module = self.replace is not None and self.replace.kind == "module"
        if len(self.match) > 1 and not module:
            raise IllegalValueError("match", self.match, expected="one pattern; a list needs replace: {kind: module}")
        if self.when is not None and module:
            expected = "null, since replacing a module never depends on the mesh"
            raise IllegalValueError("when", self.when, expected=expected)
        layouts = (self.params, self.in_src, self.in_dst, self.out_src, self.out_dst)
        if not (self.replace or self.scheme or self.freeze) and all(layout == "auto" for layout in layouts):
            raise IllegalValueError("match", self.match[0], expected="something to change beside it, such as replace or freeze")
        if "" in self.freeze:
            raise IllegalValueError("freeze", self.freeze, expected="patterns that are not empty")
