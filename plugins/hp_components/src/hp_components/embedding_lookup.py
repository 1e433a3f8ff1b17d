"""Masked lookup in one rank's rows of an embedding. Legend: N ids, R local rows, H hidden."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SKIP = -1  # aten.embedding_dense_backward gives no gradient to ids equal to its padding index; -1 is no row


def embedding_lookup(ids: Tensor, weight_RH: Tensor, *, first: int, total: int, padding: int | None) -> Tensor:
    """Return the rows of ``weight_RH`` for ``ids`` (any shape), which holds rows ``first .. first + R`` of ``total``.

    Ids of other ranks give zero rows, so that the sum over ranks is the whole lookup; ids outside ``0 .. total`` give NaN
    rows when the rows are cut, and torch's IndexError when they are whole. ``padding`` (a global id) gets no gradient. The
    gradient is deterministic and summed in at least fp32.
    """
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
        if grad.device.type == "cpu" and grad.dtype in (torch.bfloat16, torch.float16):
            grad = grad.float()  # the CPU kernel would add up in the tensor's own dtype
        found = torch.ops.aten.embedding_dense_backward(grad, local, ctx.rows, SKIP, False)
        return None, found.to(ctx.dtype), None, None, None


def _either(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first | second
