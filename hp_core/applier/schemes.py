"""Running the code of precision schemes on the boundaries that the plan names, and holding it to its contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hp_core.contracts.plan import BuildPlan, SchemePlan
from hp_core.errors import PlanError
from hp_core.plugins.lazy import load


def check_schemes(plan: BuildPlan) -> None:
    """Raise unless the code of every planned scheme is there (HP403) and can be called (HP533)."""
    for entry in plan.schemes:
        _implementation(entry)


def run_schemes(model: nn.Module, plan: BuildPlan) -> None:
    """Call every scheme's code on its boundaries, in the order of the plan. HP533: it raises, or exchanges what must stay."""
    for entry in plan.schemes:
        module = model.get_submodule(entry.fqn)
        before = _parts(module)
        try:
            _implementation(entry)(module, entry.compute)
        except Exception as error:
            raise _refusal(entry, f"raises {type(error).__name__}: {' '.join(str(error).split())}") from error
        after = _parts(module)
        changed = [name for name in dict.fromkeys((*before, *after)) if before.get(name) is not after.get(name)]
        if changed:
            raise _refusal(entry, f"exchanges {', '.join(changed[:3])}")


def _implementation(entry: SchemePlan) -> Callable[[nn.Module, str], None]:
    found = load(entry.implementation)
    if not callable(found):
        raise _refusal(entry, f"is a {type(found).__name__}")
    return found


def _parts(module: nn.Module) -> dict[str, Any]:
    """Return the modules, parameters and buffers below ``module`` by name; a name ends in what it is."""
    found: dict[str, Any] = {f"the module {name}": child for name, child in module.named_modules() if name}
    found |= {f"the parameter {name}": item for name, item in module.named_parameters(remove_duplicate=False)}
    return found | {f"the buffer {name}": item for name, item in module.named_buffers(remove_duplicate=False)}


def _refusal(entry: SchemePlan, what: str) -> PlanError:
    return PlanError(
        "HP533",
        f"{entry.implementation} of the scheme {entry.scheme!r} {what} on {entry.fqn or 'the model'}",
        expected="a function (module, compute) that keeps modules, parameters and buffers",
        where=entry.declared_by,
    )
