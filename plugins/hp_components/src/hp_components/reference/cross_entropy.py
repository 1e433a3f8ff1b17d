"""Cross-entropy of logits whose columns are cut over a mesh axis, in plain torch. Legend: T tokens, V this rank's columns."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_components.precision import accumulation_dtype
from hp_core.applier.collectives import all_gather
from hp_core.mesh.context import AxisGroup

IGNORED = -100


def vocab_parallel_cross_entropy(logits_TV: Tensor, label_T: Tensor, *, first: int, axis: AxisGroup) -> Tensor:
    """Return each token's loss [T] in at least fp32, equal on all ranks of ``axis``; 0, without gradient, where it is -100.

    This rank holds columns ``first .. first + V``; ranks exchange three numbers a token. A label in nobody's columns gives NaN.
    The gradient is that of the rank's own columns.
    """
    logits = logits_TV.to(accumulation_dtype(logits_TV.dtype))
    local_T = label_T - first
    here_T = (local_T >= 0) & (local_T < logits.shape[1])
    target_T = logits.gather(1, local_T.masked_fill(~here_T, 0).unsqueeze(1)).squeeze(1).masked_fill(~here_T, 0)
    mine = torch.stack((logits.logsumexp(1), target_T, here_T.to(logits.dtype))).unsqueeze(0)
    every = all_gather(mine, dim=0, axis=axis, backward="split")
    loss_T = every[:, 0].logsumexp(0) - every[:, 1].sum(0)
    unknown_T = every[:, 2].sum(0).detach() == 0
    return loss_T.masked_fill(unknown_T, float("nan")).masked_fill(label_T == IGNORED, 0)
