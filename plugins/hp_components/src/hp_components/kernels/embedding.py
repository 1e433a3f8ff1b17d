"""Lookup in one rank's rows of an embedding by torch's own, with sums in fp32 where a CPU would round in between.

Legend: N ids, R local rows, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hp_components.precision import LOW

SKIP = -1  # aten.embedding_dense_backward gives no gradient to ids equal to its padding index; -1 is no row


def embedding(ids: Tensor, weight_RH: Tensor, *, first: int, total: int, padding: int | None) -> Tensor:
    """Return the rows of ``weight`` for ``ids``: :func:`hp_components.reference.embedding.embedding`."""
    if weight_RH.shape[0] == total and not _rounds(weight_RH):
        return functional.embedding(ids, weight_RH, padding_idx=padding)
    return _Lookup.apply(ids, weight_RH, first, total, padding)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_RH: Tensor, first: int, total: int, padding: int | None) -> Tensor:
        rows = weight_RH.shape[0]
        local = ids - first
        foreign = None if rows == total else (local < 0) | (local >= rows)
        skipped = foreign if padding is None else _either(foreign, ids == padding)
        ctx.rows, ctx.dtype = rows, weight_RH.dtype
        ctx.save_for_backward(local if skipped is None else local.masked_fill(skipped, SKIP))
        if foreign is None:
            return functional.embedding(local, weight_RH)
        found = functional.embedding(local.masked_fill(foreign, 0), weight_RH)
        found.masked_fill_(foreign.unsqueeze(-1), 0)
        return found.masked_fill_(((ids < 0) | (ids >= total)).unsqueeze(-1), float("nan"))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (local,) = ctx.saved_tensors
        if _rounds(grad):
            found = _row_sums(grad.reshape(-1, grad.shape[-1]), local.reshape(-1), rows=ctx.rows)
        else:
            found = torch.ops.aten.embedding_dense_backward(grad, local, ctx.rows, SKIP, False)
        return None, found.to(ctx.dtype), None, None, None


def _rounds(x: Tensor) -> bool:
    """Return whether torch's kernel would add up gradients in their own low precision: on CPUs."""
    return x.device.type == "cpu" and x.dtype in LOW


def _row_sums(grad_NH: Tensor, local_N: Tensor, *, rows: int) -> Tensor:
    """Return [R, H]: for each row the sum of the gradients of its ids, those of ``SKIP`` left out.

    Ids that are equal lie together once sorted; ``embedding_bag`` adds up each run in fp32.
    """
    sorted_N, order_N = local_N.sort(stable=True)
    starts = torch.searchsorted(sorted_N, torch.arange(SKIP, rows, device=local_N.device))
    return functional.embedding_bag(order_N, grad_NH, starts, mode="sum")[1:]


def _either(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first | second
