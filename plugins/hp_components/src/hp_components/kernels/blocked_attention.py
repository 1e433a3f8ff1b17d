"""Causal attention on CPUs by blocks of queries, with the gradient by hand.

Legend: B batch, N query heads, K key-value heads, G = N / K, S sequence, D query and key width, V value width; P = B x K pairs;
of a block: L queries, R = G x L rows, E keys up to its end.

The query heads of one key-value head are stacked in rows, so keys and values are never expanded, and no block meets keys past
its end. The weights of all blocks, a little more than half of S x S a head, are kept for the backward, which therefore costs
half of torch's fused one. Scores, their gradient, softmax and sums over queries run in at least fp32; in low precision weights
are kept and multiplied in it, as torch's fused kernel does.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from torch import Tensor

from hp_components.kernels import attention as fused
from hp_components.precision import accumulation_dtype, product_dtype
from hp_core.contracts import AttentionMask

KEPT_BYTES = 2**27  # of weights that one call may keep for its backward


def attention(
    query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, mask: AttentionMask, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return [B, N, Q, V]: :func:`hp_components.reference.attention.attention`, causal rows by blocks with their weights kept.

    Documents (runs of equal ids) go one by one. Windows, positions, dropout, a cache, and rows whose weights would take more
    than ``KEPT_BYTES`` go to torch's fused kernel, :func:`hp_components.kernels.attention.attention`.
    """
    if fused.has_runs(mask):
        return fused.by_documents(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale, dropout=dropout, attend=attention)
    plain = mask.causal and dropout == 0 and fused.is_plain(mask, query_BNQD.shape[2], key_BKSD.shape[2])
    if plain and query_BNQD.device.type in ("cpu", "meta") and query_BNQD.numel() > 0:
        blocks = Blocks.of(query_BNQD, key_BKSD, value_BKSV)
        learn = torch.is_grad_enabled() and any(x.requires_grad for x in (query_BNQD, key_BKSD, value_BKSV))
        if not learn or blocks.weight_bytes <= KEPT_BYTES:
            out: Tensor = _Blocked.apply(query_BNQD, key_BKSD, value_BKSV, scale, blocks, learn)
            return out
    return fused.attention(query_BNQD, key_BKSD, value_BKSV, mask=mask, scale=scale, dropout=dropout)


