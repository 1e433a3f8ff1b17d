"""plan(): an inventory, a recipe and a topology become a BuildPlan. Pure: equal inputs give equal plans, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from hp_core.contracts import (
    BoundaryPlan,
    BuildPlan,
    CheckpointMapping,
    CollectivePlan,
    Inventory,
    KernelPlan,
    LayoutContext,
    ModelAdapter,
    ParameterPlan,
    ProtocolPlan,
    RecomputePlan,
)
from hp_core.contracts.placement import Layout
from hp_core.mesh.topology import Topology
from hp_core.planner import checks, routers
from hp_core.planner.bindings import check_bindings
from hp_core.planner.bodies import check_overridden, varying_bodies
from hp_core.planner.collectives import compile_boundary
from hp_core.planner.component import check_built
from hp_core.planner.describe import Described, describe_modules
from hp_core.planner.flow import check_flow, constant_ports
from hp_core.planner.kernels import plan_kernels
from hp_core.planner.names import Credits
from hp_core.planner.overrides import Overridden, apply_overrides, frozen_changes
from hp_core.planner.ownership import assign_owners
from hp_core.planner.parameters import ParameterRules, plan_buffers, plan_parameters
from hp_core.planner.places import placed
from hp_core.planner.protocols import plan_protocols, plan_traffic
from hp_core.planner.schemes import Dtypes, plan_dtypes
from hp_core.planner.units import UnitOptions, layer_fqns, plan_recompute, plan_units
from hp_core.plugins.lazy import call
from hp_core.recipe.schema import Recipe
from hp_core.recipe.unstructure import plain


def plan(inventory: Inventory, recipe: Recipe, topology: Topology) -> BuildPlan:
    """Return everything that applying needs, or raise the first :class:`PlanError`; nothing is changed anywhere.

    HP502: a size does not divide; HP515: an axis this version cannot use; HP520-HP523: layouts, ownership and neighbours;
    HP524: the configuration; HP526, HP527: initialisation and freezing; HP528: a plugin refuses the plan.

    Example::

        plan(built.inventory, recipe, recipe.topology(world=512)).parameters[0].layout
    """
    with placed(recipe.where, topology):
        return _plan(inventory, recipe, topology)


def _plan(inventory: Inventory, recipe: Recipe, topology: Topology) -> BuildPlan:
    adapter = recipe.adapter
    config = _plain(inventory.config)
    checks.check_mesh(topology)
    checks.check_config(adapter, config, topology=topology, where=recipe.where)
    checks.check_sequence(recipe.tokens[1], topology=topology, where=recipe.where("train.sequence_length"))
    context = LayoutContext(topology=topology, config=config, inventory=inventory)
    overridden = _describe(inventory, recipe=recipe, context=context)
    described = overridden.described
    checks.check_families(inventory, names=Credits(recipe.declarations), context=context)
    check_bindings(described, context=context)
    notes = check_flow(
        {item.info.fqn: item.spec for item in described},
        adapter.flow,
        residual=_residual(adapter, context),
        adapter=adapter.name,
        added=[item.info.fqn for item in described if item.info.fqn in overridden.added],
        changed=overridden.written,
    )
    dtypes = plan_dtypes(inventory, described, recipe=recipe, topology=topology)
    made = _assemble(inventory, overridden, recipe=recipe, topology=topology, dtypes=dtypes)
    found = {item.info.fqn: item.info.built for item in described if item.info.built is not None}
    for fqn, built in found.items():
        check_built(made, fqn, built)
    sizes = (
        []
        if recipe.has_tokens
        else [f"no train section: figures are for a micro-batch of {made.batch} x {made.sequence} tokens"]
    )
    trust = [f"{package} is trusted by the command line: the recipe names code of it" for package in recipe.trusted]
    made = attrs.evolve(
        made,
        built=tuple(found),
        changes=(*overridden.changes, *dtypes.changes, *frozen_changes(recipe, made.parameters)),
        notes=(*notes, *checks.replicated_notes(described), *sizes, *trust),
    )
    recipe.declarations.check_plan(made)
    return made


def _describe(inventory: Inventory, *, recipe: Recipe, context: LayoutContext) -> Overridden:
    """Return the boundaries, with the recipe's overrides, after every check that needs one boundary at a time."""
    derived = describe_modules(
        inventory,
        adapter=recipe.adapter,
        names=Credits(recipe.declarations),
        context=context,
        sources={record.fqn: record.source for record in inventory.replacements if record.kind == "module"},
    )
    overridden = apply_overrides(inventory, derived, recipe=recipe, topology=context.topology)
    batch, sequence = recipe.tokens
    for item in overridden.described:
        checks.check_spec(item, inventory=inventory, topology=context.topology)
        checks.check_ports(item, topology=context.topology, batch=batch, sequence=sequence)
    check_overridden(overridden, flow=recipe.adapter.flow, topology=context.topology)
    return overridden


def _residual(adapter: ModelAdapter, context: LayoutContext) -> Layout:
    return call(adapter.residual, context, gives=Mapping) if adapter.residual else context.residual


