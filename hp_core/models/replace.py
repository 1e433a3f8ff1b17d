"""Replacing modules: rules are compiled against the model, candidates prepared, then installed together or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
from torch import nn

from hp_core.contracts.adapter import Replacement
from hp_core.contracts.family import FamilyContext, FamilyRequest, ModuleFamily, ResolvedFamily
from hp_core.contracts.plan import ReplacementPlan
from hp_core.errors import PlanError, suggest
from hp_core.models.inventory import class_path, original_class, parameter_aliases
from hp_core.models.members import Source, construct, resolve_member
from hp_core.models.replace_checks import check_candidate, check_source
from hp_core.models.snapshot import take_snapshot
from hp_core.models.state import update
from hp_core.plugins.lazy import load
from hp_core.plugins.places import defined

Names = Mapping[int, tuple[tuple[str, ...], nn.Module]]  # id of a module -> all its names, and the module


@attrs.frozen(kw_only=True)
class Rule:
    """A declared replacement: ``priority`` 0 for the adapter, 1 for the recipe, which has the last word on a module.

    ``id`` names the rule in records and events, the same in every run, e.g. ``"overrides.2"``. ``author``: the plugin of the
    family; ``asker``: that of the adapter, empty for a rule of the recipe.
    """

    replacement: Replacement
    family: ModuleFamily
    declared_by: str
    priority: int = 0
    id: str = ""
    author: str = ""
    asker: str = ""

    def where(self, fqn: str) -> str:
        """The module and on whose word it is replaced, for errors."""
        return f"{fqn}, {self.declared_by}" + (f", {self.asker}" if self.asker else "")


@attrs.frozen(kw_only=True, eq=False)
class Target:
    """One module to replace, under all its names (a shared module has several), the rule that hit it, and the member."""

    fqns: tuple[str, ...]
    module: nn.Module
    rule: Rule
    resolved: ResolvedFamily

    @property
    def where(self) -> str:
        """The module and on whose word it is replaced, for errors."""
        return self.rule.where(self.fqns[0])

    @property
    def between(self) -> str:
        """The same with whose member it is: the two sides of a member that does not fit its place."""
        by = self.rule.author and f". {self.rule.author}. {defined(load(self.resolved.constructor))}"
        return self.where + by.removesuffix(". ")

    @property
    def record(self) -> ReplacementPlan:
        """The replacement as plain data."""
        return ReplacementPlan(
            fqn=self.fqns[0],
            source=class_path(original_class(type(self.module))),
            family=self.rule.family.name,
            constructor=self.resolved.constructor,
            declared_by=self.rule.declared_by,
            arguments=self.resolved.arguments,
            rule=self.rule.id,
            variant=self.resolved.variant,
            selectors=self.resolved.selectors,
            degrees=self.resolved.degrees,
            aliases=self.fqns[1:],
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
        self.names = tuple(names)
        pattern, declared_by = self.unmatched[0]
        others = f", nor {', '.join(repr(other) for other, _ in self.unmatched[1:])}" if self.unmatched[1:] else ""
        what = f"the replacement pattern {pattern!r} matches no module{suggest(pattern, self.names)}{others}"
        super().__init__("HP540", what, where=declared_by)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.unmatched, self.names)


def compile_rules(model: nn.Module, rules: Sequence[Rule], *, context: FamilyContext | None = None) -> tuple[Target, ...]:
    """Return the modules that ``rules`` replace, in module order. Pure: reads the model and changes nothing.

    ``context``: the degrees that deferred families are resolved with. HP540: a pattern that hits nothing, another class than
    declared, a module hit by two rules of one priority, a module and its descendant both hit; HP560: a family refuses its
    arguments.
    """
    names = names_by_module(model)
    _check_every_pattern_hits(names, rules)
    targets: dict[int, Target] = {}
    for rule in sorted(rules, key=lambda rule: rule.priority):
        for key, (fqns, module) in names.items():
            if _hits(rule, fqns):
                check_source_type(rule.replacement, fqns[0], module, where=rule.declared_by)
                targets[key] = _claim(targets.get(key), _target(rule, fqns, module, context or FamilyContext()))
    ordered = tuple(targets[key] for key in names if key in targets)
    _check_not_nested(ordered)
    return ordered


def prepare(targets: Sequence[Target], *, context: FamilyContext | None = None, mesh: Any = None) -> tuple[Candidate, ...]:
    """Return a checked candidate for every target; sources and model stay as they were, also if one fails. HP541, HP560.

    ``context`` and ``mesh`` are offered to members that ask for them.
    """
    candidates = tuple(_prepare_one(target, context=context or FamilyContext(), mesh=mesh) for target in targets)
    _check_distinct(candidates)
    return candidates


def install(model: nn.Module, candidates: Sequence[Candidate]) -> None:
    """Put every candidate in its place, or, if anything fails, leave the model as it was.

    Shared parameters stay shared: a tie that a candidate would break is HP541.
    """
    ties, before = parameter_aliases(model), take_snapshot(model)
    try:
        for candidate in candidates:
            for fqn in candidate.target.fqns:
                parent_name, _, name = fqn.rpartition(".")
                model.get_submodule(parent_name)._modules[name] = candidate.module
        _check_ties(model, ties, candidates)
        for candidate in candidates:
            _record_provenance(candidate)
    except BaseException:
        before.restore()
        raise


def check_source_type(replacement: Replacement, fqn: str, module: nn.Module, *, where: str) -> None:
    """Raise HP540 unless the module's class, or a base of it, is the declared one; compared as text, nothing is imported."""
    cls = original_class(type(module))
    classes = (cls,) if replacement.exact_type else cls.__mro__
    if not any(_is_called(base, replacement.source_type) for base in classes):
        expected = ("exactly " if replacement.exact_type else "") + replacement.source_type
        raise PlanError("HP540", f"{fqn} is a {cls.__qualname__}", expected=expected, where=where)


