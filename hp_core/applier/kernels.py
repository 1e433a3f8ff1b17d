"""Kernels reach the components that compute with them, as planned: ``module.hp.kernels``."""

from __future__ import annotations

from torch import nn

from hp_core.contracts.plan import BuildPlan
from hp_core.errors import PlanError
from hp_core.models.state import state_of, update
from hp_core.plugins.availability import absent, extra_line
from hp_core.plugins.lazy import load
from hp_core.plugins.missing import known_owner


def check_kernels(plan: BuildPlan) -> None:
    """Raise HP571 if a planned kernel needs a module that is not installed here. Nothing takes its place."""
    for entry in plan.kernels:
        missing = absent(entry.requires)
        if missing:
            names, owner = " and ".join(missing), known_owner("kernel", f"{entry.op}:{entry.name}")
            line = extra_line(owner, missing) if owner else ""
            raise PlanError(
                "HP571",
                f"the kernel {entry.op}@{entry.name} needs {names}, which this machine does not have",
                expected="it to be installed where the plan is applied",
                where=f"{entry.fqn}, {entry.reason}",
                fix=f"{line or f'install {names}'}, or choose another kernel: kernels: {{{entry.op}: NAME}}",
            )


def install_kernels(model: nn.Module, plan: BuildPlan) -> None:
    """Hand every component the implementations that the plan chose for it."""
    for entry in plan.kernels:
        module = model.get_submodule(entry.fqn)
        state = state_of(module)
        before = state.kernels if state is not None else {}
        update(module, entry.fqn, kernels={**before, entry.op: load(entry.implementation)})
