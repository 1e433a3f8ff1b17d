"""All replacements of a model at once: declared, prepared, installed and told to observers, or the model is as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hp_core.contracts.family import FamilyContext
from hp_core.contracts.plan import ReplacementPlan
from hp_core.models.observers import Observer, ReplacementApplied, ReplacementsDeclared, ReplacementUnmatched, notify
from hp_core.models.replace import ModuleReplacementMatchError, Rule, Target, compile_rules, install, prepare
from hp_core.models.replace_methods import MethodRule, compile_methods, install_methods
from hp_core.models.snapshot import take_snapshot


def replace_all(
    model: nn.Module,
    rules: Sequence[Rule],
    *,
    methods: Sequence[MethodRule] = (),
    context: FamilyContext | None = None,
    mesh: Any = None,
    observers: Iterable[Observer] = (),
) -> tuple[ReplacementPlan, ...]:
    """Replace modules by ``rules``, then methods of what is there afterwards, and return the records, modules first.

    Whatever fails (HP540, HP541, HP560, an observer), the model is left exactly as it was.
    """
    observers = tuple(observers)
    before = take_snapshot(model)
    try:
        return _replace(model, rules, methods, context=context or FamilyContext(), mesh=mesh, observers=observers)
    except ModuleReplacementMatchError as error:
        before.restore()
        for pattern, declared_by in error.unmatched:
            notify(observers, ReplacementUnmatched(pattern=pattern, declared_by=declared_by))
        raise
    except BaseException:
        before.restore()
        raise


def _replace(
    model: nn.Module,
    rules: Sequence[Rule],
    methods: Sequence[MethodRule],
    *,
    context: FamilyContext,
    mesh: Any,
    observers: tuple[Observer, ...],
) -> tuple[ReplacementPlan, ...]:
    targets: tuple[Target, ...] = compile_rules(model, rules, context=context)
    declared = tuple(target.record for target in targets)
    notify(observers, ReplacementsDeclared(replacements=declared))
    install(model, prepare(targets, context=context, mesh=mesh))
    changed = compile_methods(model, methods)
    records = (*declared, *(target.record for target in changed))
    install_methods(model, changed)
    for record in records:
        notify(observers, ReplacementApplied(replacement=record))
    return records
