"""The kernels that ``kernels: auto`` gives a component on a CPU, for components that are measured by themselves."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from hp_components.kernel_list import kernels
from hp_core.contracts.kernel import ANY
from hp_core.models.state import update
from hp_core.plugins.lazy import load

Module = TypeVar("Module", bound=nn.Module)


def as_planned(module: Module, *, compute: str, sequence: int) -> Module:
    """Return ``module`` with the most preferred kernel of every operator that applies; ``compute``: a dtype's name."""
    facts = {"compute": compute, "sequence": sequence}
    fitting = [k for k in kernels() if k.automatic and (k.condition is None or load(k.condition)(facts))]
    fitting.sort(key=lambda kernel: (kernel.device != ANY, kernel.preference))
    chosen = {kernel.op: load(kernel.implementation) for kernel in fitting if kernel.device in (ANY, "cpu")}
    update(module, type(module).__name__, kernels=chosen)
    return module
