"""Overrides of layouts: what a recipe says about a boundary is merged into what its declaration derived, and told.

Pure: described boundaries in, described boundaries and a list of changes out. Ownership, coverage and flow are checked
afterwards, on the result.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from hp_core.contracts import Inventory, Layout, ModuleInfo, ModuleShardingSpec, OverrideChange, ParameterPlan
from hp_core.contracts.placement import describe
from hp_core.errors import PlanError, suggest
from hp_core.mesh.topology import Topology
from hp_core.planner.describe import Described, in_any, nearest
from hp_core.planner.drafts import draft
from hp_core.recipe.overrides import LAYOUT_FIELDS, Override, is_active
from hp_core.recipe.schema import Recipe


@attrs.frozen(kw_only=True)
class Overridden:
    """The boundaries as derived and after all overrides, what changed, and the FQNs of those that only an override declares."""

    derived: tuple[Described, ...]
    described: tuple[Described, ...]
    changes: tuple[OverrideChange, ...]
    added: frozenset[str] = frozenset()

    @property
    def written(self) -> dict[str, str]:
        """Where the last override that changed a boundary is written, by the boundary's FQN."""
        return {change.fqn: change.declared_by for change in self.changes}


@attrs.frozen(kw_only=True)
class Entry:
    """One override of the recipe: its id (``"overrides.2"``) and where it is written."""

    override: Override
    id: str
    where: str

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of modules; the name of a replaced method is cut off."""
        replace = self.override.replace
        if replace is not None and replace.kind == "method":
            return tuple(match.rpartition(".")[0] for match in self.override.match)
        return self.override.match

    def change(self, fqn: str, field: str, before: str, after: str) -> OverrideChange:
        """Return the change that this entry made."""
        return OverrideChange(fqn=fqn, field=field, before=before, after=after, declared_by=self.where, rule=self.id)


def entries(recipe: Recipe) -> tuple[Entry, ...]:
    """Return the recipe's overrides in order."""
    return tuple(
        Entry(override=override, id=f"overrides.{index}", where=recipe.where(f"overrides.{index}"))
        for index, override in enumerate(recipe.overrides)
    )


def matched(entry: Entry, inventory: Inventory) -> tuple[ModuleInfo, ...]:
    """Return the modules that the entry's patterns match under any of their names; HP527 for a pattern that matches none."""
    found: dict[str, ModuleInfo] = {}
    for pattern in entry.patterns:
        hits = {i.fqn: i for i in inventory.modules if any(fnmatch.fnmatchcase(n, pattern) for n in inventory.names(i.fqn))}
        if not hits:
            names = [name for info in inventory.modules for name in inventory.names(info.fqn)]
            what = f"the override pattern {pattern!r} matches no module{suggest(pattern, names)}"
            raise PlanError("HP527", what, expected="an fnmatch pattern of module names", where=entry.where)
        found.update(hits)
    return tuple(info for info in inventory.modules if info.fqn in found)


def apply_overrides(inventory: Inventory, described: Sequence[Described], *, recipe: Recipe, topology: Topology) -> Overridden:
    """Return the boundaries with the recipe's layout overrides merged in, in inventory order.

    An override that waits for an axis or precision that is not in use changes nothing, but its pattern must match. HP527: a
    pattern that matches nothing; HP530: ``auto`` where nothing is declared, a new boundary that is not declared whole.
    """
    boundaries = {item.info.fqn: item for item in described}
    changes = list(_replaced(inventory))
    for entry in entries(recipe):
        modules = matched(entry, inventory)
        if not entry.override.layouts or not is_active(entry.override, topology=topology, compute=recipe.compute):
            continue
        for info in modules:
            changes += _apply(entry, info, boundaries, inventory=inventory, isolated=recipe.adapter.isolated_subtrees)
    order = {info.fqn: place for place, info in enumerate(inventory.modules)}
    return Overridden(
        derived=tuple(described),
        described=tuple(sorted(boundaries.values(), key=lambda item: order[item.info.fqn])),
        changes=tuple(changes),
        added=frozenset(boundaries) - {item.info.fqn for item in described},
    )


def frozen_changes(recipe: Recipe, parameters: Iterable[ParameterPlan]) -> list[OverrideChange]:
    """Return one change for every parameter that an override freezes, in the order of the overrides."""
    parameters = tuple(parameters)
    found = []
    for entry in entries(recipe):
        patterns = [f"{match}.{name}" for match in entry.override.match for name in entry.override.freeze]
        for parameter in parameters:
            names = (parameter.fqn, *parameter.aliases)
            if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns):
                found.append(entry.change(parameter.fqn, "freeze", "trained", "frozen"))
    return found


def _replaced(inventory: Inventory) -> Iterable[OverrideChange]:
    """Yield what the recipe's replacements did, as the inventory records them."""
    for record in inventory.replacements:
        if record.rule.startswith("overrides."):
            yield OverrideChange(
                fqn=record.fqn,
                field=record.kind,
                before=record.source.rpartition(":")[2],
                after=record.constructor.rpartition(":")[2],
                declared_by=record.declared_by,
                rule=record.rule,
            )


