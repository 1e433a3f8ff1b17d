"""Members of families as Python objects: what their constructors take, and constructing one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
from torch import nn

from hp_core.contracts.family import FamilyContext, ModuleFamily, ResolvedFamily
from hp_core.contracts.validate_family import RESERVED
from hp_core.errors import DeclarationError, HPError, PlanError, suggest
from hp_core.planner.families import resolve_family
from hp_core.plugins.lazy import load
from hp_core.plugins.places import defined, place, told


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


def resolve_member(
    family: ModuleFamily, arguments: Mapping[str, Any], *, context: FamilyContext, where: str, author: str = ""
) -> ResolvedFamily:
    """Return the member that a request picks, validated against the signature of the baseline, which is imported for it.

    ``where``: who asks; ``author``: whose family it is. HP560, the asker's fault: an unknown or missing keyword, an illegal
    value, an illegal combination; HP402, the author's: a member does not take what the family declares; HP403: a lazy path
    leads to nothing.
    """
    with blaming(author):
        check_takes(family, field="baseline", reference=family.baseline)
    parameters = keywords(family.baseline)
    resolved = resolve_family(family, arguments=arguments, context=context, names=parameters, where=where)
    if resolved.constructor != family.baseline:
        with blaming(author):
            check_takes(family, field=f"variants.{resolved.variant}", reference=resolved.constructor)
    for name, parameter in keywords(resolved.constructor).items():
        if parameter.default is parameter.empty and name not in resolved.arguments and name not in family.selectors:
            raise PlanError("HP560", f"family {family.name!r} needs the argument {name!r}", expected="a value", where=where)
    return resolved


@contextmanager
def blaming(author: str) -> Iterator[None]:
    """Name the author of a family in what is wrong with it."""
    try:
        yield
    except DeclarationError as error:
        where = ". ".join(filter(None, (author, error.where)))
        raise DeclarationError(error.code, error.what, expected=error.expected, where=where, fix=error.fix) from error


def check_takes(family: ModuleFamily, *, field: str, reference: str) -> None:
    """Raise HP402 unless the member takes every argument of its family and needs no other that a request cannot give.

    A request can give the declared arguments and, beside them, what the baseline takes.
    """
    taken, known = keywords(reference), {*family.arguments, *family.selectors}
    subject, name_of = f"family {family.name}: {field} {reference!r}", reference.rpartition(":")[2]
    where = defined(load(reference))
    for name in family.arguments:
        if name not in taken:
            expected, fix = ", ".join(taken) or "no arguments", f"take {name!r} in {name_of}.__init__, or do not declare it"
            text = f"{subject} does not take the declared argument {name!r}{suggest(name, taken.keys() - known)}"
            raise DeclarationError("HP402", text, expected=expected, where=where, fix=fix)
    for name, parameter in taken.items():
        needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if needed and name not in known and reference != family.baseline and name not in keywords(family.baseline):
            fix = f"declare {name!r}, or give it a default in {name_of}.__init__"
            raise DeclarationError(
                "HP402", f"{subject} needs {name!r}, which the family does not declare", where=where, fix=fix
            )


def keywords(reference: str) -> dict[str, inspect.Parameter]:
    """Return the keywords that a constructor takes from a user, by name: all but those that the core gives."""
    found = _parameters(reference)
    return {name: item for name, item in found.items() if name not in RESERVED and item.kind is not item.VAR_KEYWORD}


def construct(resolved: ResolvedFamily, source: Source, *, where: str, author: str = "") -> Any:
    """Return a new member. What its constructor raises becomes HP541 where it replaces a module, else HP560.

    HP402: it calls something with arguments that are not there, which is ``author``'s fault whatever was asked for. The member
    gets ``config`` or ``module``, those of ``module_fqn``, ``context`` and ``mesh`` that its signature names, its arguments,
    and the selectors that it names.
    """
    taken, named = _parameters(resolved.constructor), f"{resolved.family}, member {resolved.variant}"
    if source.used not in taken:
        what, place_of = f"{named}, cannot be built from {source.used}", defined(load(resolved.constructor))
        by = ". ".join(filter(None, (where, author, place_of if author else "")))
        raise PlanError("HP560", what, expected=f"a member that takes {source.used}", where=by)
    given: dict[str, Any] = {source.used: getattr(source, source.used)}
    given |= {name: getattr(source, name) for name in ("module_fqn", "context", "mesh") if name in taken}
    for name, value in resolved.arguments.items():
        if name not in taken:
            what = f"{named}, takes no argument {name!r}{suggest(name, keywords(resolved.constructor))}"
            raise PlanError("HP560", what, expected=", ".join(keywords(resolved.constructor)) or "none", where=where)
        given[name] = value
    given |= {name: value for name, value in resolved.selectors.items() if name in taken}
    return _call(resolved, source, given, where=where, author=author)


def _call(resolved: ResolvedFamily, source: Source, given: Mapping[str, Any], *, where: str, author: str) -> Any:
    constructor = load(resolved.constructor)
    try:
        return constructor(**given)
    except HPError:
        raise
    except Exception as error:
        text, at = " ".join(told(error).split()), place(error) or defined(constructor)
        if isinstance(error, TypeError) and _MISCALLED.search(text):
            text = f"family {resolved.family}: {resolved.constructor!r} raises {text}"
            by, fix = ". ".join(filter(None, (author, at))), "repair the plugin; --debug shows the traceback"
            raise DeclarationError("HP402", text, where=by, fix=fix) from error
        by = ". ".join((where, author, at)) if author else where
        if source.used == "module":
            raise PlanError("HP541", f"{resolved.family} cannot replace it: {text}", where=by) from error
        raise PlanError("HP560", f"{resolved.family} cannot be built: {text}", where=by) from error


_MISCALLED = re.compile(r"\(\) (got an unexpected keyword|missing \d+ required|takes .* positional|got multiple values)")


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
