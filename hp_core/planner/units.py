"""FSDP units and recomputed layers: the repeated layers one by one, modules with another dtype apart, the root last."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from hp_core.contracts import BuildPlan, Inventory, ModelAdapter, ParameterPlan, RecomputePlan, Shard, Stack, UnitPlan
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.describe import ancestors, in_any, nearest
from hp_core.planner.parameters import at_least_fp32
from hp_core.planner.schemes import Dtypes


@attrs.frozen(kw_only=True)
class UnitOptions:
    """What ordinary units do: the parameters' dtype, the dtypes of the policy, and whether to free them after the forward."""

    dtype: str
    compute: str
    reduce: str
    reshard_after_forward: bool


def layer_fqns(inventory: Inventory, stack: Stack | None) -> tuple[str, ...]:
    """Return the FQNs of the repeated layers in order; empty without a stack."""
    if stack is None:
        return ()
    depth = stack.layers.count(".") + 1
    prefix = f"{stack.layers}."
    return tuple(i.fqn for i in inventory.modules if i.fqn.startswith(prefix) and i.fqn.count(".") == depth)


def plan_units(
    inventory: Inventory,
    parameters: Sequence[ParameterPlan],
    *,
    adapter: ModelAdapter,
    options: UnitOptions,
    dtypes: Dtypes,
    topology: Topology,
) -> tuple[UnitPlan, ...]:
    """Return the units, inner before outer, the root last.

    A module computed in another dtype than the unit around it is a unit of its own, because a unit's policy casts all its
    parameters; one that holds experts cut over ep too, because they lie on another mesh. The root keeps its parameters
    gathered between forward and backward: it is needed again at once.
    HP521: a tied parameter in two units; HP502: experts that the expert mesh cannot cut.
    """
    layers = layer_fqns(inventory, adapter.stack)
    apart = _apart(inventory, parameters, adapter=adapter, options=options, dtypes=dtypes, layers=layers)
    experts = _experts(parameters, topology=topology)
    order = [info.fqn for info in inventory.modules if info.fqn in apart or info.fqn in experts]
    units = [
        attrs.evolve(
            _unit(fqn, compute=apart.get(fqn, dtypes.base(fqn)), wide=fqn in apart, options=options), **experts.get(fqn, {})
        )
        for fqn in _inner_first(layers, order)
    ]
    root = _unit("", compute=dtypes.base(""), wide=False, options=options)
    units.append(attrs.evolve(root, reshard_after_forward=False))
    _check_tied(parameters, {unit.fqn: unit for unit in units})
    return wrapped(units, parameters, topology=topology)


def _apart(
    inventory: Inventory,
    parameters: Sequence[ParameterPlan],
    *,
    adapter: ModelAdapter,
    options: UnitOptions,
    dtypes: Dtypes,
    layers: Sequence[str],
) -> dict[str, str]:
    """Return the modules that need a unit of their own, in inventory order, with the dtype that they compute in."""
    lower = any(at_least_fp32(dtype) != dtype for dtype in (options.dtype, options.compute, options.reduce))
    owners, around = {parameter.owner for parameter in parameters}, dict.fromkeys(layers)
    found: dict[str, str] = {}
    for info in inventory.modules:
        fqn = info.fqn
        if dtypes.schemed(fqn):
            own = dtypes.compute.get(fqn)
            if fqn in owners and own is not None and own != dtypes.base(nearest(fqn, around) or ""):
                found[fqn] = own
        elif lower and info.parameters and in_any(fqn, adapter.fp32):
            found[fqn] = at_least_fp32(options.compute)
    return {fqn: dtype for fqn, dtype in found.items() if fqn}


def _experts(parameters: Sequence[ParameterPlan], *, topology: Topology) -> dict[str, dict[str, Any]]:
    """Return the owners of parameters cut over ep, with the storage mesh and the dim that FSDP cuts.

    FSDP cuts dim 0 (uneven parts allowed) while every rank of the storage axis gets an expert, else dim 1, which must divide.
    """
    found: dict[str, list[ParameterPlan]] = {}
    for parameter in parameters:
        if topology.ep > 1 and "ep" in parameter.layout:
            found.setdefault(parameter.owner, []).append(parameter)
    return {owner: {"view": "expert", "shard_dim": _expert_dim(cut, topology=topology)} for owner, cut in found.items()}


def _expert_dim(cut: Sequence[ParameterPlan], *, topology: Topology) -> int:
    efsdp, local = topology.efsdp, min(parameter.shape[0] for parameter in cut) // topology.ep
    if local >= efsdp:
        return 0
    for parameter in cut:
        if len(parameter.shape) < 2 or parameter.shape[1] % efsdp:
            size = parameter.shape[1] if len(parameter.shape) > 1 else 1
            raise PlanError(
                "HP502",
                f"{parameter.fqn}: {local} experts a rank and dim 1 ({size}) cannot be cut into {efsdp} parts "
                "(dp_shard * cp * tp / ep)",
                expected="as many experts a rank as parts, or a dim 1 that they divide",
                where="mesh.ep",
                fix="set mesh.ep or mesh.dp_shard so that fewer parts are left",
            )
    return 1


