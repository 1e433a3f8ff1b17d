"""The kernels of hp-components: torch's own on any device, faster ones for CPUs, and the plain references. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.contracts import Kernel
from hp_core.contracts.kernel import ANY, OPS

MODULES = {  # operator -> module, where they are not called the same
    "attention_with_lse": "attention",
    "moe_permute": "moe",
    "moe_unpermute": "moe",
    "vocab_parallel_cross_entropy": "cross_entropy",
}


COMPILED = {  # operator -> module of its kernel in C++
    "attention": "attention",
    "attention_with_lse": "attention",
    "embedding": "embedding",
    "rms_norm": "rms_norm",
    "rotary": "rotary",
    "swiglu": "swiglu",
    "topk_gating": "topk_gating",
    "vocab_parallel_cross_entropy": "cross_entropy",
}
BLOCKED = 4096  # longest rows for which a call can keep its weights


def kernels() -> list[Kernel]:
    """Return ``torch`` for every operator, what ``auto`` prefers on CPUs, and ``reference``, taken by name only.

    On CPUs ``auto`` takes ``compiled`` where a compiler is found, then ``blocked``; kernels of other plugins come before both.
    """
    native = [_kernel(op, "torch", f"hp_components.kernels.{MODULES.get(op, op)}") for op in OPS]
    plain = [_kernel(op, "reference", f"hp_components.reference.{MODULES.get(op, op)}", automatic=False) for op in OPS]
    blocked = Kernel(
        op="attention",
        name="blocked",
        device="cpu",
        implementation="hp_components.kernels.blocked_attention:attention",
        condition="hp_components.kernel_list:keeps_weights",
        preference=-2,
    )
    compiled = [
        Kernel(
            op=op,  # type: ignore[arg-type]
            name="compiled",
            device="cpu",
            implementation=f"hp_components.compiled.{module}:{op}",
            condition="hp_components.compiled.compiler:can_compile",
            preference=-1,
        )
        for op, module in COMPILED.items()
    ]
    return [*native, *compiled, blocked, *plain]


def keeps_weights(facts: Mapping[str, Any]) -> bool:
    """Return whether attention over the recipe's rows can keep its weights for the backward."""
    return int(facts["sequence"]) <= BLOCKED


def _kernel(op: str, name: str, module: str, *, automatic: bool = True) -> Kernel:
    return Kernel(op=op, name=name, device=ANY, implementation=f"{module}:{op}", automatic=automatic)  # type: ignore[arg-type]
