"""SwiGLU in C++: one pass forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hp_components.compiled.library import call, usable
from hp_components.compiled.rows import rows
from hp_components.kernels import swiglu as native


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``: :func:`hp_components.reference.swiglu.swiglu`; both may be halves of one tensor's rows."""
    if gate.numel() == 0 or gate.dim() == 0 or gate.shape != up.shape or not usable(gate, up):
        return native.swiglu(gate, up)
    found: Tensor = _SwiGLU.apply(gate, up)
    return found


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty(gate.shape, dtype=gate.dtype)
        call("swiglu_forward", gate.dtype, *rows(gate), *rows(up), out, *_sizes(gate))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype) for _ in range(2))
        call("swiglu_backward", gate.dtype, *rows(gate), *rows(up), *rows(grad), grad_gate, grad_up, *_sizes(gate))
        return grad_gate, grad_up


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]
