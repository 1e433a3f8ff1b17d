"""Replacing one method of the modules that a recipe names: a class derived from theirs, never a patched class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
from torch import nn

from hp_core.contracts.adapter import Replacement
from hp_core.contracts.family import ModuleFamily
from hp_core.contracts.plan import ReplacementPlan
from hp_core.errors import PlanError, suggest
from hp_core.models.inventory import WRAPPED, class_path, original_class
from hp_core.models.replace import ModuleReplacementMatchError, check_source_type
from hp_core.models.replace_checks import call_problem
from hp_core.models.snapshot import take_snapshot
from hp_core.plugins.lazy import load


@attrs.frozen(kw_only=True)
class MethodRule:
    """A declared replacement of a method: ``match`` ends in its name; the family's baseline is the function to put there."""

    match: str
    family: ModuleFamily
    declared_by: str
    source_type: str | None = None
    exact_type: bool = False
    id: str = ""


@attrs.frozen(kw_only=True, eq=False)
class MethodTarget:
    """One method of one module, and the checked function that takes its place."""

    fqn: str
    method: str
    module: nn.Module
    function: Callable[..., Any]
    rule: MethodRule

    @property
    def record(self) -> ReplacementPlan:
        """The replacement as plain data."""
        return ReplacementPlan(
            fqn=f"{self.fqn}.{self.method}" if self.fqn else self.method,
            source=f"{class_path(original_class(type(self.module)))}.{self.method}",
            family=self.rule.family.name,
            constructor=self.rule.family.baseline,
            declared_by=self.rule.declared_by,
            kind="method",
            rule=self.rule.id,
        )


def compile_methods(model: nn.Module, rules: Sequence[MethodRule]) -> tuple[MethodTarget, ...]:
    """Return the methods that ``rules`` replace. Pure: reads the model and changes nothing.

    HP540: a pattern that hits no module, a class that lacks the method or is another one than declared, a method hit by two
    rules; HP541: something else than a function, or one that refuses a legal call of the method.
    """
    targets: dict[tuple[int, str], MethodTarget] = {}
    for rule in rules:
        for target in _targets(model, rule):
            earlier = targets.setdefault((id(target.module), target.method), target)
            if earlier is not target:
                by = f"{earlier.rule.declared_by} and by {rule.declared_by}"
                raise PlanError("HP540", f"{target.record.fqn} is replaced twice: by {by}", expected="one rule for a method")
    return tuple(targets.values())


def install_methods(model: nn.Module, targets: Sequence[MethodTarget]) -> None:
    """Give every target's module a class with the new method, or, if anything fails, leave the model as it was."""
    before = take_snapshot(model)
    try:
        for target in targets:
            target.module.__class__ = _with_method(type(target.module), target.method, target.function)  # type: ignore[arg-type]
    except BaseException:
        before.restore()
        raise


def _targets(model: nn.Module, rule: MethodRule) -> list[MethodTarget]:
    pattern, _, method = rule.match.rpartition(".")
    hits = [(fqn, module) for fqn, module in model.named_modules() if fnmatchcase(fqn, pattern)]
    if not hits:
        raise ModuleReplacementMatchError(
            [(rule.match, rule.declared_by)], [f"{fqn}.{method}" for fqn, _ in model.named_modules()]
        )
    function = load(rule.family.baseline)
    if not inspect.isfunction(function):
        what = f"{rule.family.name} is a {type(function).__name__}, {rule.family.baseline}"
        raise PlanError("HP541", what, expected="a function (self, ...), to replace a method", where=rule.declared_by)
    return [_target(fqn, module, method, function, rule) for fqn, module in hits]


def _target(fqn: str, module: nn.Module, method: str, function: Callable[..., Any], rule: MethodRule) -> MethodTarget:
    cls = original_class(type(module))
    where = f"{fqn}.{method}, {rule.declared_by}" if fqn else f"{method}, {rule.declared_by}"
    if rule.source_type is not None:
        replacement = Replacement(
            match=rule.match, implementation=rule.family.name, source_type=rule.source_type, exact_type=rule.exact_type
        )
        check_source_type(replacement, fqn, module, where=rule.declared_by)
    source = getattr(cls, method, None)
    if not inspect.isfunction(source) or source is getattr(nn.Module, method, None):
        own = [
            name for name, value in inspect.getmembers(cls, inspect.isfunction) if getattr(nn.Module, name, None) is not value
        ]
        what = f"{fqn or 'the root'} ({cls.__qualname__}) has no method {method!r}{suggest(method, own)}"
        raise PlanError("HP540", what, expected="a method that its class defines", where=rule.declared_by)
    problem = call_problem(inspect.signature(source), inspect.signature(function))
    if problem:
        raise PlanError(
            "HP541",
            f"{rule.family.name}{inspect.signature(function)} {problem}",
            expected=f"every call of {method}{inspect.signature(source)} to work",
            where=where,
        )
    return MethodTarget(fqn=fqn, method=method, module=module, function=function, rule=rule)


@functools.cache
def _with_method(cls: type[nn.Module], method: str, function: Callable[..., Any]) -> type[nn.Module]:
    """Return the class derived from ``cls`` with ``function`` as its method; it keeps name and module path."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, WRAPPED: cls}
    return type(cls.__name__, (cls,), {**names, method: function})
