"""The decision table of a module family: a request and the mesh's degrees pick exactly one member, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import attrs

from hp_core.contracts import FamilyContext, ModuleFamily, ResolvedFamily, SelectorSpec
from hp_core.errors import PlanError, suggest

PARALLEL = "parallel"  # the derived selector of deferred families
BASELINE = "baseline"  # what the baseline itself is called where a variant's name is expected
_TYPES = {"str": str, "int": int, "bool": bool}


@attrs.frozen(kw_only=True)
class Choice:
    """A row of the table: the values of all selectors (and ``parallel``), the member they pick, and its lazy path."""

    when: Mapping[str, Any]
    variant: str
    constructor: str
    default: bool = False

    @property
    def condition(self) -> str:
        """``"fused=True, gemm='loop'"``, or that there are no selectors."""
        return show_condition(self.when)


def show_condition(when: Mapping[str, Any]) -> str:
    """Return a combination of selectors in words."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(when.items())) or "no selectors"


def decision_table(family: ModuleFamily) -> tuple[Choice, ...]:
    """Return every legal combination with its member, the default first."""
    default = {name: spec.default for name, spec in family.selectors.items()}
    if family.default_variant is not None:
        default[PARALLEL] = False
    variant = family.default_variant or BASELINE
    rows = [Choice(when=default, variant=variant, constructor=_constructor(family, variant), default=True)]
    rows += [
        Choice(when=rule.when, variant=rule.variant, constructor=_constructor(family, rule.variant)) for rule in family.rules
    ]
    return tuple(rows)


def resolve_family(
    family: ModuleFamily,
    *,
    arguments: Mapping[str, Any] | None = None,
    context: FamilyContext | None = None,
    names: Iterable[str] = (),
    where: str = "",
) -> ResolvedFamily:
    """Return the one member that ``arguments`` (arguments and selectors) and the degrees of ``context`` pick.

    ``names``: keywords of the baseline beside the declared ones. Without a context every degree is 1. HP560: an unknown
    keyword, a value of the wrong type, a selector's value that is not legal, ``parallel``, which is derived; a combination
    that no rule names (the error lists all legal ones) or that several name; a deferred family that resolves to its baseline.

    Example::

        resolve_family(family, arguments={"gemm": "grouped"}, context=FamilyContext(ep=4)).constructor
    """
    asked = dict(arguments or {})
    check_arguments(family, asked, names=names, where=where)
    selectors = {name: asked.pop(name, spec.default) for name, spec in family.selectors.items()}
    context = context or FamilyContext()
    axis = family.parallel_axis
    when = dict(selectors)
    if family.default_variant is not None:
        when[PARALLEL] = axis is not None and context.degree(axis) > 1
    choice = _choose(family, when, where=where)
    return ResolvedFamily(
        family=family.name,
        variant=choice.variant,
        constructor=choice.constructor,
        arguments=asked,
        selectors=selectors,
        degrees={} if axis is None else {axis: context.degree(axis)},
    )


def check_arguments(family: ModuleFamily, arguments: Mapping[str, Any], *, names: Iterable[str] = (), where: str = "") -> None:
    """Raise HP560 unless every argument and selector is known and has a legal value; 1 is not True."""
    known = {*family.arguments, *family.selectors, *names}
    for name, value in arguments.items():
        if name == PARALLEL:
            _refuse(family, f"{PARALLEL!r} is given", "it to be left out: it is derived from the mesh", where)
        if name not in known:
            expected = ", ".join(sorted(known)) or "no arguments"
            _refuse(family, f"has no argument {name!r}{suggest(name, known)}", expected, where, verb="")
        if name in family.selectors:
            _check_selector(family, name, family.selectors[name], value, where)
        elif name in family.arguments:
            _check_argument(family, name, family.arguments[name], value, where)


def _check_selector(family: ModuleFamily, name: str, spec: SelectorSpec, value: Any, where: str) -> None:
    if spec.choices is not None:
        if not any(value == choice and type(value) is type(choice) for choice in spec.choices):
            _refuse(family, f"selector {name!r} is {value!r}", f"one of {', '.join(map(str, spec.choices))}", where)
    elif type(value) is not _TYPES[str(spec.type)]:
        _refuse(family, f"selector {name!r} is {value!r}", _of_type(str(spec.type)), where)


def _check_argument(family: ModuleFamily, name: str, kind: str, value: Any, where: str) -> None:
    legal: tuple[type, ...] = (int, float) if kind == "float" else (_TYPES[kind],)
    if type(value) not in legal:
        _refuse(family, f"argument {name!r} is {value!r}", _of_type(kind), where)


def _of_type(kind: str) -> str:
    words = {"str": "a text", "int": "an integer", "float": "a number", "bool": "True or False"}
    return words[kind]


def _choose(family: ModuleFamily, when: Mapping[str, Any], *, where: str) -> Choice:
    table = decision_table(family)
    hits = [choice for choice in table if _same(choice.when, when)]
    if len(hits) != 1:
        legal = "; ".join(f"{choice.condition} -> {choice.variant}" for choice in table)
        found = "several members" if hits else "no member"
        _refuse(family, f"has {found} for {show_condition(when)}", f"one of: {legal}", where, verb="")
    if family.default_variant is not None and hits[0].constructor == family.baseline:
        _refuse(
            family, f"resolves {show_condition(when)} to its own baseline", "a variant, since it is deferred", where, verb=""
        )
    return hits[0]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        value == other[name] and type(value) is type(other[name]) for name, value in one.items()
    )


def _constructor(family: ModuleFamily, variant: str) -> str:
    return family.baseline if variant == BASELINE and variant not in family.variants else family.variants[variant]


def _refuse(family: ModuleFamily, what: str, expected: str, where: str, *, verb: str = ": ") -> NoReturn:
    raise PlanError("HP560", f"family {family.name!r}{verb or ' '}{what}", expected=expected, where=where)
