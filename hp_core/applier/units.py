"""FSDP2 units: stock ``fully_shard`` on the storage mesh, with the settings that make its sums exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from hp_core.applier.exchange import install_exchange
from hp_core.contracts.plan import BuildPlan, UnitPlan
from hp_core.mesh.context import SHARDED, MeshContext


def wrap_units(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Wrap the plan's units, inner before outer, the root last, but for those that the plan says are not wrapped.

    Gradients are summed, not averaged: the objective carries the one global normaliser.
    """
    left: set[nn.Parameter] = set()  # FSDP2 gives what an inner unit does not hold to the outer one
    for unit in plan.units:
        module = model.get_submodule(unit.fqn)
        if unit.wraps:
            _wrap(module, unit, mesh=mesh, left=left)
        else:
            left |= set(module.parameters())


def _wrap(module: nn.Module, unit: UnitPlan, *, mesh: MeshContext, left: set[nn.Parameter]) -> None:
    fully_shard(
        module,
        mesh=mesh.storage(unit.view),
        reshard_after_forward=unit.reshard_after_forward,
        shard_placement_fn=_cut(unit.shard_dim),
        ignored_params=left,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=_dtype(unit.compute),
            reduce_dtype=_dtype(unit.reduce),
            cast_forward_inputs=False,  # boundaries cast what must be cast; losses and router scores stay as they are
        ),
    )
    wrapped = cast(FSDPModule, module)
    # Each alone is wrong on gloo: a factor needs a scaled sum that it lacks, and a forced sum still averages without one.
    wrapped.set_gradient_divide_factor(1.0)
    wrapped.set_force_sum_reduction_for_comms(True)
    install_exchange(wrapped, axis=mesh.axis(SHARDED[unit.view]))


def _cut(dim: int) -> Callable[[nn.Parameter], Shard | None]:
    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(dim) if dim else None

    return placement


def _dtype(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, name))
