"""Ordering tokens by expert and back, all gathers: counting sort, and sums over a token's rows by ``embedding_bag``.

Legend: T tokens, K top-k, E experts, H hidden, R = T x K rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def moe_permute(x_TH: Tensor, expert_TK: Tensor, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [R, H], the row [T, K] of each choice, group ends [E]: :func:`hp_components.reference.moe.moe_permute`."""
    narrow = torch.int16 if experts < 2**15 else torch.int32  # narrow keys sort by counting
    sorted_R, slot_R = expert_TK.reshape(-1).to(narrow).sort(stable=True)
    row_TK = torch.empty_like(slot_R).scatter_(0, slot_R, _count(expert_TK)).view(expert_TK.shape)
    ids_E = torch.arange(experts, device=slot_R.device, dtype=narrow)
    ends_E = torch.searchsorted(sorted_R, ids_E, right=True, out_int32=True)
    return _Permute.apply(x_TH, slot_R // expert_TK.shape[1], row_TK), row_TK, ends_E


def moe_unpermute(y_RH: Tensor, row_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """Return [T, H], each token's rows summed: :func:`hp_components.reference.moe.moe_unpermute`."""
    slot_R = torch.empty_like(row_TK).view(-1).scatter_(0, row_TK.reshape(-1), _count(row_TK))
    return _Unpermute.apply(y_RH, row_TK, slot_R, weight_TK)


def _count(row_TK: Tensor) -> Tensor:
    return torch.arange(row_TK.numel(), device=row_TK.device)


def _sums(y_RH: Tensor, row_TK: Tensor) -> Tensor:
    """Return [T, H] in at least fp32."""
    wide = y_RH.to(torch.promote_types(y_RH.dtype, torch.float32))
    return functional.embedding_bag(row_TK, wide, mode="sum")


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return x_TH.index_select(0, token_R)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:
        return _sums(grad_RH, *ctx.saved_tensors).to(grad_RH.dtype), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, row_TK: Tensor, slot_R: Tensor, weight_TK: Tensor | None) -> Tensor:
        ctx.save_for_backward(y_RH, row_TK, slot_R, weight_TK)
        wide = torch.promote_types(y_RH.dtype, torch.float32)
        weighted = y_RH if weight_TK is None else y_RH.to(wide) * _by_row(weight_TK, slot_R).to(wide)
        return _sums(weighted, row_TK).to(y_RH.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        y_RH, row_TK, slot_R, weight_TK = ctx.saved_tensors
        grad_RH = grad_TH.index_select(0, slot_R // row_TK.shape[1])
        if weight_TK is None:
            return grad_RH, None, None, None
        wide = torch.promote_types(y_RH.dtype, torch.float32)
        grad_R = (grad_RH.to(wide) * y_RH.to(wide)).sum(1)
        grad_y = grad_RH.to(wide) * _by_row(weight_TK, slot_R).to(wide)
        return grad_y.to(y_RH.dtype), None, None, grad_R[row_TK].to(weight_TK.dtype)


def _by_row(weight_TK: Tensor, slot_R: Tensor) -> Tensor:
    return weight_TK.reshape(-1).index_select(0, slot_R).unsqueeze(1)
