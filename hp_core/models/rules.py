"""The replacements that an adapter and a recipe declare, as rules for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from hp_core.contracts.adapter import ModelAdapter, Replacement
from hp_core.mesh.topology import Topology
from hp_core.models.replace import Rule
from hp_core.models.replace_methods import MethodRule
from hp_core.plugins.lazy import call
from hp_core.recipe.overrides import is_active
from hp_core.recipe.schema import Recipe


def module_rules(recipe: Recipe, *, config: Mapping[str, Any]) -> list[Rule]:
    """Return the adapter's rules, then the recipe's, which win on a module that both name.

    A rule of the adapter whose modules a model of ``config`` has none of, by the adapter's own counts, is left out.
    """
    adapter, plugins = recipe.adapter, recipe.declarations
    declared_by = f"adapter {adapter.name}"
    counts = call(adapter.counts, config, gives=Mapping) if adapter.counts else {}
    rules = [
        Rule(
            replacement=_with_recipe_values(item, adapter, recipe),
            family=plugins.family(item.implementation, where=declared_by),
            declared_by=declared_by,
            id=f"{adapter.name}.replacements.{index}",
            author=plugins.provided("family", item.implementation).author,
            asker=plugins.provided("adapter", adapter.name).author,
        )
        for index, item in enumerate(adapter.replacements)
        if item.layout_rule is None or counts.get(item.layout_rule, 1) > 0
    ]
    for index, override in enumerate(recipe.overrides):
        replace = override.replace
        if replace is None or replace.kind != "module":
            continue
        where = recipe.where(f"overrides.{index}")
        replacement = Replacement(
            match=override.match,
            implementation=replace.implementation,
            source_type=replace.source_type or "",
            exact_type=replace.exact_type,
            arguments=replace.arguments,
        )
        family = plugins.family(replace.implementation, where=where)
        author = plugins.provided("family", family.name).author
        rule = Rule(
            replacement=replacement, family=family, declared_by=where, priority=1, id=f"overrides.{index}", author=author
        )
        rules.append(attrs.evolve(rule, replacement=_with_recipe_values(replacement, adapter, recipe)))
    return rules


def method_rules(recipe: Recipe, topology: Topology) -> list[MethodRule]:
    """Return the recipe's replacements of methods that are in use on ``topology``."""
    rules = []
    for index, override in enumerate(recipe.overrides):
        replace = override.replace
        if replace is None or replace.kind != "method" or not is_active(override, topology=topology, compute=recipe.compute):
            continue
        where = recipe.where(f"overrides.{index}")
        rules.append(
            MethodRule(
                match=override.match[0],
                family=recipe.declarations.family(replace.implementation, where=where),
                declared_by=where,
                source_type=replace.source_type,
                exact_type=replace.exact_type,
                id=f"overrides.{index}",
            )
        )
    return rules


def _with_recipe_values(item: Replacement, adapter: ModelAdapter, recipe: Recipe) -> Replacement:
    """Return the replacement; one of the loss component takes the recipe's ``loss.chunk``, if it has such an argument."""
    takes_chunk = "chunk" in recipe.declarations.family(item.implementation).arguments
    if adapter.loss not in item.match or not takes_chunk:
        return item
    return attrs.evolve(item, arguments={"chunk": recipe.loss.chunk, **item.arguments})
