"""RMSNorm in C++: two passes over a row while it is near, the weight's gradient on the way. Legend: H normalised features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hp_components.compiled.library import call, usable
from hp_components.compiled.rows import rows
from hp_components.kernels import rms_norm as native
from hp_components.precision import accumulation_dtype


def rms_norm(x: Tensor, weight_H: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + offset)``: :func:`hp_components.reference.rms_norm.rms_norm`.

    Rows of heads within a projection's output are read where they lie. A weight of another dtype goes to torch's kernel.
    """
    if x.numel() == 0 or not usable(x, weight_H) or weight_H.shape != x.shape[-1:]:
        return native.rms_norm(x, weight_H, eps=eps, offset=offset)
    found: Tensor = _RMSNorm.apply(x, weight_H, float(eps), float(offset))
    return found


class _RMSNorm(torch.autograd.Function):
    """Keeps ``x`` and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, offset: float) -> Tensor:
        width, weight_H = x.shape[-1], weight_H.contiguous()
        count = x.numel() // width
        out = torch.empty(x.shape, dtype=x.dtype)
        factor = torch.empty(count, dtype=accumulation_dtype(x.dtype))
        call("rms_norm_forward", x.dtype, *rows(x), weight_H, out, factor, count, width, eps, offset)
        ctx.save_for_backward(x, weight_H, factor)
        ctx.offset = offset
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight_H, factor = ctx.saved_tensors
        grad_x, grad_weight = torch.empty(x.shape, dtype=x.dtype), torch.empty_like(weight_H)
        given = (*rows(x), *rows(grad), weight_H, factor)
        call("rms_norm_backward", x.dtype, *given, grad_x, grad_weight, factor.numel(), x.shape[-1], ctx.offset)
        return grad_x, grad_weight, None, None