def wrapped(units: Sequence[UnitPlan], parameters: Sequence[ParameterPlan], *, topology: Topology) -> tuple[UnitPlan, ...]:
    """Return the units, those that FSDP2 need not wrap marked: one rank holds them, in the dtype that they are computed in.

    FSDP2 would still copy each parameter to a gathered buffer, and each gradient back, in every step: 20 % of a small model's
    step on a CPU. Units of the dense mesh are wrapped all or none: an inner one shields its parameters from the dtype of the
    outer one, and the root leads them. Experts on a mesh of their own are left out of them by themselves.
    """
    homes = {unit.fqn: unit for unit in units}
    cast = {home for home, entry in ((unit_of(p.fqn, homes), p) for p in parameters) if homes[home].compute != entry.dtype}
    needed = {unit.fqn for unit in units if unit.fqn in cast or shards(unit, topology=topology) * topology.dp_replicate > 1}
    return tuple(attrs.evolve(unit, wraps=unit.fqn in needed if unit.view == "expert" else bool(needed)) for unit in units)


def fsdp_cut(plan: BuildPlan, unit: UnitPlan) -> str:
    """Return how FSDP cuts the parameters of a unit, as ``"fsdp=Shard(0)"``; nothing where it does not."""
    if not unit.wraps or shards(unit, topology=plan.topology) == 1:
        return ""
    return f"{'efsdp' if unit.view == 'expert' else 'fsdp'}={Shard(unit.shard_dim)}"


def shards(unit: UnitPlan, *, topology: Topology) -> int:
    """Return into how many parts FSDP cuts the parameters of a unit."""
    return topology.efsdp if unit.view == "expert" else topology.fsdp


def unit_of(fqn: str, units: Mapping[str, object]) -> str:
    """Return the unit that holds the parameter ``fqn``: the innermost module around it that is a unit."""
    found = nearest(fqn.rpartition(".")[0], units)
    return "" if found is None else found


def plan_recompute(
    layers: Sequence[str], *, mode: str, chosen: Sequence[int | str] | None, where: str = ""
) -> tuple[RecomputePlan, ...]:
    """Return the layers to recompute, in order: all, or those that ``chosen`` names by index or pattern; none if ``off``.

    HP514: an index that the model does not have; HP527: a pattern that matches no layer.
    """
    if mode == "off":
        return ()
    wanted = set(layers) if chosen is None else {fqn for choice in chosen for fqn in _chosen(choice, layers, where)}
    return tuple(RecomputePlan(fqn=fqn, mode="full" if mode == "full" else "selective") for fqn in layers if fqn in wanted)


def _chosen(choice: int | str, layers: Sequence[str], where: str) -> tuple[str, ...]:
    if isinstance(choice, int):
        if choice >= len(layers):
            raise PlanError("HP514", f"recompute.layers names layer {choice}", expected=f"0 to {len(layers) - 1}", where=where)
        return (layers[choice],)
    hits = tuple(fqn for fqn in layers if fnmatch.fnmatchcase(fqn, choice))
    if not hits:
        raise PlanError(
            "HP527", f"recompute.layers pattern {choice!r} matches no layer", expected="a pattern of layer names", where=where
        )
    return hits


def _inner_first(layers: Sequence[str], apart: Sequence[str]) -> list[str]:
    """Return layers in order, each after the units inside it; units outside every layer come last."""
    inside: dict[str, list[str]] = {layer: [] for layer in layers}
    outside: list[str] = []
    for fqn in apart:
        layer = next((name for name in ancestors(fqn) if name in inside), None)
        (outside if layer is None else inside[layer]).append(fqn)
    return [fqn for layer in layers for fqn in (*inside[layer], layer)] + outside


def _unit(fqn: str, *, compute: str, wide: bool, options: UnitOptions) -> UnitPlan:
    """Return a unit; ``wide`` ones reduce in at least float32 whatever the recipe says."""
    return UnitPlan(
        fqn=fqn,
        compute=compute,
        reduce=at_least_fp32(options.reduce) if wide else options.reduce,
        reshard_after_forward=options.reshard_after_forward,
    )


def _check_tied(parameters: Sequence[ParameterPlan], units: Mapping[str, UnitPlan]) -> None:
    for parameter in parameters:
        homes = {unit_of(name, units) for name in (parameter.fqn, *parameter.aliases)}
        if parameter.aliases and len(homes) > 1:
            raise PlanError(
                "HP521",
                f"{parameter.fqn} is tied to {', '.join(parameter.aliases)}, which lies in another FSDP unit",
                expected="tied parameters in one unit",
            )
