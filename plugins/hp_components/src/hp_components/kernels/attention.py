"""Attention by torch's fused operators, never with a mask that grows with S squared.

Legend: B batch, N query heads, K key-value heads, Q queries, S keys, D query and key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hp_components.kernels.attention_lse import fused_with_lse
from hp_components.reference import attention as plain
from hp_core.contracts import AttentionMask

BLOCK = 512  # queries whose mask exists at one time
BAND = 128  # fewest queries of a window's band: shorter ones cost more calls than they save keys


def attention(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, mask: AttentionMask, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return [B, N, Q, V]: :func:`hp_components.reference.attention.attention` by scaled_dot_product_attention.

    Causal and unmasked attention run without a mask; windows in bands of queries; documents (runs of equal ids) one by one;
    positions in blocks of queries whose masks are made again in the backward. Documents read their ids on the host.
    """
    queries, keys = query_BNQD.shape[2], key_BKSD.shape[2]
    if has_runs(mask):
        return by_documents(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale, dropout=dropout, attend=attention)
    if any(value is not None for value in (mask.positions, mask.key_positions, mask.key_document_ids)):
        return _by_blocks(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale, dropout=dropout)
    if mask.window is not None and mask.window < keys:
        return _by_bands(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale, dropout=dropout)
    if mask.causal and queries != keys:
        return _by_blocks(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale, dropout=dropout)
    return _fused(query_BNQD, key_BKSD, value_BKSV, seen=None, causal=mask.causal, scale=scale, dropout=dropout)


