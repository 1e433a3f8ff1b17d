"""Members of families as Python objects: what their constructors take, and constructing one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from hp_core.contracts.family import FamilyContext, ModuleFamily, ResolvedFamily
from hp_core.contracts.validate_family import RESERVED
from hp_core.errors import DeclarationError, HPError, PlanError
from hp_core.planner.families import resolve_family
from hp_core.plugins.lazy import load


@attrs.frozen(kw_only=True, eq=False)
class Source:
    """What a member is made from: exactly one of ``config`` (build new) and ``module`` (wrap or replace); and where it lies."""

    config: Any = None
    module: nn.Module | None = None
    module_fqn: str = ""
    context: FamilyContext = attrs.field(factory=FamilyContext)
    mesh: Any = None

    @property
    def used(self) -> str:
        """``"config"`` or ``"module"``."""
        return "module" if self.module is not None else "config"


def resolve_member(family: ModuleFamily, arguments: Mapping[str, Any], *, context: FamilyContext, where: str) -> ResolvedFamily:
    """Return the member that a request picks, validated against the signature of the baseline, which is imported for it.

    HP560: an unknown or missing keyword, an illegal value, an illegal combination; HP402: the family declares an argument
    that its baseline does not take; HP403: a lazy path leads to nothing.
    """
    parameters = keywords(family.baseline)
    for name in family.arguments:
        if name not in parameters:
            text = f"family {family.name!r}: argument {name!r} is not in the signature of {family.baseline}"
            raise DeclarationError("HP402", text, expected=", ".join(parameters) or "no arguments", where=where)
    resolved = resolve_family(family, arguments=arguments, context=context, names=parameters, where=where)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in resolved.arguments and name not in family.selectors:
            raise PlanError("HP560", f"family {family.name!r} needs the argument {name!r}", expected="a value", where=where)
    return resolved


def keywords(reference: str) -> dict[str, inspect.Parameter]:
    """Return the keywords that a constructor takes from a user, by name: all but those that the core gives."""
    found = _parameters(reference)
    return {name: item for name, item in found.items() if name not in RESERVED and item.kind is not item.VAR_KEYWORD}


def construct(resolved: ResolvedFamily, source: Source, *, where: str) -> Any:
    """Return a new member. Whatever its constructor raises becomes HP541 where it replaces a module, else HP560.

    The member gets ``config`` or ``module``, those of ``module_fqn``, ``context`` and ``mesh`` that its signature names, its
    arguments, and the selectors that it names.
    """
    taken = _parameters(resolved.constructor)
    if source.used not in taken:
        what = f"{resolved.family}, member {resolved.variant}, cannot be built from {source.used}"
        raise PlanError("HP560", what, expected=f"a member that takes {source.used}", where=where)
    given: dict[str, Any] = {source.used: getattr(source, source.used)}
    given |= {name: getattr(source, name) for name in ("module_fqn", "context", "mesh") if name in taken}
    for name, value in resolved.arguments.items():
        if name not in taken:
            what = f"{resolved.family}, member {resolved.variant}, takes no argument {name!r}"
            raise PlanError("HP560", what, expected=", ".join(keywords(resolved.constructor)) or "none", where=where)
        given[name] = value
    given |= {name: value for name, value in resolved.selectors.items() if name in taken}
    return _call(resolved, source, given, where=where)


def _call(resolved: ResolvedFamily, source: Source, given: Mapping[str, Any], *, where: str) -> Any:
    try:
        return load(resolved.constructor)(**given)
    except HPError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if source.used == "module":
            raise PlanError("HP541", f"{resolved.family} cannot replace it: {text}", where=where) from error
        raise PlanError("HP560", f"{resolved.family} cannot be built: {text}", where=where) from error


def _parameters(reference: str) -> dict[str, inspect.Parameter]:
    constructor = load(reference)
    if not isinstance(constructor, type):
        what = f"{reference} is {type(constructor).__name__} {getattr(constructor, '__name__', '')}".rstrip()
        raise DeclarationError("HP402", what, expected="a class")
    found = inspect.signature(constructor).parameters
    if not any(item.kind is item.VAR_KEYWORD for item in found.values()):
        return dict(found)
    return {**found, **{name: _CORE for name in RESERVED if name not in found}}


_CORE = inspect.Parameter("core", inspect.Parameter.KEYWORD_ONLY, default=None)
