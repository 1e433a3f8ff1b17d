"""RMSNorm by ``npu_rms_norm``. Legend: H normalised features."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_npu.kernels.empty import zeros_from
from hp_npu.operators import operator


def rms_norm(x: Tensor, weight_H: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dim, shaped and typed like ``x``.

    The operator computes in fp32 and wants one dtype. Where the dtypes differ, or an offset would be rounded before it is used,
    both are widened, and the result is rounded at the end.
    """
    if x.numel() == 0:
        return zeros_from(x.shape, x, weight_H)
    if weight_H.dtype == x.dtype and (not offset or x.dtype == torch.float32):
        return _fused(x, weight_H + offset if offset else weight_H, eps)
    return _fused(x.float(), weight_H.float() + offset, eps).to(x.dtype)


def _fused(x: Tensor, scale_H: Tensor, eps: float) -> Tensor:
    rows = x if x.dim() > 1 else x.unsqueeze(0)  # the operator takes 2 dims or more
    normed: Tensor = operator("npu_rms_norm")(rows, scale_H, eps)[0]
    return normed.view(x.shape)