@attrs.frozen(kw_only=True)
class Blocks:
    """Sizes of the tensors and runs of queries; ``work``: dtype of scores and sums, ``low``: of the fastest products."""

    pairs: int
    group: int
    sequence: int
    ends: tuple[int, ...]
    work: torch.dtype
    low: torch.dtype

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> Blocks:
        """Return blocks of 64 queries, of 128 in longer rows: small enough for the cache, large enough for products."""
        batch, heads, sequence, _ = query.shape
        size = 64 if sequence <= 256 else 128
        return cls(
            pairs=batch * key.shape[1],
            group=heads // key.shape[1],
            sequence=sequence,
            ends=(*range(size, sequence, size), sequence),
            work=accumulation_dtype(query.dtype),
            low=product_dtype(value),
        )

    @property
    def queries(self) -> tuple[slice, ...]:
        """Each block's queries."""
        return tuple(slice(start, end) for start, end in zip((0, *self.ends), self.ends, strict=False))

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Each block's [P, R, E]."""
        return tuple((self.pairs, self.group * (rows.stop - rows.start), rows.stop) for rows in self.queries)

    @property
    def weight_bytes(self) -> int:
        """What the weights of all blocks take."""
        return sum(math.prod(shape) for shape in self.shapes) * self.low.itemsize

    def kept(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor for each block's weights: allocated one by one, they are found on the heap in the next step."""
        return tuple(like.new_empty(shape, dtype=self.low) for shape in self.shapes)

    def scratch(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor for each block's scores, all in one memory."""
        memory = like.new_empty(max(math.prod(shape) for shape in self.shapes), dtype=self.work)
        return tuple(memory[: math.prod(shape)].view(shape) for shape in self.shapes)

    def rows(self, x_BNSF: Tensor, queries: slice, dtype: torch.dtype) -> Tensor:
        """Return [P, R, F]: some queries of every head, those of one key-value head below one another."""
        x_BKGLF = x_BNSF[:, :, queries].unflatten(1, (-1, self.group))
        return x_BKGLF.to(dtype, memory_format=torch.contiguous_format).reshape(self.pairs, -1, x_BNSF.shape[-1])

    def pairs_of(self, x_BKSF: Tensor, dtype: torch.dtype) -> Tensor:
        """Return keys or values as [P, S, F]."""
        return x_BKSF.to(dtype, memory_format=torch.contiguous_format).reshape(self.pairs, self.sequence, -1)

    def put(self, x_PRF: Tensor, into_BNSF: Tensor, queries: slice) -> None:
        """Write rows back to the heads they belong to."""
        target = into_BNSF[:, :, queries].unflatten(1, (-1, self.group))
        target.copy_(x_PRF.view(target.shape))


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: Blocks, learn: bool) -> Tensor:
        key_PSD, value_PSV = blocks.pairs_of(key, blocks.work), blocks.pairs_of(value, blocks.low)
        batch, heads, sequence, _ = query.shape
        out_BNSV = query.new_empty((batch, sequence, heads, value.shape[-1])).transpose(1, 2)
        masks: dict[int, Tensor] = {}
        kept = blocks.kept(query) if learn else ()
        direct = learn and blocks.low == blocks.work
        for block, (queries, scores_PRE) in enumerate(
            zip(blocks.queries, kept if direct else blocks.scratch(query), strict=True)
        ):
            rows_PRD = blocks.rows(query, queries, blocks.work) * scale
            torch.bmm(rows_PRD, key_PSD[:, : queries.stop].transpose(1, 2), out=scores_PRE)
            _hide_future(scores_PRE, queries, masks)
            torch.softmax(scores_PRE, -1, out=scores_PRE)
            weights_PRE = kept[block].copy_(scores_PRE) if learn and not direct else scores_PRE.to(blocks.low)
            blocks.put(torch.bmm(weights_PRE, value_PSV[:, : queries.stop]), out_BNSV, queries)
        ctx.scale, ctx.blocks = scale, blocks
        ctx.save_for_backward(query, key, value, *kept)
        return out_BNSV

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BNSV: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        blocks, scale = ctx.blocks, ctx.scale
        key_PSD, value_PSV = blocks.pairs_of(key, blocks.low), blocks.pairs_of(value, blocks.work)
        grad_query = torch.empty_like(query)
        grad_key_PSD = torch.zeros_like(key_PSD, dtype=blocks.work)
        grad_value_PSV = torch.zeros_like(value_PSV)
        wide = kept if blocks.low == blocks.work else blocks.scratch(query)
        for queries, kept_PRE, weights_PRE, scores_PRE in zip(blocks.queries, kept, wide, blocks.scratch(query), strict=True):
            seen = slice(0, queries.stop)
            grad_PRV = blocks.rows(grad_BNSV, queries, blocks.work)
            grad_value_PSV[:, seen].add_(torch.bmm(kept_PRE.transpose(1, 2), grad_PRV.to(blocks.low)))
            torch.bmm(grad_PRV, value_PSV[:, seen].transpose(1, 2), out=scores_PRE)
            if weights_PRE is not kept_PRE:
                weights_PRE.copy_(kept_PRE)
            torch.ops.aten._softmax_backward_data.out(scores_PRE, weights_PRE, -1, blocks.work, grad_input=scores_PRE)
            grad_PRE = scores_PRE.to(blocks.low)
            blocks.put(torch.bmm(grad_PRE, key_PSD[:, seen]).mul_(scale), grad_query, queries)
            rows_PRD = blocks.rows(query, queries, blocks.low)
            grad_key_PSD[:, seen].add_(torch.bmm(grad_PRE.transpose(1, 2), rows_PRD), alpha=scale)
        grad_key = grad_key_PSD.view(key.shape).to(key.dtype)
        return grad_query, grad_key, grad_value_PSV.view(value.shape).to(value.dtype), None, None, None


def _hide_future(scores_PRE: Tensor, queries: slice, masks: dict[int, Tensor]) -> None:
    """Add -inf to the scores of keys ahead of their query; ``masks`` remembers the squares on the diagonal."""
    size = queries.stop - queries.start
    if size not in masks:
        masks[size] = scores_PRE.new_full((size, size), float("-inf")).triu_(1)
    scores_PRE.unflatten(1, (-1, size))[..., queries].add_(masks[size])
