"""Whole tensors of a live, sharded model under Hugging Face's names and shapes: what a reference can be compared with."""

from __future__ import annotations

from torch import Tensor, nn

from hp_core.contracts.plan import BuildPlan
from hp_core.errors import PlanError
from hp_core.state.slices import assemble
from hp_core.state.transforms import inverse, inverse_gradient


def full_state(model: nn.Module, plan: BuildPlan) -> dict[str, Tensor]:
    """Return every parameter and saved buffer, whole, on every rank.

    Keys are Hugging Face's runtime names, shapes Hugging Face's runtime shapes; a tied tensor appears once, under its
    canonical name. Values are detached and may share memory with the model. All ranks must call this.
    """
    transforms = {parameter.fqn: parameter.transforms for parameter in plan.parameters}
    return {fqn: inverse(transforms.get(fqn, ()), assemble(tensor)) for fqn, tensor in live_tensors(model, plan).items()}


def full_gradients(model: nn.Module, plan: BuildPlan) -> dict[str, Tensor | None]:
    """Return every parameter's gradient, whole, on every rank; None where there is none.

    Keys and shapes are as in :func:`full_state`, without buffers. A gradient must exist on all ranks or on none; all ranks
    must call this.
    """
    live = live_tensors(model, plan)
    return {
        parameter.fqn: None if grad is None else inverse_gradient(parameter.transforms, assemble(grad))
        for parameter in plan.parameters
        for grad in (live[parameter.fqn].grad,)
    }


def live_tensors(model: nn.Module, plan: BuildPlan) -> dict[str, Tensor]:
    """Return the model's own parameters and saved buffers (as they lie on this rank), in the order of the plan.

    Raises :class:`PlanError` HP525 if the model lacks one of them.
    """
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    wanted = [parameter.fqn for parameter in plan.parameters]
    wanted += [buffer.fqn for buffer in plan.buffers if buffer.persistent]
    for fqn in wanted:
        if fqn not in held:
            raise PlanError(
                "HP525", f"the plan names {fqn}, which the model does not have", fix="make the plan from this model"
            )
    return {fqn: held[fqn] for fqn in wanted}
