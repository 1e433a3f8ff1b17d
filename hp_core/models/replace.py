"""Replacing modules: rules are compiled against the model, candidates prepared, then installed together or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
from torch import nn

from hp_core.contracts.adapter import Replacement
from hp_core.contracts.family import ModuleFamily
from hp_core.contracts.plan import ReplacementPlan
from hp_core.errors import HPError, PlanError, suggest
from hp_core.models.inventory import class_path, original_class, parameter_aliases
from hp_core.models.replace_checks import check_candidate, check_source
from hp_core.models.state import update
from hp_core.plugins.lazy import load


@attrs.frozen(kw_only=True)
class Rule:
    """A declared replacement: ``priority`` 0 for the adapter, 1 for the recipe, which has the last word on a module."""

    replacement: Replacement
    family: ModuleFamily
    declared_by: str
    priority: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Target:
    """One module to replace, under all its names (a shared module has several), and the rule that hit it."""

    fqns: tuple[str, ...]
    module: nn.Module
    rule: Rule

    @property
    def record(self) -> ReplacementPlan:
        """The replacement as plain data."""
        return ReplacementPlan(
            fqn=self.fqns[0],
            source=class_path(original_class(type(self.module))),
            family=self.rule.family.name,
            constructor=self.rule.family.baseline,
            declared_by=self.rule.declared_by,
            arguments=self.rule.replacement.arguments,
        )


@attrs.frozen(kw_only=True, eq=False)
class Candidate:
    """A prepared module that may take the place of its target."""

    target: Target
    module: nn.Module


class ModuleReplacementMatchError(PlanError):
    """Patterns that hit no module; ``unmatched`` lists them as (pattern, declared by)."""

    def __init__(self, unmatched: Sequence[tuple[str, str]], names: Iterable[str]) -> None:
        self.unmatched = tuple(unmatched)
        pattern, declared_by = self.unmatched[0]
        what = f"the replacement pattern {pattern!r} matches no module{suggest(pattern, names)}"
        super().__init__("HP540", what, where=declared_by)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.unmatched, ())


def compile_rules(model: nn.Module, rules: Sequence[Rule]) -> tuple[Target, ...]:
    """Return the modules that ``rules`` replace, in module order. Pure: reads the model and changes nothing.

    HP540: a pattern that hits nothing, another class than declared, a module hit by two rules of one priority, a module and
    its descendant both hit.
    """
    names = _names_by_module(model)
    _check_every_pattern_hits(names, rules)
    targets: dict[int, Target] = {}
    for rule in sorted(rules, key=lambda rule: rule.priority):
        for key, (fqns, module) in names.items():
            if _hits(rule, fqns):
                check_source_type(rule, fqns[0], module)
                targets[key] = _claim(targets.get(key), Target(fqns=fqns, module=module, rule=rule))
    ordered = tuple(targets[key] for key in names if key in targets)
    _check_not_nested(ordered)
    return ordered


def prepare(targets: Sequence[Target], *, config: Any = None) -> tuple[Candidate, ...]:
    """Return a checked candidate for every target; the sources and the model are not touched. HP541, HP560.

    ``config`` is offered to members that ask for it together with the module they replace.
    """
    return tuple(_prepare_one(target) for target in targets)


def install(model: nn.Module, candidates: Sequence[Candidate]) -> None:
    """Put every candidate in its place, or, if anything fails, leave the model as it was.

    Shared parameters stay shared: a tie that a candidate would break is HP541.
    """
    ties = parameter_aliases(model)
    undo: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for candidate in candidates:
            for fqn in candidate.target.fqns:
                _put(model, fqn, candidate.module, undo)
        _check_ties(model, ties)
    except BaseException:
        for parent, name, module in reversed(undo):
            parent._modules[name] = module
        raise
    for candidate in candidates:
        record = candidate.target.record
        update(candidate.module, record.fqn, family=record.family, source=record.source, declared_by=record.declared_by)


def check_source_type(rule: Rule, fqn: str, module: nn.Module) -> None:
    """Raise HP540 unless the module's class, or a base of it, is the declared one; compared as text, nothing is imported."""
    cls = original_class(type(module))
    classes = (cls,) if rule.replacement.exact_type else cls.__mro__
    if not any(_is_called(base, rule.replacement.source_type) for base in classes):
        expected = ("exactly " if rule.replacement.exact_type else "") + rule.replacement.source_type
        raise PlanError("HP540", f"{fqn} is a {cls.__qualname__}", expected=expected, where=rule.declared_by)


