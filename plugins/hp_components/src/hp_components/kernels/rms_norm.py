"""RMSNorm by torch's fused operator. Legend: H normalised features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hp_components.reference import rms_norm as plain


def rms_norm(x: Tensor, weight_H: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + offset)``: :func:`hp_components.reference.rms_norm.rms_norm`, fused."""
    scale_H = weight_H + offset if offset else weight_H
    if scale_H.dtype != x.dtype:  # the fused operator wants one dtype
        return plain.rms_norm(x, weight_H, eps=eps, offset=offset)
    if x.device.type == "cpu":  # functional.rms_norm takes the fused operator on accelerators only
        fused: Tensor = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], scale_H, eps)[0]
        return fused
    return functional.rms_norm(x, (x.shape[-1],), scale_H, eps)