def _apply(
    entry: Entry, info: ModuleInfo, boundaries: dict[str, Described], *, inventory: Inventory, isolated: Iterable[str]
) -> list[OverrideChange]:
    """Change one module's boundary in ``boundaries`` and return what changed."""
    if in_any(info.fqn, isolated):
        what = f"{info.fqn} lies in an isolated subtree, which somebody else lays out"
        raise PlanError("HP530", what, expected="a module outside", where=entry.where)
    item = boundaries.get(info.fqn)
    if item is None:
        return _add(entry, info, boundaries, inventory=inventory)
    spec = _merged(entry, info.fqn, item.spec)
    if spec != item.spec:
        by = f"{item.declared_by}, changed by {entry.where}"
        boundaries[info.fqn] = attrs.evolve(item, spec=spec, declared_by=by, source="")
    return _differences(entry, info.fqn, item.spec, spec)


def _merged(entry: Entry, fqn: str, spec: ModuleShardingSpec) -> ModuleShardingSpec:
    implied: dict[str, Mapping[str, Layout]] = {"in_dst": spec.in_src, "out_dst": spec.out_src}  # what a missing layout means
    fields: dict[str, Any] = {
        name: _merge(entry, fqn, name, getattr(spec, name) or {}, given, implied=implied.get(name, {}))
        for name, given in entry.override.layouts.items()
    }
    if "out_src" in fields and spec.out_names == ("output",) and "output" not in fields["out_src"]:
        fields["out_names"] = tuple(fields["out_src"]) or spec.out_names
    made = attrs.evolve(spec, **fields)
    ports = {*made.in_src, *made.out_src, *(name for name in made.out_names if name is not None)}
    return attrs.evolve(
        made,
        ports={name: port for name, port in made.ports.items() if name in ports},
        views={path: view for path, view in made.views.items() if path in made.params},
    )


def _merge(
    entry: Entry, fqn: str, field: str, before: Mapping[str, Layout], given: Any, *, implied: Mapping[str, Layout]
) -> dict[str, Layout]:
    """Return one field with the given keys merged in; ``{}`` is explicitly nothing, ``auto`` keeps what is there."""
    after: dict[str, Layout] = dict(before) if given else {}
    for key, layout in given.items():
        if layout != "auto":
            after[key] = {**before.get(key, implied.get(key, {})), **layout} if layout else {}
        elif key not in before:
            what = f"{field}.{key} of {fqn or 'the root'} is auto, but nothing declares it{suggest(key, before)}"
            raise PlanError("HP530", what, expected=", ".join(before) or "a layout", where=entry.where)
    return after


def _differences(entry: Entry, fqn: str, before: ModuleShardingSpec, after: ModuleShardingSpec) -> list[OverrideChange]:
    changes = []
    for field in LAYOUT_FIELDS:
        old, new = getattr(before, field) or {}, getattr(after, field) or {}
        for key in dict.fromkeys((*old, *new)):
            if old.get(key) != new.get(key):
                changes.append(entry.change(fqn, f"{field}.{key}", _shown(old, key), _shown(new, key)))
    return changes


def _shown(layouts: Mapping[str, Layout], key: str) -> str:
    return describe(layouts[key]) if key in layouts else "nothing"


def _add(entry: Entry, info: ModuleInfo, boundaries: dict[str, Described], *, inventory: Inventory) -> list[OverrideChange]:
    """Make a boundary of a module that was none; its parameters leave the boundary around it."""
    given = entry.override.layouts
    outer = nearest(info.fqn, boundaries)
    own = [path for path in inventory.parameters_below(info.fqn) if _holder(info.fqn, path, boundaries) == outer]
    inherits = [name for name, layouts in given.items() if layouts == "auto" or "auto" in layouts.values()]
    missing = [name for name in LAYOUT_FIELDS if name not in given] + [
        path for path in own if path not in given.get("params", {})
    ]
    if missing or inherits:
        declared = ", ".join(name for name in given if name not in inherits) or "nothing"
        raise PlanError(
            "HP530",
            f"{info.fqn or 'the root'} is no boundary yet, and the override declares only {declared}",
            expected="the whole contract of a new boundary",
            where=entry.where,
            fix=f"declare {draft(info, own, given=given)}",
        )
    spec = _merged(entry, info.fqn, ModuleShardingSpec())
    changes = _move_parameters(entry, info.fqn, own, boundaries, outer=outer)
    boundaries[info.fqn] = Described(info=info, spec=spec, declared_by=entry.where)
    return [*changes, *_differences(entry, info.fqn, ModuleShardingSpec(), spec)]


def _holder(fqn: str, path: str, boundaries: Mapping[str, object]) -> str | None:
    """Return the boundary, before the new one, that owns a parameter below ``fqn``."""
    name = f"{fqn}.{path}" if fqn else path
    return nearest(name.rpartition(".")[0], boundaries)


def _move_parameters(
    entry: Entry, fqn: str, paths: Sequence[str], boundaries: dict[str, Described], *, outer: str | None
) -> list[OverrideChange]:
    if outer is None:
        return []
    item, prefix = boundaries[outer], fqn[len(outer) + 1 :] if outer else fqn
    moved = {f"{prefix}.{path}" for path in paths}
    for path in sorted(moved & item.spec.views.keys()):
        what = f"{fqn} would own {path} of {outer or 'the root'}, which is seen through {item.spec.views[path]}"
        raise PlanError("HP530", what, expected="a parameter without a view", where=entry.where)
    spec = attrs.evolve(item.spec, params={path: layout for path, layout in item.spec.params.items() if path not in moved})
    boundaries[outer] = attrs.evolve(item, spec=spec)
    return [
        entry.change(outer, f"params.{path}", describe(item.spec.params[path]), f"owned by {fqn}")
        for path in item.spec.params
        if path in moved
    ]
