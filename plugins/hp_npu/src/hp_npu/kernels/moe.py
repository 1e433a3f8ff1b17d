"""Ordering tokens by expert and back, by ``npu_moe_token_permute`` and ``npu_moe_token_unpermute``.

Legend: T tokens, K top-k, E experts, H hidden, R = T x K rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hp_npu.kernels.empty import zeros_from
from hp_npu.operators import operator


def moe_permute(x_TH: Tensor, expert_TK: Tensor, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [R, H] grouped by expert, the row [T, K] of each (token, choice), and each group's end int32 [E].

    Rows of one expert keep the order of their tokens. Nothing waits for the device.
    """
    ends_E = _ends(expert_TK, experts=experts)
    if expert_TK.numel() == 0:
        return zeros_from((0, x_TH.shape[1]), x_TH), torch.zeros_like(expert_TK), ends_E
    rows_RH, row_R = operator("npu_moe_token_permute")(x_TH, expert_TK)
    return rows_RH, row_R.long().view(expert_TK.shape), ends_E


def moe_unpermute(y_RH: Tensor, row_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """Return [T, H]: for each token the sum of its rows, times ``weight`` if given; summed in at least fp32.

    Without weights the operator takes K for 1: it is given ones.
    """
    if row_TK.numel() == 0:
        shape = (row_TK.shape[0], y_RH.shape[1])
        return zeros_from(shape, y_RH) if weight_TK is None else zeros_from(shape, y_RH, weight_TK)
    probs_TK = y_RH.new_ones(row_TK.shape) if weight_TK is None else weight_TK
    out_TH: Tensor = operator("npu_moe_token_unpermute")(y_RH, row_TK.reshape(-1).int(), probs=probs_TK)
    return out_TH


def _ends(expert_TK: Tensor, *, experts: int) -> Tensor:
    """Return int32 [E]. Counting by bincount would read its largest value on the host."""
    expert_R = expert_TK.reshape(-1).long()
    counts_E = torch.zeros(experts, dtype=torch.int32, device=expert_R.device)
    return counts_E.scatter_add_(0, expert_R, torch.ones_like(expert_R, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
