"""Which kernel a component computes an operator with: the one its plan chose, else the torch-native one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hp_components.kernels import (
    attention,
    cross_entropy,
    embedding,
    grouped_matmul,
    moe,
    rms_norm,
    rotary,
    swiglu,
    topk_gating,
)
from hp_core.applier.view import local
from hp_core.models.state import state_of

NATIVE: Mapping[str, Callable[..., Any]] = {
    "rms_norm": rms_norm.rms_norm,
    "rotary": rotary.rotary,
    "attention": attention.attention,
    "attention_with_lse": attention.attention_with_lse,
    "grouped_matmul": grouped_matmul.grouped_matmul,
    "swiglu": swiglu.swiglu,
    "topk_gating": topk_gating.topk_gating,
    "moe_permute": moe.moe_permute,
    "moe_unpermute": moe.moe_unpermute,
    "vocab_parallel_cross_entropy": cross_entropy.vocab_parallel_cross_entropy,
    "embedding": embedding.embedding,
}


def kernel(module: nn.Module, op: str) -> Callable[..., Any]:
    """Return the implementation of ``op`` in ``module.hp.kernels``, put there when a plan was applied, or torch's own.

    Example::

        kernel(self, "swiglu")(gate, up)
    """
    state = state_of(module)
    found: Callable[..., Any] | None = state.kernels.get(op) if state is not None else None
    return NATIVE[op] if found is None else found


def normed(owner: nn.Module, x: Tensor, norm: nn.Module) -> Tensor:
    """Return ``x`` normalised by ``norm``, a child of ``owner``, with the owner's kernel.

    The child keeps its Parameter (and so its name in checkpoints); its own forward is not run.
    """
    found: Tensor = kernel(owner, "rms_norm")(x, local(norm, "weight"), eps=epsilon(norm), offset=offset(norm))
    return found


def epsilon(norm: nn.Module) -> float:
    """Return the epsilon of an RMSNorm, whatever its attribute is called; AttributeError if it has none."""
    found = [getattr(norm, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
    values = [value for value in found if value is not None]
    if not values:
        raise AttributeError(f"{type(norm).__name__} has no epsilon")
    return float(values[0])


def offset(norm: nn.Module) -> float:
    """Return what an RMSNorm adds to its weight."""
    return float(getattr(norm, "offset", 0.0))
