"""build_family(): one member of a family as a module, on no mesh, planned for one, or sharded and bound on a live one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from hp_core.applier.apply import connect
from hp_core.applier.bindings import validate_materialized
from hp_core.applier.initialise import initialise
from hp_core.applier.materialise import fill_buffers, materialise
from hp_core.contracts.family import FamilyContext, FamilyRequest, ModuleFamily, ResolvedFamily
from hp_core.contracts.plan import BuildPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import LogicalDeviceMesh, Topology
from hp_core.models.family_checks import check_job, check_parallel_member, find_family, resolve_context
from hp_core.models.inventory import take_inventory
from hp_core.models.members import Source, construct, resolve_member
from hp_core.models.observers import Observer, PlanNotRequired, PlanReady, notify
from hp_core.models.replace_checks import check_candidate, check_source
from hp_core.models.snapshot import take_snapshot
from hp_core.models.state import update
from hp_core.planner.component import built_component, plan_component, plan_filling
from hp_core.planner.names import Credits
from hp_core.planner.protocols import plan_component_protocols
from hp_core.plugins.plugins import Plugins
from hp_core.recipe.schema import Protocols
from hp_core.state.slices import assign

Mesh = MeshContext | LogicalDeviceMesh


@attrs.frozen(kw_only=True, eq=False)
class _Job:
    """One call, resolved: what is built, from what, for which degrees, on which mesh, on whose word."""

    family: ModuleFamily
    resolved: ResolvedFamily
    request: FamilyRequest
    source: Source
    declared_by: str
    author: str
    seed: int
    plugins: Plugins | None
    protocols: Protocols


def build_family(
    target: str | type | ModuleFamily | FamilyRequest,
    *,
    arguments: Mapping[str, Any] | None = None,
    config: Any = None,
    module: nn.Module | None = None,
    module_fqn: str = "",
    context: FamilyContext | None = None,
    mesh: Mesh | None = None,
    plugins: Plugins | None = None,
    protocols: Mapping[str, str] | Protocols | None = None,
    seed: int = 0,
    observers: Iterable[Observer] = (),
) -> nn.Module:
    """Return a new member of a family, with its provenance in ``module.hp``.

    ``target``: a family, its name, its baseline (the class or ``"module:Attr"``), or a request; all but a family are looked up
    in ``plugins``. ``arguments``: the member's arguments and selectors. Exactly one of ``config`` (build new) and ``module``
    (wrap or replace; its weights are kept). ``context``: degrees for a deferred family where there is no mesh (all 1).
    ``protocols``: how a member that communicates over cp or ep does so where that degree is more than 1, as in a recipe; the
    defaults are a recipe's, and they are looked up in ``plugins`` too.

    - no ``mesh``: a plain module. Built from a configuration it is filled by the family's ``init`` unless it is on meta.
    - a logical mesh: a module on meta (from a configuration), with its plan in ``module.hp.planned``.
    - a live mesh: sharded, bound and filled on the mesh's device; all ranks call this. A plan of a model that it is put into
      must agree (HP561).

    HP101: no such family; HP560: the request, the source, the mesh or the member are not legal; HP541: the member cannot take
    the place of ``module``; HP5xx: what planning and applying raise.

    Example::

        norm = build_family("rms_norm", arguments={"eps": 1e-6}, config=config, plugins=load_plugins())
    """
    source = Source(config=config, module=module, module_fqn=module_fqn, mesh=mesh)
    job = _resolve(target, arguments, source, context, plugins, seed)
    job = attrs.evolve(job, protocols=_chosen(protocols))
    member = _construct(job)
    observers = tuple(observers)
    if mesh is None:
        _fill_plain(member, job)
        notify(observers, PlanNotRequired(reason="the component is built without a mesh"))
        return member
    plan = _plan(member, job, mesh.topology)
    notify(observers, PlanReady(plan=plan))
    update(member, module_fqn, planned=plan)
    if isinstance(mesh, MeshContext):
        _put_on(mesh, member, plan)
        update(member, module_fqn, built=built_component(plan), mesh=mesh)
    return member


def _resolve(
    target: str | type | ModuleFamily | FamilyRequest,
    arguments: Mapping[str, Any] | None,
    source: Source,
    context: FamilyContext | None,
    plugins: Plugins | None,
    seed: int,
) -> _Job:
    family, request = find_family(target, arguments, plugins=plugins)
    if (source.config is None) == (source.module is None):
        found = "neither config nor module is given" if source.config is None else "config and module are both given"
        raise PlanError("HP560", f"family {family.name!r}: {found}", expected="exactly one of them", where=source.module_fqn)
    degrees = resolve_context(family, context=context, mesh=source.mesh)
    check_job(source.module, source.mesh)
    known = plugins is not None and family.name in plugins.families
    author = plugins.provided("family", family.name).author if plugins is not None and known else ""
    resolved = resolve_member(family, request.kwargs, context=degrees, where=source.module_fqn, author=author)
    check_parallel_member(family, resolved)
    declared_by = Credits(plugins).credit("family", family.name) if plugins is not None and known else f"family {family.name}"
    source = attrs.evolve(source, context=degrees)
    return _Job(
        family=family,
        resolved=resolved,
        request=request,
        source=source,
        declared_by=declared_by,
        author=author,
        seed=seed,
        plugins=plugins,
        protocols=Protocols(),
    )


def _chosen(protocols: Mapping[str, str] | Protocols | None) -> Protocols:
    """Return what is said about the axes' protocols, with a recipe's defaults for the rest; HP560 for another axis."""
    if isinstance(protocols, Protocols):
        return protocols
    for axis in protocols or {}:
        if axis not in ("cp", "ep"):
            raise PlanError("HP560", f"protocols name the axis {axis!r}", expected="cp or ep")
    return Protocols(**(protocols or {}))  # a name becomes a choice


def _construct(job: _Job) -> nn.Module:
    """Return the member, checked and labelled; a module it is made around is as it was."""
    source, where = job.source, job.source.module_fqn or job.declared_by
    if source.module is None:
        with torch.device("meta") if source.mesh is not None else _here():
            member = construct(job.resolved, source, where=where, author=job.author)
        if not isinstance(member, nn.Module):
            what = f"family {job.family.name!r} gives a {type(member).__name__}"
            raise PlanError("HP560", what, expected="a torch module", where=where)
    else:
        check_source(source.module, where=where)
        before = take_snapshot(source.module)
        try:
            member = construct(job.resolved, source, where=where, author=job.author)
        finally:
            before.restore()
        check_candidate(source.module, member, transforms=job.family.transforms, where=where)
    update(
        member,
        source.module_fqn,
        family=job.family.name,
        declared_by=job.declared_by,
        request=job.request,
        resolved=job.resolved,
        origin="direct",
    )
    return member


def _here() -> torch.device:
    """Return the device that new tensors are made on, whatever the caller has set."""
    return torch.empty(0).device


def _plan(member: nn.Module, job: _Job, topology: Topology) -> BuildPlan:
    config = job.source.config if job.source.config is not None else getattr(job.source.module, "config", None)
    inventory = take_inventory(member, config=_as_dict(config))
    protocols = plan_component_protocols(
        inventory.module("").parallel,
        choices=job.protocols,
        declarations=job.plugins,
        config=inventory.config,
        topology=topology,
        where=job.declared_by,
    )
    return plan_component(
        inventory,
        job.family,
        protocols=protocols,
        resolved=job.resolved,
        topology=topology,
        declared_by=job.declared_by,
        seed=job.seed,
        keep=_has_weights(member, job),
    )


def _as_dict(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return (
        dict(config) if isinstance(config, Mapping) else dict(config.to_dict() if hasattr(config, "to_dict") else vars(config))
    )


def _has_weights(member: nn.Module, job: _Job) -> bool:
    """Whether the weights came with the module that the member was made around."""
    tensors = [*member.parameters(), *member.buffers()]
    return job.source.module is not None and not any(tensor.is_meta for tensor in tensors)


def _put_on(mesh: MeshContext, member: nn.Module, plan: BuildPlan) -> None:
    """Shard, bind and fill the member. Weights that were there are cut like a checkpoint's."""
    kept = all(entry.init is None for entry in plan.parameters) and bool(plan.parameters)
    whole = {name: parameter.detach() for name, parameter in member.named_parameters()} if kept else {}
    connect(member, plan, mesh)
    materialise(member, plan, device=mesh.device)
    for name, value in whole.items():
        assign(member.get_parameter(name), value.to(mesh.device))
    if not kept:
        initialise(member, plan)
        fill_buffers(member, plan, loaded=False)
    validate_materialized(member, plan)


def _fill_plain(member: nn.Module, job: _Job) -> None:
    """Fill a member that was built from a configuration and has memory; on meta that is its owner's business."""
    if job.source.module is not None or any(tensor.is_meta for tensor in (*member.parameters(), *member.buffers())):
        return
    if not any(True for _ in member.parameters()) and not any(True for _ in member.buffers()):
        return
    inventory = take_inventory(member, config=_as_dict(job.source.config))
    plan = plan_filling(inventory, job.family, seed=job.seed)
    initialise(member, plan)
    fill_buffers(member, plan, loaded=False)
