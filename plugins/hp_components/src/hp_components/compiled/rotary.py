"""Rotary position embedding in C++: one pass, no copies of heads.

Legend: B batch, N query heads, K key heads, S sequence, D head dim, R rotated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hp_components.compiled.library import call, strides, usable, with_rows
from hp_components.kernels import rotary as native


def rotary(
    query_BNSD: Tensor, key_BKSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return both with the first R of D features rotated: :func:`hp_components.reference.rotary.rotary`.

    Both lie in memory as what they were made from. Angles of another dtype go to torch's kernel.
    """
    given = (query_BNSD, key_BKSD, cos_BSR, sin_BSR)
    if not fits(*given):
        return native.rotary(*given, interleaved=interleaved)
    found: tuple[Tensor, Tensor] = _Rotary.apply(*given, interleaved, False)
    return found


def rotary_at_end(
    query_BNSD: Tensor, key_BKSX: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Return both with the last R of their features rotated, the others as they are; None where the library cannot.

    The widths of queries and keys may differ.
    """
    given = (query_BNSD, key_BKSX, cos_BSR, sin_BSR)
    return _Rotary.apply(*given, interleaved, True) if fits(*given, alike=False) else None


def fits(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, alike: bool = True) -> bool:
    """Return whether the library takes these; torch tells what is wrong with what does not belong together.

    ``alike``: whether queries and keys have to be equally wide.
    """
    given = (query, key, cos, sin)
    batch, _, length, width = query.shape
    angles = tuple(cos.shape) in ((1, length, cos.shape[-1]), (batch, length, cos.shape[-1]))
    agree = angles and cos.shape == sin.shape and cos.shape[-1] <= min(width, key.shape[-1])
    agree = agree and (key.shape[0], key.shape[2]) == (batch, length) and (key.shape[3] == width or not alike)
    return agree and min(tensor.numel() for tensor in given) > 0 and usable(*given)


class _Rotary(torch.autograd.Function):
    """A rotation is linear: only the angles are kept."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, at_end: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.how = {"interleaved": interleaved, "at_end": at_end}
        return turned(query, cos, sin, "forward", **ctx.how), turned(key, cos, sin, "forward", **ctx.how)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        found = (turned(grad, cos, sin, "backward", **ctx.how) for grad in (grad_query, grad_key))
        return *found, None, None, None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, way: str, *, interleaved: bool, at_end: bool) -> Tensor:
    """Return heads [B, N, S, D] turned ``forward``, or by the transpose ``backward``, with the strides of ``x``."""
    x = with_rows(x)
    out = torch.empty_like(x)
    rotated = cos.shape[-1]
    sizes = (*x.shape, rotated, x.shape[-1] - rotated if at_end else 0, int(interleaved))
    call(f"rotary_{way}", x.dtype, *strides(x), *expanded(x, cos, sin), *strides(out), *sizes)
    return out


def expanded(x: Tensor, cos: Tensor, sin: Tensor) -> list[Any]:
    """Return the angles of every row of heads ``x`` [B, N, S, D], as the functions take them."""
    angles = (with_rows(angle.expand(x.shape[0], x.shape[2], -1)) for angle in (cos, sin))
    return [part for angle in angles for part in strides(angle.unsqueeze(1))]
