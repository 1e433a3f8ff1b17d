"""RMSNorm in plain torch. Legend: H normalised features."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_components.precision import accumulation_dtype


def rms_norm(x: Tensor, weight_H: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dim, shaped and typed like ``x``.

    Computed in at least fp32 and rounded once, at the end. Gradients reach ``x`` and ``weight``.
    """
    dtype = accumulation_dtype(x.dtype)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (weight_H.to(dtype) + offset)).to(x.dtype)
