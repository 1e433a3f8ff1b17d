"""Stage 5 on the meta device: an adapter's model is built small and planned, so that everything it names must exist."""

from __future__ import annotations

from typing import Any

from hp_core.contracts.adapter import ModelAdapter
from hp_core.contracts.family import ModuleFamily
from hp_core.contracts.inventory import Inventory
from hp_core.contracts.layout import LayoutContext
from hp_core.errors import DeclarationError, HPError, PlanError
from hp_core.mesh.topology import Topology
from hp_core.models.build import build_model
from hp_core.planner.checks import check_spec
from hp_core.planner.describe import Described
from hp_core.planner.plan import plan
from hp_core.plugins.lazy import load
from hp_core.plugins.places import defined, place, told
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import Loaded
from hp_core.recipe.load import recipe_from_dict
from hp_core.recipe.schema import Recipe
from hp_core.state.manifest import make_manifest

LAYERS = 8  # enough for models whose first layers, or every n-th, differ from the others
MESHES = {
    "tp=1": Topology(),
    "tp=2": Topology(tp=2),
    "tp=2 without sequence parallelism": Topology(tp=2, sequence_parallel=False),
}
REFUSALS = ("HP502", "HP515")  # an adapter may refuse a mesh; the mesh of one rank must work


def check_on_meta(plugin: Loaded, *, plugins: Plugins) -> list[str]:
    """Return a line for every adapter and every family that could be tried; raise what is wrong with the first bad one.

    An adapter's model is built with its configuration's defaults and at most eight layers, planned on each of
    :data:`MESHES`, and its checkpoint mapping is filled in. A family is described in every model that an installed adapter
    puts it into.
    """
    adapters = [item for kind, item in plugin.declarations if kind == "adapter"]
    notes = [_adapter(item, plugins=plugins, where=plugin.record.label) for item in adapters]
    families = [item for kind, item in plugin.declarations if kind == "family"]
    return notes + (_families(families, plugin=plugin, plugins=plugins) if families else [])


def _adapter(adapter: ModelAdapter, *, plugins: Plugins, where: str) -> str:
    try:
        recipe = small_recipe(adapter, plugins=plugins)
        _, inventory = build_model(recipe, mesh=Topology().view("activation"))
        done, refused = [], []
        for name, topology in MESHES.items():
            try:
                make_manifest(plan(inventory, recipe, topology))
                done.append(name)
            except PlanError as error:
                if topology.world == 1 or error.code not in REFUSALS:
                    raise
                refused.append(f"; {name} refused: {error.what}")
    except HPError:
        raise
    except Exception as error:  # a declaration's own function fails
        text = f"adapter {adapter.name}: planning its model on meta raises {told(error)}"
        raise DeclarationError("HP402", text, where=f"{where}. {place(error)}".removesuffix(". ")) from error
    return f"adapter {adapter.name} planned on {', '.join(done)}{''.join(refused)}"


def small_recipe(adapter: ModelAdapter, *, plugins: Plugins) -> Recipe:
    """Return a recipe for the adapter's model: its configuration's defaults, with at most :data:`LAYERS` layers."""
    layers = getattr(load(adapter.config_class)(), "num_hidden_layers", None)
    config: dict[str, Any] = {"num_hidden_layers": min(layers, LAYERS)} if isinstance(layers, int) else {}
    return recipe_from_dict({"model": {"adapter": adapter.name, "config": config}}, plugins=plugins)


def _families(families: list[ModuleFamily], *, plugin: Loaded, plugins: Plugins) -> list[str]:
    notes, tried = [], set()
    for name, provided in sorted(plugins.adapters.items()):
        used = {replacement.implementation for replacement in provided.declaration.replacements}
        mine = [family for family in families if family.name in used and family.sharding is not None]
        if not mine:
            continue
        tried |= {family.name for family in mine}
        try:
            recipe = small_recipe(provided.declaration, plugins=plugins)
            _, inventory = build_model(recipe, mesh=Topology().view("activation"))
        except Exception as error:
            if isinstance(error, HPError) and plugin.record.label in error.where:
                raise  # the fault of a family that is checked; another's own check tells
            notes.append(f"adapter {name} cannot be built ({error}): hp plugins check {provided.plugin.name}")
            continue
        for family in mine:
            notes.append(_family(family, adapter=name, inventory=inventory, where=plugin.record.label))
    left = ", ".join(family.name for family in families if family.sharding is not None and family.name not in tried)
    return notes + (
        [f"not tried, since no adapter puts it into a model: {left}; hp plan tries a recipe that does"] if left else []
    )


def _family(family: ModuleFamily, *, adapter: str, inventory: Inventory, where: str) -> str:
    places = [info for info in inventory.modules if info.family == family.name]
    credit = f"family {family.name}, {where}"
    for topology in MESHES.values():
        context = LayoutContext(topology=topology, config=inventory.config, inventory=inventory)
        for info in places:
            try:
                spec = load(str(family.sharding))(info, context)
                item = Described(info=info, spec=spec, declared_by=credit, source=defined(load(str(family.sharding))))
                check_spec(item, inventory=inventory, topology=topology)
            except HPError:
                raise
            except Exception as error:
                text = f"family {family.name}: {family.sharding!r} raises {told(error)} for {info.fqn}"
                raise DeclarationError("HP402", text, where=f"{where}. {place(error)}".removesuffix(". ")) from error
    return f"family {family.name} described at {len(places)} {'module' if len(places) == 1 else 'modules'} of {adapter}"
