"""The meshes and settings that ``hp verify --matrix`` tries, as cells of one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hp_core.mesh.topology import Topology
from hp_core.recipe.schema import Recipe
from hp_core.testing.cell import Cell, ModelCase

_OFF = {"sequence_parallel": False}
DENSE: Mapping[str, Topology] = {
    "tp2": Topology(tp=2),
    "tp2 sp-off": Topology(tp=2, **_OFF),
    "tp2 loss-parallel off": Topology(tp=2, loss_parallel=False),
    "tp4": Topology(tp=4),
    "dp2": Topology(dp_replicate=2),
    "fsdp2": Topology(dp_shard=2),
    "hsdp2x2": Topology(dp_replicate=2, dp_shard=2),
    "fsdp2 tp2": Topology(dp_shard=2, tp=2),
}
EXPERT: Mapping[str, Topology] = {
    "ep2": Topology(dp_shard=2, ep=2),
    "ep2 tp2": Topology(tp=2, ep=2),
    "ep2 tp2 sp-off": Topology(tp=2, ep=2, **_OFF),
    "ep4 over tp2 fsdp2": Topology(dp_shard=2, tp=2, ep=4),
    "ep4 over tp2 fsdp2, sp-off": Topology(dp_shard=2, tp=2, ep=4, **_OFF),
    "ep2 under tp4": Topology(tp=4, ep=2),
    "hsdp2x2 ep2": Topology(dp_replicate=2, dp_shard=2, ep=2),
    "fsdp2 ep2 tp2": Topology(dp_shard=2, tp=2, ep=2),
    "hsdp2x2 ep2 tp2": Topology(dp_replicate=2, dp_shard=2, tp=2, ep=2),
}
CONTEXT: Mapping[str, Topology] = {
    "cp2": Topology(cp=2),
    "cp4": Topology(cp=4),
    "cp2 tp2": Topology(cp=2, tp=2),
    "cp2 fsdp2": Topology(cp=2, dp_shard=2),
}
BOTH: Mapping[str, Topology] = {
    "ep2 cp2": Topology(cp=2, ep=2),
    "fsdp2 ep2 cp2": Topology(dp_shard=2, cp=2, ep=2),
    "tp2 cp2 ep4 fsdp2": Topology(dp_shard=2, cp=2, tp=2, ep=4),
}
MESHES = (*DENSE.values(), *EXPERT.values(), *CONTEXT.values(), *BOTH.values())
_RECOMPUTED = ("tp2", "fsdp2", "ep2 tp2", "cp2 tp2")
MICRO_BATCHES = 4


def matrix(recipe: Recipe, case: ModelCase, settings: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of the matrix for one model: every mesh, with every installed protocol, and what may interfere.

    ``settings``: the recipe's own, which every cell takes. Cells of axes that no plugin has a protocol for are left out.
    """
    return [*_cells(recipe, case, dict(settings))]


def _cells(recipe: Recipe, case: ModelCase, settings: dict[str, Any]) -> Iterator[Cell]:
    alone = Topology()
    yield Cell(name="one process", model=case, recipe=settings)
    yield Cell(name=f"one process, {MICRO_BATCHES} micro-batches", model=case, recipe=settings, micro_batches=MICRO_BATCHES)
    for mode in ("full", "selective"):
        yield Cell(name=f"one process, {mode} recompute", model=case, recipe={**settings, "recompute": {"mode": mode}})
    yield Cell(name="one process, fp32", model=case, mesh=alone, recipe=settings, precision="float32")
    for name, mesh, protocols in _meshes(recipe):
        own = {**settings, "protocols": {**settings["protocols"], **protocols}}
        yield Cell(name=name, model=case, mesh=mesh, recipe=own)
        if name.partition(", ")[0] in _RECOMPUTED:
            yield Cell(name=f"{name}, full recompute", model=case, mesh=mesh, recipe={**own, "recompute": {"mode": "full"}})
    yield Cell(name="fsdp2, 2 micro-batches", model=case, mesh=DENSE["fsdp2"], recipe=settings, micro_batches=2)
    yield Cell(name="tp2, bf16", model=case, mesh=DENSE["tp2"], recipe=settings, precision="bfloat16")


def _meshes(recipe: Recipe) -> Iterator[tuple[str, Topology, dict[str, Any]]]:
    names = {
        kind: [key for key in sorted(recipe.declarations.protocols) if key.startswith(f"{kind}:")] for kind in ("cp", "ep")
    }
    experts = [key.partition(":")[2] for key in names["ep"]] if recipe.adapter.experts else []
    contexts = [key.partition(":")[2] for key in names["cp"]]
    yield from ((name, mesh, {}) for name, mesh in DENSE.items())
    for name, mesh in EXPERT.items():
        yield from ((f"{name}, {protocol}", mesh, {"ep": protocol}) for protocol in experts)
    for name, mesh in CONTEXT.items():
        yield from ((f"{name}, {protocol}", mesh, {"cp": _cp(recipe, protocol, mesh)}) for protocol in contexts)
    if experts and contexts:
        yield from ((name, mesh, {}) for name, mesh in BOTH.items())


def _cp(recipe: Recipe, protocol: str, mesh: Topology) -> Any:
    """Return a cp protocol as a recipe names it; one with two sub-axes gets an inner degree of 2."""
    sub_axes = recipe.declarations.protocol("cp", protocol).sub_axes
    return {"name": protocol, "inner": min(2, mesh.cp)} if sub_axes else protocol
