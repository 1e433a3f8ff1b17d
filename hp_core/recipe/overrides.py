"""Overrides: recipe entries that replace a module, change a layout, choose a scheme or freeze parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from hp_core.contracts.placement import Placement
from hp_core.mesh.topology import Topology
from hp_core.recipe.values import IllegalValueError, filled

Axis = Literal["tp", "cp", "ep"]
Layouts = Literal["auto"] | Mapping[str, Literal["auto"] | Mapping[Axis, Placement]]


def _patterns(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen(kw_only=True)
class Replace:
    """What comes in place of the matched modules or of a method of theirs.

    - ``kind``: replace whole modules, or one method of their class.
    - ``implementation``: name of a registered family or component; ``package.module:Attribute`` only of packages that the
      command line trusts (``--trust``).
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
        if self.kind == "method" and self.arguments:
            raise IllegalValueError("with", self.arguments, expected="nothing, since a method has no arguments of its own")
        if self.kind == "module" and not self.source_type:
            expected = "the class name of the modules to replace"
            raise IllegalValueError("source_type", self.source_type, expected=expected, code="HP516")


@attrs.frozen(kw_only=True)
class Override:
    """One entry of ``overrides``: which modules, and what changes.

    - ``match``: fnmatch pattern on module names, ``*`` crosses dots; a list only to replace modules.
    - ``replace``: put another module or method in place.
    - ``when``: apply layout fields, scheme and method only when that axis or precision is in use; null is always.
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
        if self.when is not None and self.freeze:
            raise IllegalValueError("when", self.when, expected="null, since freezing never depends on the mesh")
        if "" in self.freeze:
            raise IllegalValueError("freeze", self.freeze, expected="patterns that are not empty")

    @property
    def layouts(self) -> dict[str, Layouts]:
        """The layout fields that change something, by name."""
        return {name: getattr(self, name) for name in LAYOUT_FIELDS if getattr(self, name) != "auto"}


LAYOUT_FIELDS = ("params", "in_src", "in_dst", "out_src", "out_dst")
LOW_PRECISION = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def is_active(override: Override, *, topology: Topology, compute: str) -> bool:
    """Return whether what ``override.when`` asks for is in use: a degree above 1, or a compute dtype below float32."""
    if override.when is None:
        return True
    return compute in LOW_PRECISION if override.when == "low_precision" else topology.degree(override.when) > 1
