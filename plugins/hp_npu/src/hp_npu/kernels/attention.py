"""Attention by ``npu_fusion_attention``, never with a mask that grows with S squared.

Legend: B batch, N query heads, K key-value heads, Q queries, S keys, D query and key width, V value width, T tokens of all
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hp_core.contracts import AttentionMask
from hp_npu.kernels.empty import zeros_from
from hp_npu.kernels.fusion import BAND, LEFT_UP, RIGHT_DOWN, WIDE, Call, fused, sparse
from hp_npu.kernels.masks import blocked, document_ends
from hp_npu.limits import DOCUMENTS

BLOCK = 512  # queries whose mask exists at one time


def attention(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, mask: AttentionMask, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return [B, N, Q, V]: softmax of ``scale * query . key`` over the keys that ``mask`` lets a query see, times values.

    Causal masks and windows are the operator's sparse modes; documents (runs of equal ids) are packed sequences, whose ends
    are read on the host; positions, and windows of a rectangle, are masks made in blocks of queries, again in the backward.
    """
    return _attend(query_BNQD, key_BKSD, value_BKSV, mask=mask, call=Call(scale=scale, keep_prob=1.0 - dropout))[0]


def attention_with_lse(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, mask: AttentionMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention and the log-sum-exp [B, N, Q] of its scores, in fp32; gradients flow through both.

    A query that sees no key gets zeros and the log-sum-exp ``-inf``. Masks are handled as in :func:`attention`.
    """
    return _attend(query_BNQD, key_BKSD, value_BKSV, mask=mask, call=Call(scale=scale))


def _attend(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, call: Call) -> tuple[Tensor, Tensor]:
    queries, keys = query.shape[2], key.shape[2]
    if query.numel() == 0 or keys == 0:
        shape = query.shape[:3]
        nothing = query.new_full(shape, float("-inf"), dtype=torch.float32)
        return zeros_from((*shape, value.shape[-1]), query, key, value), nothing
    placed = any(given is not None for given in (mask.positions, mask.key_positions, mask.key_document_ids))
    banded = mask.window is not None and mask.window < keys
    if placed or (queries != keys and (banded or mask.document_ids is not None)):
        return _by_blocks(query, key, value, mask=mask, call=call)
    call = sparse(call, mode=_mode(mask, banded), look_back=(mask.window or 1) - 1 if banded else WIDE, causal=mask.causal)
    if mask.document_ids is not None:
        return _packed(query, key, value, mask=mask, call=call)
    return fused(query, key, value, call=call)


def _mode(mask: AttentionMask, banded: bool) -> int | None:
    """Return the sparse mode: 4 for a band, a causal one, None where everything is seen."""
    if banded:
        return BAND
    if not mask.causal:
        return None
    return LEFT_UP if mask.document_ids is None else RIGHT_DOWN


def _packed(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, call: Call) -> tuple[Tensor, Tensor]:
    """All rows as one row of tokens [T, N, D] with the ends of its documents; a call takes so many documents."""
    batch, ends = query.shape[0], document_ends(mask.document_ids, batch=query.shape[0])
    tokens = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    outs, lses, first = [], [], 0
    for start in range(0, len(ends), DOCUMENTS):
        part = ends[start : start + DOCUMENTS]
        inputs = [tensor[first : part[-1]] for tensor in tokens]
        out_TNV, lse_TN = fused(*inputs, call=call.packed([end - first for end in part]))
        outs.append(out_TNV)
        lses.append(lse_TN)
        first = part[-1]
    out, lse = (torch.cat(parts).unflatten(0, (batch, -1)).transpose(1, 2) for parts in (outs, lses))
    return out, lse


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, call: Call) -> tuple[Tensor, Tensor]:
    queries, outs, lses = query.shape[2], [], []
    for start in range(0, queries, BLOCK):
        rows = slice(start, min(start + BLOCK, queries))

        def make(rows: slice = rows) -> Tensor:
            return blocked(mask, rows, queries=queries, keys=key.shape[2], device=query.device)

        out, lse = fused(query[:, :, rows], key, value, call=call.masked(make))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
