"""RMSNorm by torch's fused operator, and by hand where a CPU would round in between. Legend: H normalised features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hp_components.precision import LOW
from hp_components.reference import rms_norm as plain


def rms_norm(x: Tensor, weight_H: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + offset)``: :func:`hp_components.reference.rms_norm.rms_norm`, fused.

    CPUs take torch's fused operator, which functional.rms_norm does not, but for low precision, where it is slower than
    Hugging Face's lines.
    """
    on_cpu = x.device.type == "cpu"
    if on_cpu and x.dtype in LOW:
        return _LowRMSNorm.apply(x, weight_H, eps, offset)
    if weight_H.dtype != x.dtype or (offset and x.dtype in LOW):  # the sum would be rounded before it is used
        return plain.rms_norm(x, weight_H, eps=eps, offset=offset)
    scale_H = weight_H + offset if offset else weight_H
    if on_cpu:
        fused: Tensor = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], scale_H, eps)[0]
        return fused
    return functional.rms_norm(x, (x.shape[-1],), scale_H, eps)


class _LowRMSNorm(torch.autograd.Function):
    """Keeps ``x`` and a number per row; everything between is fp32, in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, offset: float) -> Tensor:
        wide = x.to(torch.float32)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, factor)
        ctx.offset = offset
        return wide.mul_(factor).mul_(weight_H.to(torch.float32) + offset).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight_H, factor = ctx.saved_tensors
        size, scale_H = x.shape[-1], weight_H.to(torch.float32) + ctx.offset
        normed, wide = x.to(torch.float32).mul_(factor), grad.to(torch.float32)
        products = (wide * normed).reshape(-1, size)
        grad_weight = torch.mv(products.t(), products.new_ones(products.shape[0]))
        along = torch.mv(products, scale_H).div_(-size).view(factor.shape)
        grad_x = (wide * scale_H).addcmul_(normed, along).mul_(factor)
        return grad_x.to(x.dtype), grad_weight.to(weight_H.dtype), None, None