def _is_called(cls: type, text: str) -> bool:
    dotted = f"{cls.__module__}.{cls.__qualname__}"
    return text in (cls.__qualname__, dotted, class_path(cls)) or (text.startswith("...") and dotted.endswith("." + text[3:]))


def _names_by_module(model: nn.Module) -> dict[int, tuple[tuple[str, ...], nn.Module]]:
    found: dict[int, tuple[tuple[str, ...], nn.Module]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if fqn:
            found[id(module)] = ((*found.get(id(module), ((), module))[0], fqn), module)
    return found


def _hits(rule: Rule, fqns: Sequence[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in rule.replacement.match for fqn in fqns)


def _check_every_pattern_hits(names: Mapping[int, tuple[tuple[str, ...], nn.Module]], rules: Sequence[Rule]) -> None:
    fqns = [fqn for entry in names.values() for fqn in entry[0]]
    unmatched = [
        (pattern, rule.declared_by)
        for rule in rules
        for pattern in rule.replacement.match
        if not any(fnmatchcase(fqn, pattern) for fqn in fqns)
    ]
    if unmatched:
        raise ModuleReplacementMatchError(unmatched, fqns)


def _claim(earlier: Target | None, target: Target) -> Target:
    if earlier is not None and earlier.rule.priority == target.rule.priority:
        by = f"{earlier.rule.declared_by} and by {target.rule.declared_by}"
        raise PlanError("HP540", f"{target.fqns[0]} is replaced twice: by {by}", expected="one rule for a module")
    return target


def _check_not_nested(targets: Sequence[Target]) -> None:
    owner = {fqn: target for target in targets for fqn in target.fqns}
    for target in targets:
        for fqn in target.fqns:
            parts = fqn.split(".")
            for end in range(1, len(parts)):
                outer = ".".join(parts[:end])
                if outer in owner:
                    raise PlanError(
                        "HP540",
                        f"{fqn} is replaced, and so is {outer}, which contains it",
                        where=f"{target.rule.declared_by}; {owner[outer].rule.declared_by}",
                    )


def _prepare_one(target: Target) -> Candidate:
    family = target.rule.family
    where = f"{target.fqns[0]}, {target.rule.declared_by}"
    _check_arguments(family, target.rule.replacement.arguments, where)
    check_source(target.module, where=where)
    constructor = load(family.baseline)
    try:
        module = constructor(module=target.module, **target.rule.replacement.arguments)
    except HPError:
        raise
    except Exception as error:
        what = f"{family.name} cannot replace it: {type(error).__name__}: {_one_line(error)}"
        raise PlanError("HP541", what, where=where) from error
    check_candidate(target.module, module, transforms=family.transforms, where=where)
    return Candidate(target=target, module=module)


def _check_arguments(family: ModuleFamily, arguments: Mapping[str, Any], where: str) -> None:
    for name in arguments:
        if name not in family.arguments:
            legal = ", ".join(sorted(family.arguments)) or "no arguments"
            raise PlanError("HP560", f"{family.name} has no argument {name!r}", expected=legal, where=where)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _put(model: nn.Module, fqn: str, module: nn.Module, undo: list[tuple[nn.Module, str, nn.Module]]) -> None:
    parent_name, _, name = fqn.rpartition(".")
    parent = model.get_submodule(parent_name)
    undo.append((parent, name, parent.get_submodule(name)))
    parent._modules[name] = module


def _check_ties(model: nn.Module, before: Mapping[str, str]) -> None:
    after = parameter_aliases(model)
    for name, canonical in before.items():
        if after.get(name) != canonical:
            raise PlanError("HP541", f"{name} and {canonical} are no longer one parameter", expected="a tie that stays")
