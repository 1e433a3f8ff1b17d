"""ModuleFamily: one public name for several concrete modules, chosen by selectors. Data and checks only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from hp_core.contracts.adapter import Init, Role
from hp_core.contracts.converters import as_dict, as_tuple
from hp_core.contracts.frozen import frozen_mapping
from hp_core.contracts.transform import Transform
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology


@attrs.frozen(kw_only=True)
class SelectorSpec:
    """A selector's legal values: ``choices`` or every value of ``type``; ``default`` is one of them."""

    default: Any
    type: Literal["str", "int", "bool"] | None = None
    choices: tuple[Any, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(as_tuple))


@attrs.frozen(kw_only=True)
class VariantRule:
    """``when`` names every selector (plus ``parallel`` if the family is deferred) with the value that picks ``variant``."""

    when: Mapping[str, Any] = attrs.field(converter=as_dict)
    variant: str


@attrs.frozen(kw_only=True)
class ModuleFamily:
    """One public name for several members. The user says *what* with selectors; exactly one member is picked.

    - ``name``: the public name; a component is a family, most have no selectors.
    - ``baseline``: lazy ``"module:Attr"`` of the public class.
    - ``arguments``: keyword -> type name (``"int"``, ``"float"``, ``"bool"``, ``"str"``), checked without importing it.
    - ``selectors``: name -> :class:`SelectorSpec`. ``parallel`` is reserved: it is derived.
    - ``variants``: member name -> lazy path. ``rules``: which combination picks which member.
    - ``default_variant``: None: *immediate*, the default combination is the baseline itself; set: *deferred*, the member
      is chosen when the topology is known.
    - ``parallel_axis``: the axis whose degree > 1 makes ``parallel`` true; None, ``"cp"`` or ``"ep"``.
    - ``sharding``: lazy torch-free layout provider ``(ModuleInfo, LayoutContext) -> ModuleShardingSpec``.
    - ``transforms``: parameter name -> transforms from Hugging Face's tensors to the component's, applied in order; names that
      a member does not have are left out.
    - ``validate``: lazy, optional, ``(arguments, topology) -> list[Problem]``.
    - ``init``: how a member that is built from a configuration, without an adapter, is filled; patterns are relative to it.
    - ``kernels``: operators that its members compute through kernels, which a plan chooses for each module;
      ``variant_kernels``: those of a variant that computes others.
    - ``role``: what a precision scheme may address it by, e.g. ``"norm"``; an adapter's rules have roles too.

    Example::

        ModuleFamily(name="rms_norm", baseline="hp_components.rms_norm:RMSNorm", arguments={"eps": "float"},
                     sharding="hp_components.layout:rms_norm")
    """

    name: str
    baseline: str
    arguments: Mapping[str, str] = attrs.field(factory=dict, converter=as_dict)
    selectors: Mapping[str, SelectorSpec] = attrs.field(factory=dict, converter=as_dict)
    variants: Mapping[str, str] = attrs.field(factory=dict, converter=as_dict)
    rules: tuple[VariantRule, ...] = attrs.field(default=(), converter=as_tuple)
    default_variant: str | None = None
    parallel_axis: Literal["cp", "ep"] | None = None
    sharding: str | None = None
    transforms: Mapping[str, tuple[Transform, ...]] = attrs.field(factory=dict, converter=as_dict)
    validate: str | None = None
    init: tuple[Init, ...] = attrs.field(default=(), converter=as_tuple)
    role: Role | None = None
    kernels: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    variant_kernels: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=as_dict)

    def operators(self, variant: str) -> tuple[str, ...]:
        """Return the operators that a member (a variant's name, or ``"baseline"``) computes through kernels."""
        return tuple(self.variant_kernels.get(variant, self.kernels))


@attrs.frozen(kw_only=True)
class FamilyRequest:
    """A topology-free request for a member of ``target``, the name of a family.

    ``kwargs`` are its arguments and selectors, plain data, frozen at every depth; they are validated against the baseline's
    signature where the request is made into a module. HP560 for anything that is not plain data.
    """

    target: str
    kwargs: Mapping[str, Any] = attrs.field(factory=dict, converter=frozen_mapping)


@attrs.frozen(kw_only=True)
class FamilyContext:
    """The degrees that a deferred family may depend on. HP560 unless they are positive integers.

    Example::

        FamilyContext.of(Topology(cp=2)).degree("cp")  # 2
    """

    cp: int = 1
    ep: int = 1

    def __attrs_post_init__(self) -> None:
        for axis in ("cp", "ep"):
            value = getattr(self, axis)
            if type(value) is not int or value < 1:
                raise PlanError("HP560", f"a family context has {axis}={value!r}", expected="a positive integer")

    @classmethod
    def of(cls, topology: Topology) -> FamilyContext:
        """Return the degrees of ``topology``."""
        return cls(cp=topology.cp, ep=topology.ep)

    def degree(self, axis: Literal["cp", "ep"]) -> int:
        """Return the degree of ``axis``."""
        return self.cp if axis == "cp" else self.ep


@attrs.frozen(kw_only=True)
class ResolvedFamily:
    """What a request resolved to: the member, its constructor (lazy path), arguments, selectors and degrees used.

    ``variant`` is ``"baseline"`` for the baseline itself; ``degrees`` holds the degree of the family's ``parallel_axis``.
    """

    family: str
    variant: str
    constructor: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict, converter=frozen_mapping)
    selectors: Mapping[str, Any] = attrs.field(factory=dict, converter=frozen_mapping)
    degrees: Mapping[str, int] = attrs.field(factory=dict, converter=as_dict)
