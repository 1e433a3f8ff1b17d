"""Rotary position embedding with a hand-written backward.

Legend: B batch, N query heads, K key heads, S sequence, D head dim, R rotated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hp_components.precision import LOW

VECTOR = 32  # elements of low precision in the widest CPU register: torch goes through shorter rows one by one


def rotary(
    query_BNSD: Tensor, key_BKSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return both with the first R of D features rotated: :func:`hp_components.reference.rotary.rotary` without its copies."""
    cos, sin = cos_BSR.unsqueeze(1), sin_BSR.unsqueeze(1)
    return _Rotary.apply(query_BNSD, cos, sin, interleaved), _Rotary.apply(key_BKSD, cos, sin, interleaved)


class _Rotary(torch.autograd.Function):
    """A rotation is linear: only the angles are kept. Its transpose turns the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        width, half = cos.shape[-1], cos.shape[-1] // 2
        turned = x[..., :width]
        if interleaved:
            turned = turned.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
        return _with_rest(_turn(turned, cos, -sin[..., :half], sin[..., half:]), x, width)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        width, half = cos.shape[-1], cos.shape[-1] // 2
        found = _turn(grad[..., :width], cos, sin[..., half:], -sin[..., :half])
        if ctx.interleaved:
            found = found.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
        return _with_rest(found, grad, width), None, None, None


def _turn(x: Tensor, cos: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return ``x * cos`` plus the other half of ``x`` times ``first`` in the first half, times ``second`` in the second."""
    out, half = x * cos, x.shape[-1] // 2
    if x.dtype in LOW and half < VECTOR:
        return out.addcmul_(torch.cat((x[..., half:], x[..., :half]), -1), torch.cat((first, second), -1))
    out[..., :half].addcmul_(x[..., half:], first)
    out[..., half:].addcmul_(x[..., :half], second)
    return out


def _with_rest(turned: Tensor, x: Tensor, width: int) -> Tensor:
    """Return the rotated features followed by those of ``x`` that are left as they are."""
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)
