"""The local view: inside its owner's forward a parameter is a plain local tensor whose gradient is complete."""

from __future__ import annotations

import copy
import functools
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_core.applier.collectives import identity
from hp_core.applier.derive import derive
from hp_core.contracts.placement import FirstRank, HeadSlice, View
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup
from hp_core.models.state import state_of

MARK = "hp_computing"  # while a forward runs: the views it has taken so far, by parameter name; None otherwise


@attrs.frozen(kw_only=True, eq=False)
class ParameterView:
    """How a forward sees one parameter.

    - ``mesh``: the one-axis mesh of a parameter that is a DTensor; None for a replicated one.
    - ``partial``: the axis over which the body produces only a summand of the gradient; the view completes it, in at
      least float32, before it reaches the parameter.
    - ``view``, ``axis``: the part of a replicated parameter that this rank computes with.
    """

    mesh: DeviceMesh | None = None
    partial: AxisGroup | None = None
    view: View | None = None
    axis: AxisGroup | None = None

    def __call__(self, parameter: Tensor) -> Tensor:
        """Return the local tensor that the body computes with."""
        tensor = _local(parameter) if isinstance(parameter, DTensor) else parameter
        if self.partial is not None:
            tensor = identity(tensor, axis=self.partial)
        if self.view is None or self.axis is None:
            return tensor
        return _part(tensor, self.view, self.axis)

    def gathered(self, parameter: Tensor) -> bool:
        """Return whether ``parameter`` is whole but for its model-parallel axis, so that a view of it is valid."""
        return not isinstance(parameter, DTensor) or parameter.device_mesh == self.mesh


def _local(parameter: DTensor) -> Tensor:
    found: Tensor = parameter.to_local() if torch.compiler.is_compiling() else _Local.apply(parameter)
    return found


class _Local(torch.autograd.Function):
    """``to_local``; a gradient that lies as the shard does gets the parameter's specification, instead of one worked out anew.

    Over the parameters of a model that work is 1 to 2 % of a short step.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        shard = parameter._local_tensor
        ctx.spec, ctx.stride = parameter._spec, shard.stride()
        return shard.view_as(shard)  # an object of its own: autograd writes into it

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        if grad.stride() == ctx.stride:
            return DTensor(grad, copy.copy(ctx.spec), requires_grad=False)
        mesh, placements = ctx.spec.device_mesh, ctx.spec.placements
        return DTensor.from_local(grad, mesh, placements, shape=ctx.spec.shape, stride=ctx.spec.stride)


def _part(tensor: Tensor, view: View, axis: AxisGroup) -> Tensor:
    if isinstance(view, HeadSlice):
        size = tensor.shape[view.dim] // view.parts
        return tensor.narrow(view.dim, axis.rank * view.parts // axis.size * size, size)
    assert isinstance(view, FirstRank)
    return tensor if axis.rank == 0 else tensor * 0  # a zero gradient, not none: every rank has one


def install_view(module: nn.Module) -> None:
    """Let ``module``'s forward see its parameters through ``module.hp.views``; outside it they stay what they are.

    FSDP2 reads parameters by ``getattr`` outside the forward and must meet the DTensor.
    """
    derive(module, _viewing)


def local(module: nn.Module, name: str) -> Tensor:
    """Return the local view of a parameter for code outside its owner's forward.

    Valid while the unit that holds it is gathered, that is inside the unit's forward. HP525: no such parameter;
    HP552: the parameter is cut by FSDP at this moment.
    """
    seen = module.__dict__.get(MARK)
    if seen is not None and name in seen:
        return seen[name]
    state = state_of(module)
    where = state.fqn if state else type(module).__name__
    parameter = module._parameters.get(name)
    if parameter is None:
        raise PlanError("HP525", f"{where} has no parameter {name!r}", expected=", ".join(module._parameters) or "none")
    view = state.views.get(name, _PLAIN) if state else _PLAIN
    if not view.gathered(parameter):
        raise PlanError(
            "HP552",
            f"a local view of {where}.{name} is asked for while FSDP holds it in parts",
            expected="a call from inside the forward of the unit that holds it",
            fix="move the call, or assemble the whole parameter with hp_core.state.slices.assemble",
        )
    return view(parameter)


_PLAIN = ParameterView()


def _viewing(cls: type[nn.Module]) -> dict[str, Any]:
    def __getattr__(self: nn.Module, name: str) -> Any:  # noqa: N807
        value = cls.__getattr__(self, name)
        seen = self.__dict__.get(MARK)
        if seen is None:
            return value
        if name not in seen:
            view = self.__dict__["hp"].views.get(name)
            if view is None:
                return value
            seen[name] = view(value)  # one view per forward, so that a parameter used twice is completed once
        return seen[name]

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = self.__dict__.get(MARK)
        setattr(self, MARK, {})
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            setattr(self, MARK, before)

    return {"forward": forward, "__getattr__": __getattr__}