def attention_with_lse(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, mask: AttentionMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention and its log-sum-exp [B, N, Q]: :func:`hp_components.reference.attention.attention_with_lse`.

    CPUs run the fused kernel where the mask is causal or none. Else in blocks of queries whose scores are made again in the
    backward: memory grows with Q and with S, never with both.
    """
    queries, keys = query_BNQD.shape[2], key_BKSD.shape[2]
    if query_BNQD.device.type == "cpu" and is_plain(mask, queries, keys) and value_BKSV.shape[-1] <= key_BKSD.shape[-1]:
        return fused_with_lse(query_BNQD, key_BKSD, value_BKSV, causal=mask.causal, scale=scale)
    outs, lses = [], []
    for rows in _ranges(queries, size=BLOCK):
        reach = _reach(mask, rows, keys)
        out, lse = checkpoint(
            plain.attention_with_lse,
            query_BNQD[:, :, rows],
            key_BKSD[:, :, reach],
            value_BKSV[:, :, reach],
            mask=_keys_of(_rows_of(mask, rows, keys, query_BNQD), reach),
            scale=scale,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def has_runs(mask: AttentionMask) -> bool:
    """Return whether the mask's documents are runs of equal ids in rows without positions."""
    others = (mask.positions, mask.key_positions, mask.key_document_ids)
    return mask.document_ids is not None and all(value is None for value in others)


def is_plain(mask: AttentionMask, queries: int, keys: int) -> bool:
    """Return whether the mask is square causal or none at all."""
    bare = attrs.evolve(mask, window=None) == AttentionMask(causal=mask.causal)
    return bare and (mask.window is None or mask.window >= keys) and (queries == keys or not mask.causal)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, *, seen: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    """Return SDPA with compact keys; values are padded where the CPU's fused kernel wants one width."""
    width = value.shape[-1]
    if query.device.type == "cpu" and width < query.shape[-1]:
        value = functional.pad(value, (0, query.shape[-1] - width))
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[..., :width]


def _by_bands(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, scale: float, dropout: float) -> Tensor:
    """Each run of queries with the keys its window reaches; one small mask serves all runs of one shape."""
    masks: dict[tuple[int, int, int], Tensor | None] = {}
    outs = []
    for rows in _ranges(query.shape[2], size=max(BAND, min(BLOCK, mask.window or BLOCK))):
        keys = _reach(mask, rows, key.shape[2])
        shape = (rows.stop - rows.start, keys.stop - keys.start, rows.start - keys.start)
        if shape not in masks:
            masks[shape] = plain.visible(_shifted(mask, rows, keys, query), shape[0], shape[1], device=query.device)
        seen = masks[shape]
        outs.append(_masked(query[:, :, rows], key[:, :, keys], value[:, :, keys], seen, scale=scale, dropout=dropout))
    return torch.cat(outs, 2)


def by_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: AttentionMask,
    scale: float,
    dropout: float,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Return ``attend`` of each run of equal ids by itself: work and memory of the documents, not of the row."""
    assert mask.document_ids is not None
    inner, rows = attrs.evolve(mask, document_ids=None), []
    for row, ids in enumerate(mask.document_ids):
        lengths: list[int] = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
        parts = [tensor[row : row + 1].split(lengths, dim=2) for tensor in (query, key, value)]
        outs = [attend(q, k, v, mask=inner, scale=scale, dropout=dropout) for q, k, v in zip(*parts, strict=True)]
        rows.append(torch.cat(outs, 2))
    return torch.cat(rows)


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, scale: float, dropout: float) -> Tensor:
    outs = []
    for rows in _ranges(query.shape[2], size=BLOCK):
        part = _rows_of(mask, rows, key.shape[2], query)
        outs.append(
            checkpoint(
                _visible_block, query[:, :, rows], key, value, mask=part, scale=scale, dropout=dropout, use_reentrant=False
            )
        )
    return torch.cat(outs, 2)


def _visible_block(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, scale: float, dropout: float) -> Tensor:
    seen = plain.visible(mask, query.shape[2], key.shape[2], device=query.device)
    return _masked(query, key, value, seen, scale=scale, dropout=dropout)


def _masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, *, scale: float, dropout: float) -> Tensor:
    """Return SDPA under a boolean mask [B or 1, Q, S]; zeros where a query sees nothing."""
    if seen is None:
        return _fused(query, key, value, seen=None, causal=False, scale=scale, dropout=dropout)
    blind = ~seen.any(-1)[:, None, :, None]
    out = _fused(query, key, value, seen=seen.unsqueeze(1), causal=False, scale=scale, dropout=dropout)
    return out.masked_fill(blind, 0)


def _ranges(length: int, *, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _reach(mask: AttentionMask, rows: slice, keys: int) -> slice:
    """Return the keys that these queries can see, as far as that follows from their places alone."""
    if mask.positions is not None or mask.key_positions is not None or not mask.causal:
        return slice(0, keys)
    first = 0 if mask.window is None else max(0, rows.start - mask.window + 1)
    return slice(first, min(rows.stop, keys))


def _keys_of(mask: AttentionMask, keys: slice) -> AttentionMask:
    documents = None if mask.key_document_ids is None else mask.key_document_ids[:, keys]
    return attrs.evolve(mask, key_positions=mask.key_positions[:, keys], key_document_ids=documents)


def _shifted(mask: AttentionMask, rows: slice, keys: slice, like: Tensor) -> AttentionMask:
    """Return the mask of some queries and keys, placed relative to the first key."""
    queries = torch.arange(rows.start - keys.start, rows.stop - keys.start, device=like.device)
    places = torch.arange(keys.stop - keys.start, device=like.device)
    return attrs.evolve(mask, positions=queries.unsqueeze(0), key_positions=places.unsqueeze(0))


def _rows_of(mask: AttentionMask, rows: slice, keys: int, like: Tensor) -> AttentionMask:
    """Return the mask of some queries and all keys, with the places of both written out."""
    every = torch.arange(keys, device=like.device).unsqueeze(0)
    queries = mask.positions
    if queries is None:
        queries = torch.arange(like.shape[2], device=like.device).unsqueeze(0)
    same = mask.positions is not None and like.shape[2] == keys
    key_positions = mask.key_positions if mask.key_positions is not None else (queries if same else every)
    documents = mask.document_ids
    others = documents if mask.key_document_ids is None else mask.key_document_ids
    return attrs.evolve(
        mask,
        positions=queries[:, rows],
        key_positions=key_positions,
        document_ids=None if documents is None else documents[:, rows],
        key_document_ids=None if documents is None else others,
    )
