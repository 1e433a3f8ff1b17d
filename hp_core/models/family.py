"""Provenance of family modules: whether what is in a model was built for the job that uses it."""

from __future__ import annotations

from torch import nn

from hp_core.contracts.family import FamilyContext
from hp_core.errors import PlanError
from hp_core.models.state import state_of


def validate_family_context(model: nn.Module, context: FamilyContext) -> None:
    """Raise HP560 if a family module of ``model`` was built for other degrees of cp or ep than ``context``, the job's.

    Only the degrees that its member was chosen by count: a family that does not depend on the mesh fits every job.
    """
    for fqn, module in model.named_modules():
        state = state_of(module)
        if state is None or state.resolved is None:
            continue
        for axis, degree in state.resolved.degrees.items():
            asked = context.cp if axis == "cp" else context.ep
            if degree != asked:
                name = f"{fqn or 'the module'} ({state.resolved.family}, member {state.resolved.variant})"
                raise PlanError(
                    "HP560",
                    f"{name} was built for {axis}={degree}",
                    expected=f"{axis}={asked}, the job's",
                    fix="build it with the job's mesh",
                )
