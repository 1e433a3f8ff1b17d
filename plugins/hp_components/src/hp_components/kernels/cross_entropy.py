"""Cross-entropy of logits whose columns are cut over a mesh axis, with its gradient by hand.

Legend: T tokens, V this rank's columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hp_components.precision import accumulation_dtype
from hp_core.applier.collectives import all_gather
from hp_core.mesh.context import AxisGroup

IGNORED = -100


def vocab_parallel_cross_entropy(logits_TV: Tensor, label_T: Tensor, *, first: int, axis: AxisGroup) -> Tensor:
    """Return each token's loss [T]: :func:`hp_components.reference.cross_entropy.vocab_parallel_cross_entropy`.

    Keeps one tensor of the logits' size and exchanges three numbers a token, in the forward only.
    """
    return _CrossEntropy.apply(logits_TV, label_T, first, axis)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, label_T: Tensor, first: int, axis: AxisGroup) -> Tensor:
        logits = logits_TV.to(accumulation_dtype(logits_TV.dtype))
        local_T = label_T - first
        here_T = (local_T >= 0) & (local_T < logits.shape[1])
        column_T1 = local_T.masked_fill(~here_T, 0).unsqueeze(1)
        target_T = logits.gather(1, column_T1).squeeze(1).masked_fill(~here_T, 0)
        mine_T = logits.logsumexp(1)
        every = all_gather(
            torch.stack((mine_T, target_T, here_T.to(logits.dtype))).unsqueeze(0), dim=0, axis=axis, backward="split"
        )
        lse_T = every[:, 0].logsumexp(0)
        ctx.save_for_backward(logits_TV, lse_T, column_T1, here_T, label_T)
        loss_T = (lse_T - every[:, 1].sum(0)).masked_fill_(every[:, 2].sum(0) == 0, float("nan"))
        return loss_T.masked_fill_(label_T == IGNORED, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, lse_T, column_T1, here_T, label_T = ctx.saved_tensors
        grad = (logits_TV.to(lse_T.dtype) - lse_T.unsqueeze(1)).exp_()
        grad.scatter_add_(1, column_T1, here_T.to(grad.dtype).neg_().unsqueeze(1))
        grad.mul_(grad_T.masked_fill(label_T == IGNORED, 0).unsqueeze(1))
        return grad.to(logits_TV.dtype), None, None, None
