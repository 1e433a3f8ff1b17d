"""Which experts each token goes to, by ``torch.topk``. Legend: T tokens, E experts, K top-k, G groups."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_components.precision import accumulation_dtype


def topk_gating(
    logits_TE: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return weights [T, K] and experts [T, K]: :func:`hp_components.reference.topk_gating.topk_gating`."""
    wide_TE = logits_TE.to(accumulation_dtype(logits_TE.dtype))
    score_TE = wide_TE.softmax(-1) if scoring == "softmax" else wide_TE.sigmoid()
    if bias_E is None and groups == 1:
        weight_TK, index_TK = torch.topk(score_TE, top_k, dim=-1)
    else:
        choice_TE = score_TE.detach() if bias_E is None else score_TE.detach() + bias_E.to(score_TE.dtype)
        index_TK = torch.topk(_within_groups(choice_TE, groups, kept_groups), top_k, dim=-1, sorted=False).indices
        weight_TK = score_TE.gather(1, index_TK)
    if normalize:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
    return (weight_TK if scale == 1 else weight_TK * scale).to(logits_TE.dtype), index_TK


def _within_groups(choice_TE: Tensor, groups: int, kept: int) -> Tensor:
    """Return the scores, minus infinity outside each token's best groups."""
    if groups == 1:
        return choice_TE
    choice_TGE = choice_TE.unflatten(1, (groups, -1))
    best_TG = choice_TGE.topk(2, dim=-1).values.sum(-1)
    group_TG = torch.topk(best_TG, kept, dim=-1, sorted=False).indices
    open_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, group_TG, True)
    return choice_TGE.masked_fill(~open_TG.unsqueeze(-1), float("-inf")).flatten(1)
