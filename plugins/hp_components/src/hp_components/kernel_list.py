"""The kernels of hp-components: torch's own, on any device that torch has, and the plain references. Torch-free."""

from __future__ import annotations

from hp_core.contracts import Kernel
from hp_core.contracts.kernel import ANY, OPS

MODULES = {  # operator -> module, where they are not called the same
    "attention_with_lse": "attention",
    "moe_permute": "moe",
    "moe_unpermute": "moe",
    "vocab_parallel_cross_entropy": "cross_entropy",
}


def kernels() -> list[Kernel]:
    """Return two kernels for every operator: ``torch``, which ``auto`` takes, and ``reference``, taken by name only."""
    native = [_kernel(op, "torch", f"hp_components.kernels.{MODULES.get(op, op)}") for op in OPS]
    plain = [_kernel(op, "reference", f"hp_components.reference.{MODULES.get(op, op)}", automatic=False) for op in OPS]
    return [*native, *plain]


def _kernel(op: str, name: str, module: str, *, automatic: bool = True) -> Kernel:
    return Kernel(op=op, name=name, device=ANY, implementation=f"{module}:{op}", automatic=automatic)  # type: ignore[arg-type]
