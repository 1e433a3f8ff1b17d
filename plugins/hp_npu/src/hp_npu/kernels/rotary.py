"""Rotary position embedding by ``npu_rotary_mul``.

Legend: B batch, N query heads, K key heads, S sequence, D head dim, R rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hp_npu.kernels.empty import zeros_from
from hp_npu.operators import operator


def rotary(
    query_BNSD: Tensor, key_BKSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return both with the first R of D features rotated; angles are ``cat(freqs, freqs)``, as Hugging Face makes them.

    In mode ``half`` the operator rotates whole heads: it gets the R features alone. Interleaved pairs are brought into halves
    before it and leave as halves.
    """
    cos, sin = cos_BSR.detach().unsqueeze(1), sin_BSR.detach().unsqueeze(1)
    return _rotate(query_BNSD, cos, sin, interleaved), _rotate(key_BKSD, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if x.numel() == 0:
        return zeros_from(x.shape, x)
    width = cos.shape[-1]
    turned = x[..., :width]
    if interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    out: Tensor = operator("npu_rotary_mul")(turned, cos.to(x.dtype), sin.to(x.dtype), rotary_mode="half")
    return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), dim=-1)
