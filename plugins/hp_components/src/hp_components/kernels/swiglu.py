"""SwiGLU that keeps only its inputs for the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``: :func:`hp_components.reference.swiglu.swiglu` with one tensor less kept."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = functional.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up
