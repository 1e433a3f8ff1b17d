"""What ``build()`` and ``build_family()`` tell their observers: typed events. An observer is any callable that takes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from hp_core.contracts.plan import BuildPlan, ReplacementPlan


@attrs.frozen(kw_only=True)
class ReplacementsDeclared:
    """The rules of the adapter and the recipe were compiled against the model: ``replacements``, in module order."""

    replacements: tuple[ReplacementPlan, ...]


@attrs.frozen(kw_only=True)
class ReplacementUnmatched:
    """A rule's ``pattern`` matches no module; the error HP540 follows."""

    pattern: str
    declared_by: str


@attrs.frozen(kw_only=True)
class ReplacementApplied:
    """One replacement is installed."""

    replacement: ReplacementPlan


@attrs.frozen(kw_only=True)
class PlanReady:
    """The plan is made; the model is still on meta and unsharded."""

    plan: BuildPlan


@attrs.frozen(kw_only=True)
class PlanNotRequired:
    """Nothing is planned; ``reason`` says why, e.g. that a component is built without a mesh."""

    reason: str


Event = ReplacementsDeclared | ReplacementUnmatched | ReplacementApplied | PlanReady | PlanNotRequired
Observer = Callable[[Event], None]


def notify(observers: Iterable[Observer], event: Event) -> None:
    """Hand ``event`` to every observer, in order. What an observer raises stops the build."""
    for observer in observers:
        observer(event)
