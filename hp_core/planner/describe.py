"""Which module is a boundary and what describes it: layout rules and families matched against the inventory, fail closed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from hp_core.contracts import (
    Inventory,
    LayoutContext,
    LayoutRule,
    ModelAdapter,
    ModuleFamily,
    ModuleInfo,
    ModuleShardingSpec,
    NativeParallelBindingRequest,
    ParallelModuleSpec,
)
from hp_core.errors import PlanError
from hp_core.plugins.lazy import call, load
from hp_core.plugins.places import defined


class Names(Protocol):
    """What describing needs to know about the plugins: families by name, and how to name a declaration's owner."""

    def family(self, name: str) -> ModuleFamily:
        """Return the family called ``name``."""

    def credit(self, kind: str, name: str) -> str:
        """Return ``"family NAME (DISTRIBUTION VERSION)"``."""


@attrs.frozen(kw_only=True)
class Described:
    """A module with the layout that describes it, on whose word, the rule that counted it, and what it is for.

    ``parallel``: how it communicates by itself, from its class or from the adapter's bindings. ``kernels``: operators of a
    module of the model's own class that are computed through kernels. ``source``: the file and line of the function that gave
    the layout, if the layout is as it gave it.
    """

    info: ModuleInfo
    spec: ModuleShardingSpec
    declared_by: str
    rule: str | None = None
    family: ModuleFamily | None = None
    role: str | None = None
    parallel: ParallelModuleSpec | None = None
    kernels: tuple[str, ...] = ()
    source: str = attrs.field(default="", eq=False)

    @property
    def fix(self) -> str:
        """What to correct if the layout is wrong, where that is known."""
        return f"correct {self.source}" if self.source else ""


def describe_modules(
    inventory: Inventory, *, adapter: ModelAdapter, names: Names, context: LayoutContext, sources: Mapping[str, str]
) -> tuple[Described, ...]:
    """Return every boundary in inventory order.

    ``sources``: FQN of a replaced module -> class name of what it replaced, which is the class that the rules know.
    HP520: a rule matches another number of modules than the adapter counts, two rules match one module, a module of a
    class that rules describe is matched by none and lies in no boundary.
    """
    outside = [info for info in inventory.modules if not in_any(info.fqn, adapter.isolated_subtrees)]
    matched = _match_rules(outside, adapter=adapter, sources=sources, inventory=inventory)
    _check_counts(matched, adapter=adapter, config=inventory.config)
    described = tuple(
        _describe(info, rule=matched.get(info.fqn), adapter=adapter, names=names, context=context)
        for info in outside
        if info.fqn in matched or (info.family is not None and names.family(info.family).sharding is not None)
    )
    described = _bind_natively(inventory, described, adapter=adapter, credit=names.credit("adapter", adapter.name))
    _check_forgotten(outside, described, adapter=adapter, sources=sources)
    return described


def in_any(fqn: str, patterns: Iterable[str]) -> bool:
    """Return whether ``fqn`` or a module around it matches one of ``patterns``."""
    patterns = tuple(patterns)
    return bool(patterns) and any(fnmatch.fnmatchcase(name, pattern) for name in (fqn, *ancestors(fqn)) for pattern in patterns)


