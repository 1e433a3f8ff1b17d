"""SwiGLU in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, shaped and typed like both. Gradients reach both."""
    return functional.silu(gate) * up
