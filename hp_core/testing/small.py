"""From a recipe to the small model that the equivalence check trains: the same structure, small sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from hp_core.contracts.adapter import ModelAdapter
from hp_core.errors import PlanError
from hp_core.mesh.sequence import sequence_parts
from hp_core.mesh.topology import Topology
from hp_core.models.configuration import make_config
from hp_core.plugins.lazy import load
from hp_core.recipe.schema import Recipe
from hp_core.testing.cell import ModelCase

LARGEST_WORLD = 8  # processes that two cores still run in seconds
_LEAST_TOKENS = 64
_ROWS = 4
_KEPT = ("fsdp", "recompute", "protocols", "kernels", "overrides", "loss", "plugins")  # what a cell takes of the recipe


@attrs.frozen(kw_only=True)
class SmallModel:
    """A model case, and what was made smaller: configuration key -> (old, new)."""

    case: ModelCase
    changes: Mapping[str, tuple[Any, Any]]


def small_model(recipe: Recipe, meshes: Iterable[Topology], *, micro_batches: int = 1, full_size: bool = False) -> SmallModel:
    """Return the recipe's model, made small by its adapter so that it still divides on every mesh, with a batch for it.

    HP524: the adapter does not say how its model is made small (and ``full_size`` is off).
    """
    meshes = tuple(meshes)
    adapter, config = recipe.adapter, full_config(recipe)
    renamed = getattr(load(adapter.config_class), "attribute_map", {})  # Hugging Face writes some keys under another name
    written = {renamed.get(key, key) for key in recipe.model.config or {}}
    wanted = config if full_size else _shrunk(adapter, config, meshes=meshes)
    changed = {key for key, value in wanted.items() if value != config.get(key)}
    small = {key: wanted[key] for key in wanted if key in changed or key in written}
    data = math.lcm(*(mesh.data for mesh in meshes))
    case = ModelCase(
        adapter=adapter.name,
        config=small,
        rows=math.lcm(_ROWS, data * micro_batches),
        sequence=_sequence(meshes),
        freeze=recipe.frozen,
    )
    return SmallModel(case=case, changes={key: (config.get(key), wanted[key]) for key in sorted(changed)})


def full_config(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's configuration with every default of Hugging Face's class, as plain data."""
    made = make_config(recipe.adapter, recipe.model.config or {}, where=lambda _: recipe.where("model.config"))
    return dict(made.to_dict())


def small_mesh(topology: Topology) -> Topology:
    """Return the mesh with every degree cut to 2, dp first, until it has at most eight processes."""
    for axis in ("dp_replicate", "dp_shard", "cp", "ep", "tp"):
        if topology.world <= LARGEST_WORLD:
            return topology
        if topology.degree(axis) > 2:
            topology = _with(topology, axis, 2)
    for axis in ("dp_replicate", "dp_shard", "cp"):
        if topology.world > LARGEST_WORLD and topology.degree(axis) > 1:
            topology = _with(topology, axis, 1)
    return topology


def kept_settings(recipe: Recipe) -> dict[str, Any]:
    """Return what a cell takes of the recipe besides model, mesh, precision and frozen parameters, as plain data."""
    whole = recipe.to_dict()
    kept = {key: whole[key] for key in _KEPT}
    kept["fsdp"] = {**kept["fsdp"], "offload": False}
    if recipe.device != "cpu":
        kept["kernels"] = "auto"
    return kept


def _with(topology: Topology, axis: str, degree: int) -> Topology:
    """Return the topology with another degree; ep becomes the largest that still divides."""
    changed = {**attrs.asdict(topology), axis: degree}
    block = changed["dp_shard"] * changed["cp"] * changed["tp"]
    changed["ep"] = math.gcd(changed["ep"], block)
    return Topology(**changed)


def _shrunk(adapter: ModelAdapter, config: Mapping[str, Any], *, meshes: Sequence[Topology]) -> dict[str, Any]:
    if adapter.shrink is None:
        raise PlanError(
            "HP524",
            f"adapter {adapter.name} does not say how its model is made small",
            expected="a reference in its field shrink",
            where=f"adapter {adapter.name}",
            fix="pass --full-size",
        )
    degrees = {axis: math.lcm(*(mesh.degree(axis) for mesh in meshes)) for axis in ("tp", "cp", "ep", "pp", "efsdp")}
    return dict(load(adapter.shrink)(config, degrees))


def _sequence(meshes: Sequence[Topology]) -> int:
    """Return the least length of at least 64 tokens that every mesh can cut, in whichever order."""
    parts = math.lcm(*(sequence_parts(cp=mesh.cp, layout="zigzag") * mesh.tp for mesh in meshes))
    return -(-_LEAST_TOKENS // parts) * parts