def _assemble(inventory: Inventory, overridden: Overridden, *, recipe: Recipe, topology: Topology, dtypes: Dtypes) -> BuildPlan:
    adapter, (batch, sequence), described = recipe.adapter, recipe.tokens, overridden.described
    boundaries = _boundaries(inventory, overridden, recipe=recipe, topology=topology, dtypes=dtypes)
    parameters = _parameters(inventory, described, boundaries, recipe=recipe, topology=topology, dtypes=dtypes)
    variants = {record.fqn: record.variant for record in inventory.replacements}
    kernels = plan_kernels(described, variants=variants, recipe=recipe, topology=topology)
    protocols = plan_protocols(described, recipe=recipe, topology=topology, config=inventory.config)
    options = _unit_options(recipe)
    units = plan_units(inventory, parameters, adapter=adapter, options=options, dtypes=dtypes, topology=topology)
    return BuildPlan(
        adapter=adapter.name,
        model_class=inventory.model_class,
        topology=topology,
        model_dtype=recipe.model.dtype,
        device=recipe.device,
        batch=batch,
        sequence=sequence,
        loss=adapter.loss,
        checkpoint=recipe.model.checkpoint,
        mapping=(
            call(adapter.checkpoint, inventory.config, gives=CheckpointMapping) if adapter.checkpoint else CheckpointMapping()
        ),
        config=_plain(inventory.config),
        boundaries=boundaries,
        parameters=parameters,
        buffers=plan_buffers(inventory, adapter=adapter),
        units=units,
        replacements=inventory.replacements,
        recompute=_recompute(inventory, recipe),
        kernels=kernels,
        schemes=dtypes.runs,
        protocols=protocols,
        traffic=plan_traffic(protocols, described, recipe=recipe, topology=topology, config=_plain(inventory.config)),
        routers=routers.plan_routers(inventory, described, recipe=recipe),
        options=_plain({"seed": recipe.seed, "loss_chunk": recipe.loss.chunk, "cpu_matmul": recipe.cpu_matmul}),
        plugins=_plugins(inventory, kernels, protocols, recipe=recipe, dtypes=dtypes),
        overrides=_plain({"overrides": plain(recipe.overrides)})["overrides"],
        trusted=recipe.trusted,
    )


def _parameters(
    inventory: Inventory,
    described: Sequence[Described],
    boundaries: Sequence[BoundaryPlan],
    *,
    recipe: Recipe,
    topology: Topology,
    dtypes: Dtypes,
) -> tuple[ParameterPlan, ...]:
    adapter = recipe.adapter
    rules = ParameterRules(
        adapter=adapter,
        topology=topology,
        dtype=recipe.model.dtype,
        freeze=recipe.frozen,
        where=recipe.where("freeze"),
        varying={boundary.fqn: boundary.varying for boundary in boundaries},
        dtypes=dtypes,
    )
    owned = assign_owners(inventory, described, isolated=adapter.isolated_subtrees)
    return plan_parameters(inventory, owned, described, rules=rules)


def _recompute(inventory: Inventory, recipe: Recipe) -> tuple[RecomputePlan, ...]:
    layers, wanted = layer_fqns(inventory, recipe.adapter.stack), recipe.recompute
    return plan_recompute(layers, mode=wanted.mode, chosen=wanted.layers, where=recipe.where("recompute.layers"))


def _boundaries(
    inventory: Inventory, overridden: Overridden, *, recipe: Recipe, topology: Topology, dtypes: Dtypes
) -> tuple[BoundaryPlan, ...]:
    """Return every boundary with its collectives; one of the recipe's own makes none, the body around it does."""
    varying, (batch, sequence) = varying_bodies(overridden, topology=topology), recipe.tokens
    specs = {item.info.fqn: item.spec for item in overridden.described}
    owners = {fqn for fqn in specs if inventory.parameters_below(fqn)}
    constant = constant_ports(specs, recipe.adapter.flow, owners=owners)
    found = []
    for item in overridden.described:
        fqn = item.info.fqn
        collectives: tuple[CollectivePlan, ...] = ()
        if fqn not in overridden.added:
            collectives = compile_boundary(
                fqn,
                item.spec,
                topology=topology,
                varying=varying[fqn],
                constant=constant,
                batch=batch,
                sequence=sequence,
                compute=dtypes.compute[fqn],
                where=item.declared_by,
            )
        found.append(
            BoundaryPlan(
                fqn=fqn,
                cls=item.info.cls,
                spec=item.spec,
                declared_by=item.declared_by,
                varying=varying[fqn],
                compute=dtypes.cast(fqn),
                collectives=collectives,
                family=item.info.family,
                parallel=item.parallel,
            )
        )
    return tuple(found)


def _unit_options(recipe: Recipe) -> UnitOptions:
    return UnitOptions(
        dtype=recipe.model.dtype,
        compute=recipe.compute,
        reduce=recipe.precision.reduce,
        reshard_after_forward=recipe.fsdp.reshard_after_forward,
    )


def _plugins(
    inventory: Inventory,
    kernels: Sequence[KernelPlan],
    protocols: Sequence[ProtocolPlan],
    *,
    recipe: Recipe,
    dtypes: Dtypes,
) -> tuple[str, ...]:
    """Return the distributions of the adapter, of the families in the model, of kernels, protocols and schemes in use."""
    names = Credits(recipe.declarations)
    families = {info.family for info in inventory.modules if info.family is not None}
    families |= {record.family for record in inventory.replacements}
    used = {names.used("family", family) for family in families}
    used |= {names.used("scheme", scope.scheme.name) for scope in dtypes.scopes}
    used |= {names.used("kernel", f"{kernel.op}:{kernel.name}") for kernel in kernels}
    used |= {names.used("protocol", f"{protocol.kind}:{protocol.name}") for protocol in protocols}
    return tuple(sorted(used | {names.used("adapter", recipe.adapter.name)}))


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that JSON returns unchanged: tuples become lists, keys text."""
    return json.loads(json.dumps(value))
