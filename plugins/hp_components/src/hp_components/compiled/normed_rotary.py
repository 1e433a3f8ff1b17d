"""RMSNorm of queries and keys and their rotary embedding in one pass in C++, where a plan gives both to C++.

Legend: B batch, N query heads, K key heads, S sequence, D head dim, R rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from hp_components.compiled.library import call, strides, usable, with_rows
from hp_components.compiled.rms_norm import rms_norm
from hp_components.compiled.rotary import expanded, fits, rotary
from hp_components.precision import accumulation_dtype


@attrs.frozen(kw_only=True, eq=False)
class HeadNorm:
    """A norm of every head: ``weight`` [D], ``eps``, and what is added to the weight."""

    weight: Tensor
    eps: float
    offset: float


def normed_rotary(
    query_BNSD: Tensor,
    key_BKSD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    *,
    norms: Sequence[HeadNorm],
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return both normalised and turned, rounded once: the operators ``rms_norm`` and ``rotary`` one after the other."""
    heads, angles = (query_BNSD, key_BKSD), (cos_BSR, sin_BSR)
    weights = [norm.weight for norm in norms]
    width = query_BNSD.shape[-1:]
    if not fits(*heads, *angles) or not usable(*heads, *weights) or any(weight.shape != width for weight in weights):
        query, key = (rms_norm(x, n.weight, eps=n.eps, offset=n.offset) for x, n in zip(heads, norms, strict=True))
        return rotary(query, key, *angles, interleaved=interleaved)
    query, key = (_NormedRotary.apply(x, n.weight, *angles, n, interleaved) for x, n in zip(heads, norms, strict=True))
    return query, key


class _NormedRotary(torch.autograd.Function):
    """Keeps the heads as they came, and a number for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm, interleaved: bool) -> Tensor:
        x, weight = with_rows(x), weight.contiguous()
        out = torch.empty_like(x)
        factor = torch.empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype))
        ctx.sizes = (*x.shape, cos.shape[-1], int(interleaved))
        given = (*strides(x), weight, *expanded(x, cos, sin))
        call("normed_rotary_forward", x.dtype, *given, *strides(out), factor, *ctx.sizes, float(norm.eps), float(norm.offset))
        ctx.offset = float(norm.offset)
        ctx.save_for_backward(x, weight, cos, sin, factor)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin, factor = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        given = (*strides(x), weight, *expanded(x, cos, sin), *strides(with_rows(grad)), *strides(grad_x), grad_weight, factor)
        call("normed_rotary_backward", x.dtype, *given, *ctx.sizes, ctx.offset)
        return grad_x, grad_weight, None, None, None, None
