"""What is checked before a member of a family is built: which family, from what, for which degrees, on which mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from hp_core.contracts.family import FamilyContext, FamilyRequest, ModuleFamily, ResolvedFamily
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import LogicalDeviceMesh
from hp_core.models.inventory import class_path
from hp_core.models.state import state_of
from hp_core.plugins.lazy import load
from hp_core.plugins.plugins import Plugins


def find_family(
    target: str | type | ModuleFamily | FamilyRequest, arguments: Mapping[str, Any] | None, *, plugins: Plugins | None
) -> tuple[ModuleFamily, FamilyRequest]:
    """Return the family that ``target`` means and the request for it. HP101 for a name that no plugin provides.

    HP560: a request together with arguments, a baseline of no or of several families, a lookup without plugins.
    """
    if isinstance(target, FamilyRequest):
        if arguments is not None:
            what = f"a request for {target.target!r} is combined with arguments ({', '.join(arguments) or 'none'})"
            raise PlanError("HP560", what, expected="one of the two")
        return _look_up(target.target, plugins), target
    family = target if isinstance(target, ModuleFamily) else _look_up(target, plugins)
    return family, FamilyRequest(target=family.name, kwargs=arguments or {})


def resolve_context(family: ModuleFamily, *, context: FamilyContext | None, mesh: Any) -> FamilyContext:
    """Return the degrees to build for: the mesh's, the context's, or 1.

    HP560: something else than a mesh or a context, a mesh without the family's axis, a mesh whose size on it is not its
    topology's, a mesh and a context that disagree.
    """
    if context is not None and not isinstance(context, FamilyContext):
        raise PlanError("HP560", f"context is a {type(context).__name__}", expected="a FamilyContext")
    if mesh is None:
        return context or FamilyContext()
    if not isinstance(mesh, MeshContext | LogicalDeviceMesh):
        raise PlanError("HP560", f"mesh is a {type(mesh).__name__}", expected="a MeshContext or a LogicalDeviceMesh")
    if isinstance(mesh, LogicalDeviceMesh) and family.parallel_axis is not None:
        _check_view(family, mesh)
    found = FamilyContext.of(mesh.topology)
    if context is not None and context != found:
        what = f"the mesh has cp={found.cp} ep={found.ep}, the context cp={context.cp} ep={context.ep}"
        raise PlanError("HP560", what, expected="equal degrees, or no context")
    return found


def check_job(module: nn.Module | None, mesh: Any) -> None:
    """Raise HP560 if a live mesh is not this process's job, or if ``module`` is bound to another one."""
    if isinstance(mesh, MeshContext):
        world = dist.get_world_size() if dist.is_initialized() else 0
        if mesh.topology.world != world:
            what = f"the mesh has {mesh.topology.world} ranks, this job has {world or 'no process group'}"
            raise PlanError("HP560", what, expected="a mesh of this job")
    for fqn, part in module.named_modules() if module is not None else ():
        state = state_of(part)
        owner = None if state is None else state.mesh or (state.binding and state.binding.mesh)
        if owner is not None and owner is not mesh:
            raise PlanError("HP560", f"{fqn or 'the module'} belongs to another job's mesh", expected="a module of this job")


def check_parallel_member(family: ModuleFamily, resolved: ResolvedFamily) -> None:
    """Raise HP560 unless a member that communicates has a layout provider and says how it communicates."""
    axis = family.parallel_axis
    if axis is None or resolved.degrees[axis] == 1:
        return
    name = f"{family.name}, member {resolved.variant}, for {axis}={resolved.degrees[axis]}"
    if family.sharding is None:
        raise PlanError("HP560", f"{name} has no layout provider", expected="one, since the member is parallel")
    spec = getattr(load(resolved.constructor), "parallel_spec", None)
    kind = "none" if spec is None else spec.binding_kind
    if kind not in (axis, "mesh"):
        raise PlanError(
            "HP560", f"{name} has a binding of kind {kind!r}", expected=f"a parallel_spec of kind {axis!r} or 'mesh'"
        )


def _look_up(target: str | type, plugins: Plugins | None) -> ModuleFamily:
    if plugins is None:
        name = target if isinstance(target, str) else target.__qualname__
        raise PlanError("HP560", f"the family {name!r} is to be looked up, but no plugins are given", expected="plugins")
    if isinstance(target, str) and ":" not in target:
        return plugins.family(target)
    baseline = target if isinstance(target, str) else class_path(target)
    hits = [item.declaration for item in plugins.families.values() if item.declaration.baseline == baseline]
    if len(hits) != 1:
        found = f"several: {', '.join(sorted(family.name for family in hits))}" if hits else "none"
        raise PlanError("HP560", f"families with the baseline {baseline}: {found}", expected="exactly one")
    family: ModuleFamily = hits[0]
    return family


def _check_view(family: ModuleFamily, mesh: LogicalDeviceMesh) -> None:
    axis = str(family.parallel_axis)
    if axis not in mesh.names:
        view = "activation" if axis == "cp" else "expert"
        what = f"the mesh ({', '.join(mesh.names)}) has no axis {axis}, on which family {family.name!r} depends"
        raise PlanError("HP560", what, expected=f"a view with {axis}", fix=f"pass topology.view({view!r})")
    if mesh.size(axis) != mesh.topology.degree(axis):
        what = f"the mesh has {axis}={mesh.size(axis)}, its topology {axis}={mesh.topology.degree(axis)}"
        raise PlanError("HP560", what, expected="equal degrees")
