"""Parameters on the mesh: a sharded one becomes a DTensor on its one axis, all on meta; shared ones stay one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from hp_core.applier.view import ParameterView, install_view
from hp_core.contracts.placement import Partial, Shard
from hp_core.contracts.plan import BoundaryPlan, BuildPlan, ParameterPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_core.models.state import state_of, update

_MODEL_PARALLEL: tuple[Literal["tp", "ep"], ...] = ("tp", "ep")


def check_parameters(model: nn.Module, plan: BuildPlan) -> None:
    """Raise HP525 unless ``plan`` and ``model`` have the same parameters, of the same shapes, and all are on meta."""
    found = dict(model.named_parameters(remove_duplicate=False))
    planned = {name: entry for entry in plan.parameters for name in (entry.fqn, *entry.aliases)}
    for name in sorted(set(found) ^ set(planned)):
        what = f"the model has the parameter {name}" if name in found else f"the plan has the parameter {name}"
        raise PlanError("HP525", what, expected="it in both", fix="apply the plan to the model it was made for")
    for name, entry in planned.items():
        if tuple(found[name].shape) != entry.shape:
            what = f"{name} has the shape {tuple(found[name].shape)}"
            raise PlanError("HP525", what, expected=f"{entry.shape}, as planned")
        if not found[name].is_meta and entry.owner not in plan.built:
            raise PlanError("HP525", f"{name} has memory already", expected="a model on meta", fix="use hp_core.build")


def check_attributes(module: nn.Module, plan: BoundaryPlan, *, tp: int) -> None:
    """Raise HP522 unless the attributes that a boundary's body sees per tp rank are integers that divide evenly."""
    for name in plan.spec.local_attrs:
        value = getattr(module, name, None)
        if type(value) is not int or value % tp:
            raise PlanError("HP522", f"{plan.fqn}.{name} is {value!r}", expected=f"an integer divisible by tp ({tp})")


def divide_attributes(module: nn.Module, plan: BoundaryPlan, *, tp: int) -> None:
    """Divide the integer attributes that a boundary's body sees per tp rank."""
    for name in plan.spec.local_attrs:
        setattr(module, name, getattr(module, name) // tp)


def not_built(plan: BuildPlan) -> list[ParameterPlan]:
    """Return the parameters that applying the plan makes: all but those of components that were built before."""
    return [entry for entry in plan.parameters if entry.owner not in plan.built]


def shard_parameters(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Give every parameter its place, dtype and requires_grad of the plan, and its module its name. All stays on meta.

    Here and below, what a component that was built before owns is left as it is.
    """
    for entry in not_built(plan):
        new = _place(entry, mesh)
        for name in (entry.fqn, *entry.aliases):
            owner, _, local_name = name.rpartition(".")
            module = model.get_submodule(owner)
            module._parameters[local_name] = new
            update(module, owner)


def install_views(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Let every module see its parameters as the plan says: local, completed, sliced."""
    for entry in not_built(plan):
        view = _view(entry, mesh)
        if view is None:
            continue
        for name in (entry.fqn, *entry.aliases):
            owner, _, local_name = name.rpartition(".")
            module = model.get_submodule(owner)
            state = state_of(module)
            if state is None or not state.views:
                install_view(module)
            update(module, owner, views={**(state.views if state else {}), local_name: view})


def _place(entry: ParameterPlan, mesh: MeshContext) -> nn.Parameter:
    shape, dtype = list(entry.shape), cast(torch.dtype, getattr(torch, entry.dtype))
    axis = sharded_axis(entry, mesh)
    if axis is None:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=entry.trainable)
    dim = cast(Shard, entry.layout[axis]).dim
    shape[dim] //= mesh.axis(axis).size
    tensor = DTensor.from_local(
        torch.empty(shape, dtype=dtype, device="meta"), mesh.submesh(axis), [TorchShard(dim)], run_check=False
    )
    return nn.Parameter(tensor, requires_grad=entry.trainable)


def sharded_axis(entry: ParameterPlan, mesh: MeshContext) -> Literal["tp", "ep"] | None:
    """Return the model-parallel axis of degree > 1 that cuts the parameter, or None. HP522 if there are two."""
    axes = [a for a in _MODEL_PARALLEL if isinstance(entry.layout.get(a), Shard) and mesh.axis(a).size > 1]
    if len(axes) > 1:
        raise PlanError("HP522", f"{entry.fqn} is sharded on {' and '.join(axes)}", expected="one model-parallel axis")
    return axes[0] if axes else None


def _view(entry: ParameterPlan, mesh: MeshContext) -> ParameterView | None:
    axis = sharded_axis(entry, mesh)
    partial: Sequence[str] = [a for a, at in entry.gradient.items() if isinstance(at, Partial) and mesh.axis(a).size > 1]
    if axis is None and not partial:
        return None
    return ParameterView(
        mesh=mesh.submesh(axis) if axis else None,
        partial=mesh.axis(partial[0]) if partial else None,
        view=entry.view if partial else None,
        axis=mesh.axis(partial[0]) if partial else None,
    )
