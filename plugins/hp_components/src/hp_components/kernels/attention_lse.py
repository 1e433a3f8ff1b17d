"""The CPU's fused attention with its log-sum-exp, differentiable in both.

Legend: B batch, N query heads, K key-value heads, Q queries, S keys, D query and key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def fused_with_lse(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention [B, N, Q, V] and log-sum-exp [B, N, Q]; V at most D; causal only where Q is S."""
    width = value_BKSV.shape[-1]
    value = functional.pad(value_BKSV, (0, query_BNQD.shape[-1] - width))
    out, lse = _WithLse.apply(query_BNQD, key_BKSD, value, causal, scale)
    return out[..., :width], lse


class _WithLse(torch.autograd.Function):
    """The fused backward computes ``p * (dp - rowsum(grad_out * out))``; a gradient of the log-sum-exp adds ``p * grad_lse``.

    One more feature carries it: values 0, output ``-grad_lse``, gradient 1 lower the row sum by exactly ``grad_lse``.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        tensors = [grad_out, query, key, value, out]
        if grad_lse is not None:
            extra = (1.0, 0.0, 0.0, 0.0, None)
            tensors = [_extended(tensor, fill) for tensor, fill in zip(tensors, extra, strict=True)]
            tensors[4][..., -1] = -grad_lse
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, lse, 0.0, ctx.causal, scale=ctx.scale
        )
        width = query.shape[-1]
        return *(gradient[..., :width] for gradient in found), None, None


def _extended(tensor: Tensor, fill: float | None) -> Tensor:
    """Return a copy with one more feature."""
    return functional.pad(tensor, (0, 1), value=0.0 if fill is None else fill)
