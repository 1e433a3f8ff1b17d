"""Softmax and cross-entropy of logits in C++: a row at a time, while it lies in cache.

Legend: T tokens, V this rank's columns, which begin at ``first`` of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hp_components.compiled.library import call, usable
from hp_components.compiled.rows import rows
from hp_components.kernels import cross_entropy as native
from hp_components.precision import accumulation_dtype
from hp_core.applier.collectives import all_gather
from hp_core.mesh.context import AxisGroup

IGNORED = -100


def vocab_parallel_cross_entropy(logits_TV: Tensor, label_T: Tensor, *, first: int, axis: AxisGroup) -> Tensor:
    """Return each token's loss [T]: :func:`hp_components.reference.cross_entropy.vocab_parallel_cross_entropy`.

    Keeps the logits and exchanges three numbers a token, in the forward only.
    """
    if logits_TV.numel() == 0 or label_T.shape != logits_TV.shape[:1] or not usable(logits_TV):
        return native.vocab_parallel_cross_entropy(logits_TV, label_T, first=first, axis=axis)
    found: Tensor = _CrossEntropy.apply(logits_TV, label_T, first, axis)
    return found


def log_sums(logits_TV: Tensor, label_T: Tensor, *, first: int, slopes_TV: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp [T] of these columns and the target logit [T], 0 where the label is not among them.

    ``slopes_TV``, which may be the logits, gets ``softmax - onehot`` of these columns, 0 where the label is -100.
    """
    count, columns = logits_TV.shape
    lse_T, target_T = (torch.empty(count, dtype=accumulation_dtype(logits_TV.dtype)) for _ in range(2))
    labels = label_T.long().contiguous()
    call("cross_entropy_forward", logits_TV.dtype, *rows(logits_TV), labels, lse_T, target_T, slopes_TV, count, columns, first)
    return lse_T, target_T


def write_slopes(
    logits_TV: Tensor, label_T: Tensor, *, first: int, lse_T: Tensor, factor_T: Tensor | None, slopes_TV: Tensor
) -> Tensor:
    """Return ``slopes_TV``, which may be the logits, filled with ``(exp(logits - lse) - onehot) * factor``; 0 for -100."""
    labels, factors = label_T.long().contiguous(), None if factor_T is None else factor_T.to(lse_T.dtype).contiguous()
    given = (*rows(logits_TV), labels, lse_T.contiguous(), factors, slopes_TV)
    call("cross_entropy_backward", logits_TV.dtype, *given, *logits_TV.shape, first)
    return slopes_TV


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, label_T: Tensor, first: int, axis: AxisGroup) -> Tensor:
        mine_T, target_T = log_sums(logits_TV, label_T, first=first)
        here_T = (label_T >= first) & (label_T < first + logits_TV.shape[1])
        every = all_gather(
            torch.stack((mine_T, target_T, here_T.to(mine_T.dtype))).unsqueeze(0), dim=0, axis=axis, backward="split"
        )
        lse_T = every[:, 0].logsumexp(0)
        ctx.save_for_backward(logits_TV, lse_T, label_T)
        ctx.first = first
        loss_T = (lse_T - every[:, 1].sum(0)).masked_fill_(every[:, 2].sum(0) == 0, float("nan"))
        return loss_T.masked_fill_(label_T == IGNORED, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, lse_T, label_T = ctx.saved_tensors
        slopes_TV = torch.empty(logits_TV.shape, dtype=logits_TV.dtype)
        found = write_slopes(logits_TV, label_T, first=ctx.first, lse_T=lse_T, factor_T=grad_T, slopes_TV=slopes_TV)
        return found, None, None, None
