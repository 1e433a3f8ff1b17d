"""Attention by rectangles of the score matrix, merged by their log-sum-exp: never a mask of S x S.

Legend: B batch, N query heads, K key-value heads, Q queries, S keys, D query and key width, V value width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hp_context_parallel.rectangles import Rectangle
from hp_core.contracts import AttentionMask
from hp_core.errors import PlanError

Kernel = Callable[..., tuple[Tensor, Tensor]]  # (query, key, value, *, mask) -> (output, log-sum-exp)
Rows = Sequence[tuple[slice, Sequence[Rectangle]]]  # rows of the batch that have the same rectangles


def attend(query_BNQD: Tensor, key_BKSD: Tensor, value_BKSV: Tensor, *, rows: Rows, kernel: Kernel) -> Tensor:
    """Return attention [B, N, Q, V] over the rectangles of ``rows``, which cover every query; autograd sees it all."""
    outs = []
    for row, rectangles in rows:
        tensors = [tensor[row] for tensor in (query_BNQD, key_BKSD, value_BKSV)]
        computed = [(r, *compute(*tensors, rectangle=r, kernel=kernel)) for r in rectangles]
        outs.append(_assemble(computed))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def compute(query: Tensor, key: Tensor, value: Tensor, *, rectangle: Rectangle, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Return the attention [B, N, q, V] of one rectangle and its log-sum-exp [B, N, q]; HP551 for a kernel without one."""
    q, k = rectangle.queries.slice, rectangle.keys.slice
    found = kernel(query[:, :, q], key[:, :, k], value[:, :, k], mask=mask_of(rectangle, device=query.device))
    if not isinstance(found, tuple) or len(found) != 2 or found[1].shape != found[0].shape[:3]:
        what = "the attention kernel gives no log-sum-exp beside its output"
        raise PlanError("HP551", what, expected="one of the operator attention_with_lse, with its scale bound")
    return found


def mask_of(rectangle: Rectangle, *, device: torch.device) -> AttentionMask:
    """Return the mask of a rectangle by itself; only windows over other tokens need places."""
    queries, keys = rectangle.queries, rectangle.keys
    if rectangle.kind == "all":
        return AttentionMask(causal=False)
    if queries.start == keys.start:
        return AttentionMask(window=rectangle.window)
    return AttentionMask(
        window=rectangle.window,
        positions=torch.arange(queries.start, queries.stop, device=device).unsqueeze(0),
        key_positions=torch.arange(keys.start, keys.stop, device=device).unsqueeze(0),
    )


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the attention [.., q, V] over the keys of all parts, and its log-sum-exp [.., q], in at least fp32.

    With L the log-sum-exp of all: out is the sum of ``exp(lse - L) * out`` of the parts. The weights are a softmax, which has
    no exponent above 0.
    """
    stacked = torch.stack([lse for _, lse in parts])
    weights = stacked.softmax(0).unsqueeze(-1)
    out = sum(part * weight for (part, _), weight in zip(parts, weights, strict=True))
    assert isinstance(out, Tensor)
    return out, stacked.logsumexp(0)


def _assemble(computed: Sequence[tuple[Rectangle, Tensor, Tensor]]) -> Tensor:
    """Return the output of all queries in memory order: every stretch of queries merged over the rectangles that have it."""
    outs = []
    for first, last in _stretches([rectangle for rectangle, _, _ in computed]):
        parts = []
        for rectangle, out, lse in computed:
            held = rectangle.queries.slice
            if held.start <= first and last <= held.stop:
                inside = slice(first - held.start, last - held.start)
                parts.append((out[:, :, inside], lse[:, :, inside]))
        outs.append(parts[0][0] if len(parts) == 1 else merge(parts)[0].to(parts[0][0].dtype))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _stretches(rectangles: Sequence[Rectangle]) -> list[tuple[int, int]]:
    """Return the stretches of queries, as they lie in memory, within which the same rectangles count."""
    cuts = sorted({end for r in rectangles for end in (r.queries.slice.start, r.queries.slice.stop)})
    return list(itertools.pairwise(cuts))
