"""Rotary position embedding in plain torch. Legend: B batch, N query heads, K key heads, S sequence, D head dim, R rotated."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(
    query_BNSD: Tensor, key_BKSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return both with the first R of D features rotated; angles are ``cat(freqs, freqs)``, as Hugging Face makes them.

    ``interleaved``: features come in pairs (0, 1), (2, 3), ... instead of halves; they leave as halves, so query and key still
    meet in the same order. B of the angles may be 1. The angles get no gradient.
    """
    cos, sin = cos_BSR.unsqueeze(1), sin_BSR.unsqueeze(1)
    return _rotate(query_BNSD, cos, sin, interleaved), _rotate(key_BKSD, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, kept), dim=-1)
