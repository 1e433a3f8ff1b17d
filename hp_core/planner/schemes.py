"""Which dtype every boundary computes in: the recipe's, a precision scheme's, or float32 where the adapter says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from hp_core.contracts import Inventory, ModelAdapter, OverrideChange, PrecisionScheme, SchemePlan
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.describe import Described, ancestors, in_any
from hp_core.planner.overrides import Entry, entries, matched
from hp_core.recipe.overrides import is_active
from hp_core.recipe.schema import Recipe

WIDTH = {"float8_e4m3fn": 0, "float8_e5m2": 0, "float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}


@attrs.frozen(kw_only=True)
class Scope:
    """A scheme and where it holds: the modules in ``fqns`` and below; ``rule`` and ``where`` say on whose word."""

    scheme: PrecisionScheme
    fqns: frozenset[str]
    rule: str
    where: str


@attrs.frozen(kw_only=True)
class Dtypes:
    """The dtypes of one plan.

    - ``compute``: FQN of a boundary -> dtype that it computes in. ``default``: the recipe's.
    - ``scopes``: the schemes in use, the last one that holds for a module wins.
    - ``explicit``: whether boundaries differ by a scheme, so that each must cast what arrives.
    - ``runs``: the code that schemes run on boundaries.
    """

    default: str
    compute: Mapping[str, str]
    scopes: tuple[Scope, ...] = ()
    explicit: bool = False
    changes: tuple[OverrideChange, ...] = ()
    runs: tuple[SchemePlan, ...] = ()

    def base(self, fqn: str) -> str:
        """Return the dtype of what lies at ``fqn`` but in no boundary, an FSDP unit for example."""
        scope = scope_of(fqn, self.scopes)
        return self.default if scope is None else scope.scheme.compute

    def cast(self, fqn: str) -> str | None:
        """Return the dtype that a boundary casts its floating inputs to; None: they are right as they come."""
        dtype = self.compute[fqn]
        return dtype if self.explicit or dtype != self.default else None

    def schemed(self, fqn: str) -> bool:
        """Return whether a scheme holds at ``fqn``."""
        return scope_of(fqn, self.scopes) is not None


def at_least(dtype: str, other: str) -> str:
    """Return the wider of two dtypes, the first if they are as wide."""
    return other if WIDTH[other] > WIDTH[dtype] else dtype


def plan_dtypes(inventory: Inventory, described: Sequence[Described], *, recipe: Recipe, topology: Topology) -> Dtypes:
    """Return the dtype of every boundary.

    HP531: a scheme that a family in its scope does not support; HP532: one that changes no boundary; HP527: an override that
    matches nothing; HP561: one that runs code on a component that was built by itself.
    """
    scopes = _scopes(inventory, recipe=recipe, topology=topology)
    adapter = recipe.adapter
    before = _plain_dtypes(described, recipe=recipe)
    sources = {record.fqn: record.source for record in inventory.replacements if record.kind == "module"}
    compute = {}
    for item in described:
        fqn = item.info.fqn
        scope = scope_of(fqn, scopes)
        compute[fqn] = before[fqn] if scope is None else _of_scheme(scope.scheme, item, sources.get(fqn), adapter=adapter)
    _check_members(inventory, described, scopes)
    _check_used(described, scopes, before=before, after=compute)
    return Dtypes(
        default=recipe.compute,
        compute=compute,
        scopes=scopes,
        explicit=bool(scopes) and len({*compute.values(), recipe.compute}) > 1,
        changes=tuple(_changes(described, scopes, before=before, after=compute)),
        runs=tuple(_runs(described, scopes, compute=compute)),
    )


def scope_of(fqn: str, scopes: Sequence[Scope]) -> Scope | None:
    """Return the scope that holds at ``fqn``: the last one that names it or a module around it."""
    names = {fqn, *ancestors(fqn)}
    return next((scope for scope in reversed(scopes) if names & scope.fqns), None)


def _scopes(inventory: Inventory, *, recipe: Recipe, topology: Topology) -> tuple[Scope, ...]:
    found = []
    if recipe.precision.scheme is not None:
        where = recipe.where("precision.scheme")
        found.append(_scope(recipe, recipe.precision.scheme, {""}, rule="precision.scheme", where=where))
    for entry in entries(recipe):
        name = entry.override.scheme
        if name is not None and is_active(entry.override, topology=topology, compute=recipe.compute):
            found.append(_scope(recipe, name, _fqns(entry, inventory), rule=entry.id, where=entry.where))
    return tuple(found)


def _fqns(entry: Entry, inventory: Inventory) -> set[str]:
    return {info.fqn for info in matched(entry, inventory)}


def _scope(recipe: Recipe, name: str, fqns: set[str], *, rule: str, where: str) -> Scope:
    scheme = recipe.declarations.scheme(name, where=where)
    return Scope(scheme=scheme, fqns=frozenset(fqns), rule=rule, where=where)


def _plain_dtypes(described: Sequence[Described], *, recipe: Recipe) -> dict[str, str]:
    """Return the dtypes without any scheme: the recipe's, at least float32 for the adapter's ``fp32``."""
    plain = recipe.precision.compute or recipe.model.dtype
    fp32 = at_least(plain, "float32")
    return {item.info.fqn: fp32 if in_any(item.info.fqn, recipe.adapter.fp32) else plain for item in described}


def _of_scheme(scheme: PrecisionScheme, item: Described, source: str | None, *, adapter: ModelAdapter) -> str:
    names = [item.info.family, item.info.class_name, source and source.rpartition(":")[2]]
    named = next((scheme.modules[name] for name in names if name and name in scheme.modules), None)
    dtype = named or scheme.roles.get(item.role or "", scheme.compute)
    return at_least(dtype, "float32") if in_any(item.info.fqn, adapter.fp32) else dtype


def _check_members(inventory: Inventory, described: Sequence[Described], scopes: Sequence[Scope]) -> None:
    variants = {record.fqn: record.variant for record in inventory.replacements}
    for item in described:
        scope, family = scope_of(item.info.fqn, scopes), item.info.family
        if scope is None or family is None or not scope.scheme.members:
            continue
        variant = variants.get(item.info.fqn, "baseline")
        if not {family, f"{family}/{variant}"} & set(scope.scheme.members):
            raise PlanError(
                "HP531",
                f"the scheme {scope.scheme.name!r} is not supported by {family}/{variant}, which is {item.info.fqn}",
                expected=f"one of {', '.join(scope.scheme.members)}",
                where=scope.where,
            )


def _check_used(
    described: Sequence[Described], scopes: Sequence[Scope], *, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    for scope in scopes:
        inside = [item.info.fqn for item in described if scope_of(item.info.fqn, scopes) is scope]
        if any(before[fqn] != after[fqn] for fqn in inside) or (inside and scope.scheme.implementation is not None):
            continue
        why = f"its {len(inside)} boundaries compute in these dtypes already" if inside else "no boundary takes it"
        what = f"the scheme {scope.scheme.name!r} is enabled but changes nothing: {why}"
        raise PlanError("HP532", what, expected="a boundary that it changes", where=scope.where, fix=f"remove {scope.rule}")


def _runs(described: Sequence[Described], scopes: Sequence[Scope], *, compute: Mapping[str, str]) -> Iterator[SchemePlan]:
    for item in described:
        fqn = item.info.fqn
        scope = scope_of(fqn, scopes)
        if scope is None or scope.scheme.implementation is None:
            continue
        if item.info.built is not None:
            what = f"{fqn} was built by itself, without the scheme {scope.scheme.name!r}, which runs code on it"
            raise PlanError("HP561", what, expected="a component that the plan builds", where=scope.where)
        yield SchemePlan(
            fqn=fqn,
            scheme=scope.scheme.name,
            implementation=scope.scheme.implementation,
            compute=compute[fqn],
            declared_by=scope.where,
        )


def _changes(
    described: Sequence[Described], scopes: Sequence[Scope], *, before: Mapping[str, str], after: Mapping[str, str]
) -> list[OverrideChange]:
    found = []
    for item in described:
        fqn = item.info.fqn
        scope = scope_of(fqn, scopes)
        code = scope.scheme.implementation if scope is not None else None
        if scope is not None and (before[fqn] != after[fqn] or code is not None):
            change = OverrideChange(
                fqn=fqn,
                field=f"scheme {scope.scheme.name}",
                before=before[fqn],
                after=after[fqn] if code is None else f"{after[fqn]} by {code}",
                declared_by=scope.where,
                rule=scope.rule,
            )
            found.append(change)
    return found
