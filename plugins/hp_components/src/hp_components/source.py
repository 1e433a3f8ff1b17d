"""Reading the module that a component replaces: what must be there, what is refused, which Parameters are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hp_core.errors import PlanError


def refuse(component: str, what: str, *, expected: str, fix: str = "keep the original module") -> PlanError:
    """Return (not raise) the error HP541: ``component`` cannot stand for a module because of ``what``."""
    return PlanError("HP541", f"{component} cannot replace a module with {what}", expected=expected, fix=fix)


def require_source(component: str, config: Any, module: nn.Module | None) -> None:
    """Raise HP560 unless there is something to build ``component`` from."""
    if config is None and module is None:
        raise PlanError("HP560", f"{component} got neither config nor module", expected="config=... or module=...")


def take_parameter(component: str, module: nn.Module, name: str, *, dims: int) -> nn.Parameter:
    """Return the very Parameter ``name`` of ``module``; HP541 if it is missing or has another number of dims."""
    found = module._parameters.get(name)
    if found is None or found.dim() != dims:
        shape = "no " + name if found is None else f"{name} of shape {tuple(found.shape)}"
        raise refuse(component, shape, expected=f"a parameter {name} with {dims} dims")
    return found


def empty_parameter(*shape: int, config: Any) -> nn.Parameter:
    """Return an uninitialised Parameter in the configuration's dtype (torch's default if it names none)."""
    dtype = getattr(config, "dtype", None)
    return nn.Parameter(torch.empty(shape, dtype=dtype if isinstance(dtype, torch.dtype) else None))
