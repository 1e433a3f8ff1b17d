"""Attention in C++: causal or full, windows and packed documents, never of size queries x keys.

Legend: B batch, N query heads, K key-value heads, Q queries, S keys, D query and key width, V value width.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from hp_components.compiled.library import call, strides, usable, with_rows
from hp_components.kernels import attention as native
from hp_components.precision import accumulation_dtype
from hp_core.contracts import AttentionMask


def attention(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, mask: AttentionMask, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return [B, N, Q, V]: :func:`hp_components.reference.attention.attention`, scores in at least fp32.

    Dropout, and masks under which a query's keys are no range, go to torch's fused kernel,
    :mod:`hp_components.kernels.attention`.
    """
    ranges = None if dropout else _ranges(query_BNQD, key_BKSD, value_BKSV, mask)
    if ranges is None:
        return native.attention(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale, dropout=dropout)
    out: Tensor = _Attention.apply(query_BNQD, key_BKSD, value_BKSV, scale, ranges)[0]
    return out


def attention_with_lse(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, mask: AttentionMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention and the log-sum-exp [B, N, Q] of its scores; gradients flow through both."""
    ranges = _ranges(query_BNQD, key_BKSD, value_BKSV, mask)
    if ranges is None:
        return native.attention_with_lse(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale)
    found: tuple[Tensor, Tensor] = _Attention.apply(query_BNQD, key_BKSD, value_BKSV, scale, ranges)
    return found


@attrs.frozen(kw_only=True, eq=False)
class Ranges:
    """The keys ``first .. end`` (int32 [B or 1, Q] each) that a query sees."""

    first: Tensor
    end: Tensor

    @classmethod
    def of(cls, mask: AttentionMask, *, queries: int, keys: int) -> Ranges | None:
        """Return the ranges of a mask, None where it is none of ranges: keys out of order, or documents by ids of keys."""
        if mask.positions is not None or mask.key_positions is not None:
            return cls._placed(mask, queries=queries, keys=keys)
        if mask.key_document_ids is not None:
            return None
        place = torch.arange(queries).unsqueeze(0)
        end = (place + 1).clamp(max=keys) if mask.causal else torch.full_like(place, keys)
        first = torch.zeros_like(place) if mask.window is None else (place - mask.window + 1).clamp(0, keys)
        if mask.document_ids is not None:
            begin, stop = runs(mask.document_ids)
            first, end = torch.maximum(first, begin), torch.minimum(end, stop)
        return cls(first=first.int(), end=end.int())

    @classmethod
    def _placed(cls, mask: AttentionMask, *, queries: int, keys: int) -> Ranges | None:
        """Return the ranges of queries and keys in places of their own, if the keys' ascend."""
        if mask.document_ids is not None or mask.key_document_ids is not None:
            return None
        place = torch.arange(queries).unsqueeze(0) if mask.positions is None else mask.positions
        keyed = mask.key_positions
        if keyed is None:
            keyed = place if queries == keys else torch.arange(keys).unsqueeze(0)
        if bool((keyed.diff(dim=1) < 0).any()):
            return None
        batch = max(place.shape[0], keyed.shape[0])
        place, keyed = (places.expand(batch, -1).contiguous() for places in (place, keyed))
        first, end = torch.zeros_like(place), torch.full_like(place, keys)
        if mask.causal:
            end = torch.searchsorted(keyed, place, right=True)
        if mask.window is not None:
            first = torch.searchsorted(keyed, place - mask.window + 1)
        return cls(first=first.int(), end=end.int())

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int]:
        """As the functions take them; one row may serve the whole batch."""
        return self.first, self.end, self.first.stride(0) if self.first.shape[0] > 1 else 0


def runs(ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, S] twice: where the run of equal ids that a token is in begins, and where it ends."""
    length = ids_BS.shape[1]
    starts = torch.ones_like(ids_BS, dtype=torch.bool)
    starts[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    places = torch.arange(length).expand_as(ids_BS)
    begin = places.masked_fill(~starts, 0).cummax(1).values
    after = torch.full_like(ids_BS, length, dtype=torch.int64)
    after[:, :-1] = places[:, 1:].masked_fill(~starts[:, 1:], length)
    return begin, after.flip(1).cummin(1).values.flip(1)


def _ranges(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Ranges | None:
    """Return what each query sees, None where the library cannot compute that."""
    if not all(x.numel() for x in (query, key, value)) or not usable(query, key, value) or not _agree(query, key, value):
        return None
    ranges = Ranges.of(mask, queries=query.shape[2], keys=key.shape[2])
    shapes = ((1, query.shape[2]), (query.shape[0], query.shape[2]))
    return ranges if ranges is not None and tuple(ranges.first.shape) in shapes else None


def _agree(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the shapes are those of one attention: the library would read past the end of others, torch tells."""
    (batch, heads, _, width), (kv_batch, kv_heads, keys, key_width) = query.shape, key.shape
    return (kv_batch, key_width) == (batch, width) and value.shape[:3] == (batch, kv_heads, keys) and heads % kv_heads == 0


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, ranges: Ranges) -> tuple[Tensor, Tensor]:
        query, key, value = (with_rows(x) for x in (query, key, value))
        batch, heads, rows, _ = query.shape
        out = query.new_empty((batch, rows, heads, value.shape[3])).transpose(1, 2)
        lse = query.new_empty((batch, heads, rows), dtype=accumulation_dtype(query.dtype))
        inputs = (*strides(query), *strides(key), *strides(value))
        call("attention_forward", query.dtype, *inputs, *strides(out), lse, *ranges.arguments, scale, *sizes(query, key, value))
        ctx.scale, ctx.ranges = scale, ranges
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else with_rows(grad)
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        tensors = [part for x in (query, key, value, out, grad) for part in strides(x)]
        results = [part for x in grads for part in strides(x)]
        lses = (lse, None if grad_lse is None else grad_lse.contiguous())
        masked = (*ctx.ranges.arguments, ctx.scale)
        call("attention_backward", query.dtype, *tensors, *lses, *results, *masked, *sizes(query, key, value))
        return *grads, None, None


def sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return batch, heads, key-value heads, queries, keys, width and value width."""
    return query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2], query.shape[3], value.shape[3]