def names_by_module(model: nn.Module) -> dict[int, tuple[tuple[str, ...], nn.Module]]:
    """Return every module below ``model`` once, with all its names, in module order."""
    found: dict[int, tuple[tuple[str, ...], nn.Module]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if fqn:
            found[id(module)] = ((*found.get(id(module), ((), module))[0], fqn), module)
    return found


def _is_called(cls: type, text: str) -> bool:
    dotted = f"{cls.__module__}.{cls.__qualname__}"
    names = (cls.__qualname__, dotted, f"{cls.__module__}:{cls.__qualname__}")
    return text in names or (text.startswith("...") and dotted.endswith("." + text[3:]))


def _target(rule: Rule, fqns: tuple[str, ...], module: nn.Module, context: FamilyContext) -> Target:
    where, arguments = rule.where(fqns[0]), rule.replacement.arguments
    resolved = resolve_member(rule.family, arguments, context=context, where=where, author=rule.author)
    return Target(fqns=fqns, module=module, rule=rule, resolved=resolved)


def _hits(rule: Rule, fqns: Sequence[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in rule.replacement.match for fqn in fqns)


def _check_every_pattern_hits(names: Names, rules: Sequence[Rule]) -> None:
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


def _prepare_one(target: Target, *, context: FamilyContext, mesh: Any) -> Candidate:
    check_source(target.module, where=target.where)
    source = Source(module=target.module, module_fqn=target.fqns[0], context=context, mesh=mesh)
    before = take_snapshot(target.module)
    try:
        module = construct(target.resolved, source, where=target.where, author=target.rule.author)
    finally:
        before.restore()  # a constructor may have taken its source apart
    check_candidate(target.module, module, transforms=target.rule.family.transforms, where=target.between)
    return Candidate(target=target, module=module)


def _check_distinct(candidates: Sequence[Candidate]) -> None:
    first: dict[int, Candidate] = {}
    for candidate in candidates:
        other = first.setdefault(id(candidate.module), candidate)
        if other is not candidate:
            what = f"the candidate is also that of {other.target.fqns[0]}"
            raise PlanError("HP541", what, expected="a module for each", where=candidate.target.where)


def _record_provenance(candidate: Candidate) -> None:
    target, record = candidate.target, candidate.target.record
    update(
        candidate.module,
        record.fqn,
        family=record.family,
        source=record.source,
        declared_by=record.declared_by,
        request=FamilyRequest(target=record.family, kwargs=target.rule.replacement.arguments),
        resolved=target.resolved,
        origin="replacement",
    )


def _check_ties(model: nn.Module, before: Mapping[str, str], candidates: Sequence[Candidate]) -> None:
    after = parameter_aliases(model)
    shared = [candidate.target.fqns for candidate in candidates if len(candidate.target.fqns) > 1]
    for name, canonical in before.items():
        if after.get(name) != canonical and not any(_of_one_module(name, canonical, fqns) for fqns in shared):
            raise PlanError("HP541", f"{name} and {canonical} are no longer one parameter", expected="a tie that stays")


def _of_one_module(name: str, canonical: str, fqns: Sequence[str]) -> bool:
    """Whether both are one parameter of the module called ``fqns``: they stay one, also where it is joined with others."""
    paths = [{full[len(fqn) :] for fqn in fqns if full.startswith(f"{fqn}.")} for full in (name, canonical)]
    return bool(paths[0] & paths[1])
