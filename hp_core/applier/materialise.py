"""Memory for a model on meta, and what fills it that is not a parameter: buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hp_core.applier.initialise import block_generator, deviation
from hp_core.contracts.adapter import Init
from hp_core.contracts.plan import BufferPlan, BuildPlan
from hp_core.errors import PlanError
from hp_core.plugins.lazy import load


def materialise(model: nn.Module, plan: BuildPlan, *, device: torch.device) -> None:
    """Give every parameter and buffer on meta uninitialised memory on ``device``; shared parameters stay one object.

    What has memory already, in a component that was built before, keeps it.
    """
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for entry in plan.parameters:
        parameter = model.get_parameter(entry.fqn)
        for name in entry.aliases:
            owner, _, local_name = name.rpartition(".")
            model.get_submodule(owner)._parameters[local_name] = parameter


def fill_buffers(model: nn.Module, plan: BuildPlan, *, loaded: bool) -> None:
    """Fill the buffers; saved ones only if no checkpoint was ``loaded``, which has filled them. HP553: one is left."""
    planned = {entry.fqn: entry for entry in plan.buffers}
    with torch.no_grad():
        for fqn, buffer in model.named_buffers():
            entry = planned.get(fqn)
            if entry is not None and entry.persistent and loaded:
                continue
            if entry is None or entry.init is None:
                raise PlanError("HP553", f"the buffer {fqn} was never filled", expected="an entry for it in the adapter's init")
            buffer.copy_(_value(model, buffer, entry, entry.init, plan))


def _value(model: nn.Module, buffer: Tensor, entry: BufferPlan, init: Init, plan: BuildPlan) -> Tensor | Any:
    if init.kind == "computed":
        return load(str(init.function))(model, entry.fqn)
    if init.kind == "constant":
        return torch.full_like(buffer, init.value)
    generator = block_generator(int(plan.options.get("seed", 0)), entry.fqn, 0)
    return torch.empty(buffer.shape).normal_(generator=generator) * deviation(init, plan.config)
