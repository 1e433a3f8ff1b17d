"""Results of nothing: fused operators are not asked about tensors without elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def zeros_from(shape: Sequence[int], *inputs: Tensor) -> Tensor:
    """Return zeros of ``shape``, typed like the first input; every input gets a gradient of zeros."""
    return _Zeros.apply(tuple(shape), *inputs)


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.zeros_like(tensor) if needed else None for tensor, needed in wanted)