def ancestors(fqn: str) -> Iterable[str]:
    """Yield the FQNs of the modules around ``fqn``, inner first, the root ``""`` last."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def nearest(fqn: str, fqns: Mapping[str, object]) -> str | None:
    """Return ``fqn`` itself or the innermost module around it that is in ``fqns``; None if there is none."""
    return next((name for name in (fqn, *ancestors(fqn)) if name in fqns), None)


def _known_class(info: ModuleInfo, sources: Mapping[str, str]) -> str:
    return sources.get(info.fqn, info.cls)


def _same_class(cls: str, declared: str) -> bool:
    """Compare classes in full when both are given in full, else by class name."""
    return cls == declared if ":" in cls and ":" in declared else cls.rpartition(":")[2] == declared.rpartition(":")[2]


def _match_rules(
    modules: Sequence[ModuleInfo], *, adapter: ModelAdapter, sources: Mapping[str, str], inventory: Inventory
) -> dict[str, LayoutRule]:
    matched: dict[str, LayoutRule] = {}
    for info in modules:
        hits = [
            rule
            for rule in adapter.layout
            if _same_class(_known_class(info, sources), rule.module_class)
            and any(fnmatch.fnmatchcase(name, rule.match) for name in inventory.names(info.fqn))
        ]
        if len(hits) > 1:
            raise PlanError(
                "HP520",
                f"{info.fqn} is matched by the layout rules {' and '.join(repr(rule.name) for rule in hits)}",
                expected="one rule per module",
                where=f"adapter {adapter.name}",
            )
        if hits:
            matched[info.fqn] = hits[0]
    return matched


def _check_counts(matched: Mapping[str, LayoutRule], *, adapter: ModelAdapter, config: Mapping[str, object]) -> None:
    counts: Mapping[str, int] = call(adapter.counts, config, gives=Mapping) if adapter.counts else {}
    for rule in adapter.layout:
        if rule.name not in counts:
            raise PlanError("HP520", f"adapter {adapter.name} gives no count for its layout rule {rule.name!r}")
        found = sum(hit.name == rule.name for hit in matched.values())
        if found != counts[rule.name]:
            raise PlanError(
                "HP520",
                f"layout rule {rule.name!r} ({rule.module_class} at {rule.match}) matches {found} modules",
                expected=str(counts[rule.name]),
                where=f"adapter {adapter.name}",
            )


def _describe(
    info: ModuleInfo, *, rule: LayoutRule | None, adapter: ModelAdapter, names: Names, context: LayoutContext
) -> Described:
    family = names.family(info.family) if info.family is not None else None
    if family is not None and family.sharding is not None:
        provider, credit = family.sharding, names.credit("family", family.name)
    else:
        assert rule is not None, info.fqn
        provider, credit = rule.provider, f"{names.credit('adapter', adapter.name)}, rule {rule.name}"
    role = (family.role if family is not None else None) or (rule.role if rule is not None else None)
    return Described(
        info=info,
        spec=call(provider, info, context, gives=ModuleShardingSpec),
        declared_by=credit,
        rule=rule.name if rule else None,
        family=family,
        role=role,
        parallel=info.parallel,
        source=defined(load(provider)),
    )


def _bind_natively(
    inventory: Inventory, described: Sequence[Described], *, adapter: ModelAdapter, credit: str
) -> tuple[Described, ...]:
    """Give modules of the model's own classes what the adapter's bindings say; one with a layout becomes a boundary.

    A module that is built from a family itself is passed over: its class says how it communicates. HP527: a pattern hits
    nothing; HP581: it hits a module inside one of a family, two requests hit one module, or a request without a layout hits a
    module that nothing describes.
    """
    found = {item.info.fqn: item for item in described}
    owned = {info.fqn: info.family for info in inventory.modules if info.family is not None}
    for request in adapter.bindings:
        for pattern in request.match:
            hits = [info for info in inventory.modules if fnmatch.fnmatchcase(info.fqn, pattern)]
            if not hits:
                raise PlanError("HP527", f"the binding pattern {pattern!r} matches no module", where=f"adapter {adapter.name}")
            for info in (hit for hit in hits if hit.fqn not in owned):
                _check_native(info, owned, found, request, adapter=adapter)
                item = found.get(info.fqn) or Described(info=info, spec=ModuleShardingSpec(), declared_by=credit)
                if request.sharding is not None:
                    item = attrs.evolve(item, spec=request.sharding, source="")
                found[info.fqn] = attrs.evolve(item, parallel=request.parallel, kernels=request.kernels)
    return tuple(found[info.fqn] for info in inventory.modules if info.fqn in found)


def _check_native(
    info: ModuleInfo,
    owned: Mapping[str, str],
    found: Mapping[str, Described],
    request: NativeParallelBindingRequest,
    *,
    adapter: ModelAdapter,
) -> None:
    around = nearest(info.fqn, owned)
    taken = found[info.fqn].parallel if info.fqn in found else None
    if around is not None:
        what, expected = f"lies in the component {owned[around]} at {around}", "a module of the model's own classes"
    elif taken is not None:
        what, expected = f"communicates by {taken.protocol} already", "one owner"
    elif request.sharding is None and info.fqn not in found:
        what, expected = "has no layout", "a layout in the request, or a layout rule for its class"
    else:
        return
    raise PlanError("HP581", f"a binding hits {info.fqn}, which {what}", expected=expected, where=f"adapter {adapter.name}")


def _check_forgotten(
    modules: Sequence[ModuleInfo], described: Sequence[Described], *, adapter: ModelAdapter, sources: Mapping[str, str]
) -> None:
    """Raise HP520 for a module that lies in no boundary although it has parameters or its class has a rule."""
    boundaries = {item.info.fqn: item for item in described}
    for info in modules:
        if nearest(info.fqn, boundaries) is not None:
            continue
        rules = [rule.name for rule in adapter.layout if _same_class(_known_class(info, sources), rule.module_class)]
        if not rules and not info.parameters:
            continue
        reason = f"rule {rules[0]!r} describes its class elsewhere" if rules else "it has parameters"
        raise PlanError(
            "HP520",
            f"{info.fqn} ({info.class_name}) is matched by no layout rule and lies in no boundary, but {reason}",
            expected="a rule for it",
            where=f"adapter {adapter.name}",
        )
