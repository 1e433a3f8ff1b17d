"""Which experts each token goes to, and with which weights, in plain torch. Legend: T tokens, E experts, K top-k, G groups."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Return weights [T, K] and experts int64 [T, K] of the K best scores, in any order, of equal ones any.

    Scores are the logits' ``softmax`` over all experts, or the ``sigmoid`` of each. ``bias`` is added to scores for the choice
    only. With more than one group, of E / G experts in order and at least two, a token chooses among the experts of its
    ``kept_groups`` best groups, those with the largest sum of two best scores. ``normalize``: a token's weights are divided by
    their sum, plus 1e-20. They are then multiplied by ``scale``. Scores in at least fp32. Gradients reach the logits.
    """
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    score_TE = wide_TE.softmax(-1) if scoring == "softmax" else wide_TE.sigmoid()
    choice_TE = score_TE.detach() if bias_E is None else score_TE.detach() + bias_E.to(score_TE.dtype)
    if groups > 1:
        choice_TGE = choice_TE.unflatten(1, (groups, -1))
        best_TG = choice_TGE.sort(-1, descending=True).values[..., :2].sum(-1)
        rank_TG = best_TG.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        choice_TE = choice_TGE.masked_fill((rank_TG >= kept_groups).unsqueeze(-1), float("-inf")).flatten(1)
    index_TK = choice_TE.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weight_TK = score_TE.gather(1, index_TK)
    if normalize:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
    return (weight_TK * scale).to(logits_TE.dtype), index_TK
