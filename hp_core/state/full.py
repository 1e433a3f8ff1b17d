"""Whole tensors of a live, sharded model under Hugging Face's names and shapes: what a reference can be compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from hp_core.contracts.plan import BuildPlan, ParameterPlan
from hp_core.errors import PlanError
from hp_core.state.manifest import source_names
from hp_core.state.slices import assemble
from hp_core.state.transforms import Step, inverse, inverse_gradient, strands


def full_state(model: nn.Module, plan: BuildPlan) -> dict[str, Tensor]:
    """Return every parameter and saved buffer, whole, on every rank.

    Keys are Hugging Face's runtime names, shapes Hugging Face's runtime shapes; a tied tensor appears once, under its
    canonical name. Values are detached and may share memory with the model. All ranks must call this.
    """
    live, found = live_tensors(model, plan), {}
    for parameter in plan.parameters:
        whole = assemble(live.pop(parameter.fqn))
        found.update({name: inverse(steps, whole) for name, steps in _sources(parameter)})
    return found | {fqn: assemble(buffer) for fqn, buffer in live.items()}


def full_gradients(model: nn.Module, plan: BuildPlan) -> dict[str, Tensor | None]:
    """Return every parameter's gradient, whole, on every rank; None where there is none.

    Keys and shapes are as in :func:`full_state`, without buffers. A gradient must exist on all ranks or on none; all ranks
    must call this.
    """
    live, found = live_tensors(model, plan), {}
    for parameter in plan.parameters:
        grad = live[parameter.fqn].grad
        whole = None if grad is None else assemble(grad)
        for name, steps in _sources(parameter):
            found[name] = None if whole is None else inverse_gradient(steps, whole)
    return found


def _sources(parameter: ParameterPlan) -> Iterator[tuple[str, Sequence[Step]]]:
    """Yield the name of each of Hugging Face's tensors that a parameter is made of, and the steps that lead from it."""
    for strand in strands(parameter.transforms, parameter.shape):
        yield source_names(parameter, strand)[0], strand.steps


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
