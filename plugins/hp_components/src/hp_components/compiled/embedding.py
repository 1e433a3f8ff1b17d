"""Lookup in one rank's rows of an embedding in C++: one pass forward, and one over the gradient, by ids that are sorted.

Legend: N ids, R local rows, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hp_components.compiled.library import call, usable
from hp_components.compiled.rows import rows
from hp_components.kernels import embedding as native

IDS = (torch.int64, torch.int32)
NO_PADDING = -1  # no row has it


def embedding(ids: Tensor, weight_RH: Tensor, *, first: int, total: int, padding: int | None) -> Tensor:
    """Return the rows of ``weight`` for ``ids``: :func:`hp_components.reference.embedding.embedding`.

    A row's gradients are added up in the order of the ids, whatever the number of threads.
    """
    known = type(ids) is Tensor and ids.device.type == "cpu" and ids.dtype in IDS and usable(weight_RH)
    if not known or weight_RH.dim() != 2 or min(ids.numel(), weight_RH.numel()) == 0:
        return native.embedding(ids, weight_RH, first=first, total=total, padding=padding)
    found: Tensor = _Embedding.apply(ids, weight_RH, first, total, padding)
    return found


class _Embedding(torch.autograd.Function):
    """Keeps the ids. Rows that are whole are copied by torch, which refuses ids that do not exist."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_RH: Tensor, first: int, total: int, padding: int | None) -> Tensor:
        ids_N = ids.to(torch.int64).contiguous()
        ctx.save_for_backward(ids_N)
        ctx.rows, ctx.first, ctx.padding = weight_RH.shape[0], first, NO_PADDING if padding is None else padding
        if ctx.rows == total:
            return functional.embedding(ids_N, weight_RH)
        out = torch.empty((*ids.shape, weight_RH.shape[1]), dtype=weight_RH.dtype)
        call("embedding_forward", out.dtype, ids_N, *rows(weight_RH), out, ids.numel(), *weight_RH.shape, first, total)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids_N,) = ctx.saved_tensors
        grad_weight = torch.empty((ctx.rows, grad.shape[-1]), dtype=grad.dtype)
        places = (ids_N.numel(), *grad_weight.shape, ctx.first, ctx.padding)
        call("embedding_backward", grad.dtype, ids_N, *rows(grad), grad_weight, *places)
        return None, grad_weight, None, None, None
