"""Attention in plain torch, scores and all.

Legend: B batch, N query heads, K key-value heads, G = N / K, Q queries, S keys, D query and key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hp_components.precision import accumulation_dtype
from hp_core.contracts import AttentionMask


def attention(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, mask: AttentionMask, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return [B, N, Q, V]: softmax of ``scale * query . key`` over the keys that ``mask`` lets a query see, times values.

    Scores and softmax in at least fp32. A query that sees no key gets zeros. Gradients reach query, key and value.
    """
    return _attend(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale, dropout=dropout)[0]


def attention_with_lse(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, mask: AttentionMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention and the log-sum-exp [B, N, Q] of its scores, in at least fp32; gradients flow through both.

    A query that sees no key has the log-sum-exp ``-inf``, so blocks of keys merge by it.
    """
    return _attend(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale, dropout=0.0)


def visible(mask: AttentionMask, queries: int, keys: int, *, device: torch.device) -> Tensor | None:
    """Return a boolean [B or 1, Q, S], True where query i sees key j; None where all see all.

    Query i is at ``positions[i]`` (i if None), key j at ``key_positions[j]`` (those of the queries, if as many, else j).
    """
    seen: Tensor | None = None
    if mask.causal or mask.window is not None:
        where = _row(mask.positions, queries, device)
        same = mask.key_positions is None and queries == keys
        ahead = (where if same else _row(mask.key_positions, keys, device)).unsqueeze(1) - where.unsqueeze(2)
        seen = ahead <= 0 if mask.causal else torch.ones_like(ahead, dtype=torch.bool)
        if mask.window is not None:
            seen = seen & (ahead > -mask.window)
    if mask.document_ids is not None:
        others = mask.document_ids if mask.key_document_ids is None else mask.key_document_ids
        same_document = mask.document_ids.unsqueeze(2) == others.unsqueeze(1)
        seen = same_document if seen is None else seen & same_document
    return seen


def _row(positions: Tensor | None, length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device).unsqueeze(0) if positions is None else positions


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    grouped_BKGQD = query.unflatten(1, (key.shape[1], -1)).to(dtype)
    scores = grouped_BKGQD @ key.unsqueeze(2).transpose(-1, -2).to(dtype) * scale
    seen = visible(mask, query.shape[2], key.shape[2], device=query.device)
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse == float("-inf"), 0)
    weights = functional.dropout((scores - finite.unsqueeze(-1)).exp(), dropout)
    out = (weights @ value.unsqueeze(2).to(dtype)).flatten(1, 2)
    return out.to(query.dtype), lse.flatten(1, 2)
