"""build(): a recipe becomes a Hugging Face model on meta with its replacements installed, its inventory and its plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import attrs
import torch
from importlib_metadata import PackageNotFoundError, version
from packaging.specifiers import SpecifierSet
from torch import nn

from hp_core.contracts.adapter import ModelAdapter
from hp_core.contracts.family import FamilyContext
from hp_core.contracts.inventory import Inventory
from hp_core.contracts.plan import BuildPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import LogicalDeviceMesh, Topology
from hp_core.models import attention
from hp_core.models.configuration import Given, as_one_line, configure, quiet
from hp_core.models.family import validate_family_context
from hp_core.models.inventory import take_inventory
from hp_core.models.observers import Observer, PlanReady, notify
from hp_core.models.replacements import replace_all
from hp_core.models.rules import method_rules, module_rules
from hp_core.planner.checks import check_config
from hp_core.planner.plan import plan as make_plan
from hp_core.plugins.lazy import load
from hp_core.recipe.schema import Recipe


@attrs.frozen(eq=False)
class Built:
    """A model on meta, what it contains, and what applying it to a mesh will do."""

    model: nn.Module
    inventory: Inventory
    plan: BuildPlan


def build(recipe: Recipe, *, mesh: MeshContext | LogicalDeviceMesh | None = None, observers: Iterable[Observer] = ()) -> Built:
    """Return the recipe's model on the meta device, planned for ``mesh`` (None: the recipe's own topology).

    Needs no process group and no memory for weights. HP524: versions or a configuration outside what the adapter supports;
    HP540, HP541: a replacement does not fit; HP542: the configuration cannot be built; and whatever planning raises.

    Example::

        built = build(load_recipe("tiny.yaml", plugins=load_plugins()))
        print(built.plan.boundaries[0].fqn)
    """
    observers = tuple(observers)
    model, inventory = build_model(recipe, mesh=mesh, observers=observers)
    plan = make_plan(inventory, recipe, _topology(recipe, mesh))
    notify(observers, PlanReady(plan=plan))
    return Built(model, inventory, plan)


def build_model(
    recipe: Recipe, *, mesh: MeshContext | LogicalDeviceMesh | None = None, observers: tuple[Observer, ...] = ()
) -> tuple[nn.Module, Inventory]:
    """Return the recipe's model on the meta device with its replacements, and what it contains; nothing is planned yet."""
    adapter, topology = recipe.adapter, _topology(recipe, mesh)
    check_requirements(adapter)
    config = configure(adapter, recipe)
    check_config(adapter, config.to_dict(), topology=topology, where=recipe.where)
    model = _on_meta(adapter, recipe, config=config)
    context = FamilyContext.of(topology)
    records = replace_all(
        model,
        module_rules(recipe, config=config.to_dict()),
        methods=method_rules(recipe, topology),
        context=context,
        mesh=mesh,
        observers=observers,
    )
    validate_family_context(model, context)
    return model, take_inventory(model, replacements=records)


def check_requirements(adapter: ModelAdapter) -> None:
    """Raise HP524 unless every distribution that the adapter requires is installed in its range."""
    for name, accepted in adapter.requires.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "no installation"
        if found == "no installation" or not SpecifierSet(accepted).contains(found, prereleases=True):
            raise PlanError(
                "HP524",
                f"adapter {adapter.name} meets {name} {found}" if found[0].isdigit() else f"{name} is not installed",
                expected=f"{name}{accepted}",
                where=f"adapter {adapter.name}",
                fix=f"pip install '{name}{accepted}'",
            )


def _on_meta(adapter: ModelAdapter, recipe: Recipe, *, config: Any) -> nn.Module:
    attention.register()
    config.use_cache = False
    dtype = cast(torch.dtype, getattr(torch, recipe.model.dtype))
    with quiet(), as_one_line(Given.of(recipe).blame), torch.device("meta"):
        return load(adapter.model_class)._from_config(config, dtype=dtype, attn_implementation=attention.NAME)


def _topology(recipe: Recipe, mesh: MeshContext | LogicalDeviceMesh | None) -> Topology:
    return recipe.topology() if mesh is None else mesh.topology
