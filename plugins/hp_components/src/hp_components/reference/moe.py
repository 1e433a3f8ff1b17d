"""Ordering tokens by expert and back, in plain torch. Legend: T tokens, K top-k, E experts, H hidden, R = T x K rows."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_permute(x_TH: Tensor, expert_TK: Tensor, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [R, H] grouped by expert, the row [T, K] of each (token, choice), and each group's end int32 [E].

    Rows of one expert keep the order of their tokens. Ids are 0 .. E - 1. The gradient reaches ``x``.
    """
    order_R = expert_TK.reshape(-1).argsort(stable=True)
    row_TK = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(order_R.shape[0], device=order_R.device))
    ends_E = torch.bincount(expert_TK.reshape(-1), minlength=experts).cumsum(0).int()
    return x_TH[order_R // expert_TK.shape[1]], row_TK.view(expert_TK.shape), ends_E


def moe_unpermute(y_RH: Tensor, row_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """Return [T, H]: for each token the sum of its rows, times ``weight`` if given; summed in at least fp32.

    Typed like ``y``. Gradients reach ``y`` and ``weight``.
    """
    dtype = torch.promote_types(y_RH.dtype, torch.float32)
    rows_TKH = y_RH[row_TK].to(dtype)
    weighted = rows_TKH if weight_TK is None else rows_TKH * weight_TK.to(dtype).unsqueeze(-1)
    return weighted.sum(1).to(y_RH.dtype)
