"""build(): a recipe becomes a Hugging Face model on meta with its replacements installed, its inventory and its plan."""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping
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
from hp_core.errors import HPError, PlanError
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import LogicalDeviceMesh, Topology
from hp_core.models import attention
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
    config = _config(adapter, recipe)
    check_config(adapter, config.to_dict(), topology=topology)
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


def make_config(adapter: ModelAdapter, values: Mapping[str, Any], *, where: str) -> Any:
    """Return the Hugging Face configuration object of ``values``; HP542, in one line, for whatever it refuses."""
    known = {name: value for name, value in values.items() if name not in ("model_type", "architectures", "dtype")}
    with _quiet(), _as_one_line(where):
        return load(adapter.config_class)(**known)


def check_spelling(adapter: ModelAdapter, values: Mapping[str, Any], *, where: str) -> None:
    """Raise HP542 for a key that is nearly one of the configuration's: Hugging Face would keep it and not use it.

    Other unknown keys are accepted, since published configurations have many.
    """
    config = load(adapter.config_class)()
    names = {*config.to_dict(), *getattr(config, "attribute_map", {})}
    others = sorted(names - set(values))
    for key in values:
        known = key in names or hasattr(config, key)
        close = [] if known else difflib.get_close_matches(key, others, n=1, cutoff=0.88)
        if close:
            what = f"the configuration of {adapter.name} has no key {key!r}; did you mean {close[0]!r}?"
            raise PlanError("HP542", what, where=where)


def _check_model_type(adapter: ModelAdapter, recipe: Recipe, values: Mapping[str, Any]) -> None:
    """Raise HP524 for a configuration of another model than the adapter's, or of quantised weights: neither is built."""
    asked, types = values.get("model_type"), adapter.hf_model_types
    where = recipe.where("model.config.model_type")
    if asked is not None and types and asked not in types:
        fix = "choose the adapter of that model, or leave model_type out"
        raise PlanError("HP524", f"model_type is {asked!r}", expected=" or ".join(types), where=where, fix=fix)
    if values.get("quantization_config") is not None:
        raise PlanError(
            "HP524",
            "quantization_config is set, and the model would be built without it",
            expected="a configuration of weights that are not quantised",
            where=recipe.where("model.config.quantization_config"),
            fix="leave it out and use weights that are not quantised",
        )


def _config(adapter: ModelAdapter, recipe: Recipe) -> Any:
    where, values = recipe.where("model.config"), recipe.model.config or {}
    _check_model_type(adapter, recipe, values)
    if recipe.model.checkpoint is None:
        check_spelling(adapter, values, where=where)
    return make_config(adapter, values, where=where)


def _on_meta(adapter: ModelAdapter, recipe: Recipe, *, config: Any) -> nn.Module:
    attention.register()
    config.use_cache = False
    dtype = cast(torch.dtype, getattr(torch, recipe.model.dtype))
    with _quiet(), _as_one_line(recipe.where("model.config")), torch.device("meta"):
        return load(adapter.model_class)._from_config(config, dtype=dtype, attn_implementation=attention.NAME)


@contextlib.contextmanager
def _as_one_line(where: str) -> Iterator[None]:
    try:
        yield
    except HPError:
        raise
    except Exception as error:
        what = f"the model cannot be built: {type(error).__name__}: {' '.join(str(error).split())}"
        raise PlanError("HP542", what, where=where, fix="correct model.config") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what Hugging Face logs while it builds a model that is never run as it is."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _topology(recipe: Recipe, mesh: MeshContext | LogicalDeviceMesh | None) -> Topology:
    return recipe.topology() if mesh is None else mesh.topology
