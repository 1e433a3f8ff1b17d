"""Parameters and buffers of the plan: layout, gradient placement, dtype, freezing, transforms, initialisation."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import attrs

from hp_core.contracts import (
    BufferPlan,
    FirstRank,
    HeadSlice,
    Init,
    Inventory,
    Layout,
    ModelAdapter,
    ParameterPlan,
    Partial,
    Replicate,
    Shard,
    Transform,
    indivisible,
)
from hp_core.contracts.placement import placement_of
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.collectives import is_integer
from hp_core.planner.describe import Described, in_any
from hp_core.planner.ownership import Owned
from hp_core.planner.places import refuse
from hp_core.planner.schemes import Dtypes, at_least

_PRECISION = ("float16", "bfloat16", "float32", "float64")


def at_least_fp32(dtype: str) -> str:
    """Return max(float32, ``dtype``): what "fp32" means everywhere."""
    return dtype if dtype == "float64" else "float32"


@attrs.frozen(kw_only=True)
class ParameterRules:
    """What decides a parameter besides its owner: dtypes, frozen patterns and where they are written, varying boundaries."""

    adapter: ModelAdapter
    topology: Topology
    dtype: str
    freeze: tuple[str, ...]
    where: str
    varying: Mapping[str, bool]
    dtypes: Dtypes


def plan_parameters(
    inventory: Inventory, owned: Mapping[str, Owned], described: Sequence[Described], *, rules: ParameterRules
) -> tuple[ParameterPlan, ...]:
    """Return one entry per parameter, canonical names only, in inventory order.

    HP502: a sharded dim does not divide; HP522: a layout or view does not fit; HP526: nothing initialises it; HP527: a
    freeze pattern matches nothing.
    """
    names: dict[str, list[str]] = {fqn: [] for fqn in owned if fqn not in inventory.aliases}
    for alias, canonical in inventory.aliases.items():
        names[canonical].append(alias)
    _check_freeze(rules.freeze, tuple(owned), where=rules.where)
    transforms = {item.info.fqn: item.family.transforms for item in described if item.family is not None}
    return tuple(
        _plan_parameter(owned, fqn, aliases=tuple(aliases), transforms=transforms, rules=rules)
        for fqn, aliases in names.items()
    )


def plan_buffers(inventory: Inventory, *, adapter: ModelAdapter) -> tuple[BufferPlan, ...]:
    """Return one entry per buffer; HP526 if nothing initialises one."""
    return tuple(
        BufferPlan(
            fqn=fqn,
            shape=tensor.shape,
            dtype=tensor.dtype,
            persistent=tensor.persistent,
            init=_init(fqn, adapter=adapter, what="buffer"),
        )
        for fqn, tensor in inventory.buffers_below("").items()
    )


def gradient_of(layout: Layout, *, varying: bool) -> Layout:
    """Return the placement of the gradient that the body produces: Shard as the parameter, else Partial if varying.

    A parameter cut over ep lies on the expert mesh, which has no tp: tp ranks hold different experts or are replicas whose
    gradients the expert mesh's storage axis sums.
    """
    if isinstance(layout.get("ep"), Shard):
        return {"ep": layout["ep"]}
    placement = placement_of(layout, "tp")
    if isinstance(placement, Shard):
        return {"tp": placement}
    return {"tp": Partial() if varying else Replicate()}


def _plan_parameter(
    owned: Mapping[str, Owned],
    fqn: str,
    *,
    aliases: tuple[str, ...],
    transforms: Mapping[str, Mapping[str, tuple[Transform, ...]]],
    rules: ParameterRules,
) -> ParameterPlan:
    item = owned[fqn]
    gradient = gradient_of(item.layout, varying=rules.varying.get(item.owner, False))
    for alias in aliases:
        if gradient_of(item.layout, varying=rules.varying.get(owned[alias].owner, False)) != gradient:
            raise PlanError(
                "HP521",
                f"{alias} is tied to {fqn}, but one gradient is complete and the other is Partial",
                expected="tied parameters in boundaries that are both varying or both invariant",
            )
    _check_cut(item, topology=rules.topology)
    _check_view(item, gradient, topology=rules.topology)
    return ParameterPlan(
        fqn=fqn,
        owner=item.owner,
        shape=item.tensor.shape,
        dtype=_dtype(item, rules),
        layout=item.layout,
        gradient=gradient,
        trainable=item.tensor.trainable and not _frozen((fqn, *aliases), rules.freeze),
        aliases=aliases,
        view=item.view,
        transforms=transforms.get(item.owner, {}).get(item.path, ()),
        init=_init(fqn, adapter=rules.adapter, what="parameter"),
    )


def _dtype(item: Owned, rules: ParameterRules) -> str:
    """Return the dtype that a parameter is held in: never narrower than its boundary computes in under a scheme."""
    if is_integer(item.tensor.dtype):
        return item.tensor.dtype
    if rules.dtypes.schemed(item.owner) and item.owner in rules.dtypes.compute:
        return at_least(rules.dtype, rules.dtypes.compute[item.owner])
    fp32 = in_any(item.fqn.rpartition(".")[0], rules.adapter.fp32)
    return at_least_fp32(rules.dtype) if fp32 else rules.dtype


def _check_cut(item: Owned, *, topology: Topology) -> None:
    """Raise unless the layout cuts existing dims into equal parts."""
    for axis, placement in item.layout.items():
        degree = topology.degree(axis)
        if not isinstance(placement, Shard):
            continue
        if placement.dim >= len(item.tensor.shape):
            raise PlanError("HP522", f"{item.fqn} is declared {placement} on {axis}, but has shape {item.tensor.shape}")
        size = item.tensor.shape[placement.dim]
        if size % degree:
            refuse(indivisible(f"dim {placement.dim} of {item.fqn}", size, axis=axis, degree=degree), "HP502", where="")


def _check_view(item: Owned, gradient: Layout, *, topology: Topology) -> None:
    """Raise HP522 unless a view is of a replicated parameter of a varying body, and its slices are equal."""
    if item.view is None:
        return
    if topology.tp > 1 and gradient.get("tp") != Partial():
        raise PlanError("HP522", f"{item.fqn} has the view {item.view} in an invariant body", expected="a varying body")
    match item.view:
        case HeadSlice(dim, parts):
            if dim >= len(item.tensor.shape) or item.tensor.shape[dim] % parts or topology.tp % parts:
                raise PlanError(
                    "HP522",
                    f"{item.fqn} with shape {item.tensor.shape} has the view {item.view} on tp ({topology.tp})",
                    expected="parts that divide both the dim and tp",
                )
        case FirstRank():
            return


def _check_freeze(patterns: Sequence[str], names: Sequence[str], *, where: str) -> None:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise PlanError(
                "HP527",
                f"freeze pattern {pattern!r} matches no parameter",
                expected="an fnmatch pattern of parameter names such as model.embed_tokens.*",
                where=where,
            )


def _frozen(names: tuple[str, ...], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _init(fqn: str, *, adapter: ModelAdapter, what: str) -> Init:
    found = next((init for init in adapter.init if fnmatch.fnmatchcase(fqn, init.match)), None)
    if found is None:
        raise PlanError(
            "HP526", f"nothing initialises the {what} {fqn}", expected="an entry in init", where=f"adapter {adapter.name}"
        )
    return found
