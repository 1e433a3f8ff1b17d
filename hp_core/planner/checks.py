"""Does a layout fit its module, the batch and the mesh? Names exist, dims exist, sizes divide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import attrs

from hp_core.contracts import (
    FamilyContext,
    Inventory,
    Layout,
    LayoutContext,
    ModelAdapter,
    ModuleFamily,
    ReplacementPlan,
    Shard,
    indivisible,
)
from hp_core.contracts.placement import AXES
from hp_core.contracts.validate_sharding import validate_sharding
from hp_core.errors import DeclarationError, PlanError, suggest
from hp_core.mesh.topology import Topology
from hp_core.planner.collectives import port_shape
from hp_core.planner.describe import Described, Names
from hp_core.planner.families import resolve_family
from hp_core.planner.places import placed, refuse
from hp_core.plugins.lazy import problems


def check_config(
    adapter: ModelAdapter, config: Mapping[str, object], *, topology: Topology, where: Callable[[str], str]
) -> None:
    """Raise the adapter's first problem with the configuration: HP524, or the code that the problem names.

    ``where``: a path of the recipe, as the problem names it (``model.config.head_dim``) -> where it is written.
    """
    with placed(where, topology):
        for problem in problems(adapter.config_checks, config, topology):
            refuse(problem, "HP524", where=f"adapter {adapter.name}")


def check_mesh(topology: Topology) -> None:
    """Raise HP515 for an axis that no boundary of this version can use."""
    if topology.pp > 1:
        raise PlanError("HP515", f"mesh.pp is {topology.pp}", expected="1 in this version", where="mesh.pp")


def check_sequence(sequence: int, *, topology: Topology, where: str) -> None:
    """Raise HP502 unless the sequence can be cut over cp, and over tp under sequence parallelism."""
    axes = ("cp", "tp") if topology.sequence_parallel else ("cp",)
    used = [axis for axis in axes if topology.degree(axis) > 1]
    parts = 1
    for axis in used:
        parts *= topology.degree(axis)
    if sequence % parts:
        raise PlanError(
            "HP502",
            f"sequence_length ({sequence}) must be divisible by {' * '.join(used)} ({parts})",
            where=f"{where}, mesh: {topology}",
            fix=f"use a multiple of {parts}",
        )


def check_spec(item: Described, *, inventory: Inventory, topology: Topology) -> None:
    """Check a layout against its module (HP522: a parameter, argument or attribute that it does not have; HP502) and by itself.

    HP402, HP403: it breaks its contract. Names come first: beside a misspelt one, a right one looks wrong.
    """
    info, spec = item.info, item.spec
    _check_parameters(item, inventory.parameters_below(info.fqn) if spec.params or spec.views else {})
    for field in ("in_src", "in_dst") if spec.is_boundary else ():
        _check_names(item, field, getattr(spec, field), info.forward_args, "a forward argument")
    _check_names(item, "local_attrs", spec.local_attrs, info.attributes, "a plain integer attribute")
    try:
        validate_sharding(spec, where=f"{info.fqn or 'the root'}, {item.declared_by}", inputs=info.forward_args)
    except DeclarationError as error:
        raise DeclarationError(error.code, error.what, expected=error.expected, where=error.where, fix=item.fix) from error
    for name in spec.local_attrs:
        size = info.attributes[name]
        if size % topology.tp:
            refuse(indivisible(f"{info.fqn}.{name}", size, axis="tp", degree=topology.tp), "HP502", where="")


def check_ports(item: Described, *, topology: Topology, batch: int, sequence: int) -> None:
    """Raise HP502 where the axes that cut one dim of a port do not divide it, HP522 where the port has no such dim."""
    spec = item.spec
    for layouts in (spec.in_src, spec.in_dst, spec.out_src, spec.out_dst or {}):
        for name, layout in layouts.items():
            if name in spec.ports:
                shape = port_shape(spec.ports[name], batch=batch, sequence=sequence)
                _check_port(f"{item.info.fqn}:{name}", shape, layout, topology=topology, item=item)


def check_families(inventory: Inventory, *, names: Names, context: LayoutContext) -> None:
    """Raise HP560 if a family refuses its arguments or the mesh, or was resolved for another one."""
    for replacement in inventory.replacements:
        family = names.family(replacement.family)
        if replacement.kind == "module":
            check_resolved(replacement, family, topology=context.topology)
        check_family(family, arguments=replacement.arguments, topology=context.topology, where=replacement.declared_by)


def check_family(family: ModuleFamily, *, arguments: Mapping[str, object], topology: Topology, where: str) -> None:
    """Raise HP560 if the family refuses the arguments of one member, or the mesh."""
    for problem in problems(family.validate, arguments, topology):
        refuse(problem, "HP560", where=where)


def check_resolved(replacement: ReplacementPlan, family: ModuleFamily, *, topology: Topology) -> None:
    """Raise HP560 if the replacement was made for a mesh on which its family picks another member or other degrees."""
    asked = {**replacement.arguments, **replacement.selectors}
    context, where = FamilyContext.of(topology), replacement.declared_by
    wanted = resolve_family(family, arguments=asked, context=context, names=replacement.arguments, where=where)
    if (replacement.constructor, replacement.degrees) != (wanted.constructor, wanted.degrees):
        degrees = " ".join(f"{axis}={degree}" for axis, degree in replacement.degrees.items()) or "any mesh"
        raise PlanError(
            "HP560",
            f"{replacement.fqn} was built as {family.name}/{replacement.variant} for {degrees}",
            expected=f"{family.name}/{wanted.variant}, for mesh: {topology}",
            where=where,
        )


def replicated_notes(described: Iterable[Described]) -> tuple[str, ...]:
    """Return a line for every kind of boundary whose layouts leave tp out, which then means Replicate."""
    missing: dict[tuple[str, str], list[str]] = {}
    for item in described:
        spec = item.spec
        every = {**spec.params, **spec.in_src, **spec.in_dst, **spec.out_src, **(spec.out_dst or {})}
        names = tuple(name for name, layout in every.items() if "tp" not in layout)
        if names:
            missing.setdefault((item.declared_by, ", ".join(names)), []).append(item.info.fqn)
    return tuple(
        f"{by}: {names} of {fqns[0]}{f' and {len(fqns) - 1} more' if fqns[1:] else ''} name no tp placement: Replicate"
        for (by, names), fqns in missing.items()
    )


def _check_parameters(item: Described, existing: Collection[str]) -> None:
    for path in (*item.spec.params, *item.spec.views):
        if path not in existing:
            text = f"{item.info.fqn or 'the root'} has no parameter {path!r}{suggest(str(path), existing)}"
            expected = f"one of {', '.join(sorted(existing)) or 'none'}"
            raise PlanError("HP522", text, expected=expected, where=item.declared_by, fix=item.fix)


def _check_names(item: Described, field: str, names: Iterable[str], known: Iterable[str], what: str) -> None:
    known = tuple(known)
    for name in names:
        if name not in known:
            raise PlanError(
                "HP522",
                f"the layout of {item.info.fqn or 'the root'} names {name!r} in {field}{suggest(str(name), known)}",
                expected=f"{what}: {', '.join(known) or 'there is none'}",
                where=item.declared_by,
                fix=item.fix,
            )


def _check_port(name: str, shape: tuple[int, ...], layout: Layout, *, topology: Topology, item: Described) -> None:
    cuts: dict[int, list[str]] = {}
    for axis in AXES:
        placement = layout.get(axis)
        if isinstance(placement, Shard):
            cuts.setdefault(placement.dim, []).append(axis)
    for dim, axes in cuts.items():
        if dim >= len(shape):
            text = f"{name} is cut on dim {dim}, but its port has shape {shape}"
            raise PlanError("HP522", text, where=item.declared_by, fix=item.fix)
        parts = 1
        for axis in axes:
            parts *= topology.degree(axis)
        if shape[dim] % parts:
            what = f"dim {dim} of {name}"
            written = "" if item.source else f"{item.declared_by}, mesh: {topology}"  # an override has put it there
            if len(axes) == 1:
                problem = indivisible(what, shape[dim], axis=axes[0], degree=parts)
                refuse(attrs.evolve(problem, where=written or problem.where), "HP502", where="")
            text = f"{what} ({shape[dim]}) must be divisible by {' * '.join(axes)} ({parts})"
            fix = f"change {' or '.join(f'mesh.{axis}' for axis in axes)}"
            raise PlanError("HP502", text, where=written or "mesh", fix=fix)
