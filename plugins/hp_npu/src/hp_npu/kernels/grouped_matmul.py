"""Products of groups of rows with one matrix each, by ``npu_grouped_matmul``. Legend: R rows, E groups, D and F features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hp_npu.operators import operator

ROWS, REDUCTION = 0, 2  # group_type: what the groups split
ENDS = 0  # group_list_type: cumulative


def grouped_matmul(x_RD: Tensor, w_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return [R, F]: rows ``offsets[e - 1] .. offsets[e]`` times ``w[e]``; rows past the last offset give zeros.

    ``offsets`` int32, not decreasing, at most R. What rows past the last offset hold reaches nothing, and their gradient is
    zero. Gradients reach ``x`` and ``w`` (zeros for an empty group). Nothing waits for the device.
    """
    return _GroupedMatmul.apply(x_RD, w_EDF, offsets_E)


class _GroupedMatmul(torch.autograd.Function):
    """The operator has no autograd: the output, the gradient of the rows and that of the weights are three calls.

    It wants the last end to be R, so rows past the last offset join the last group, as zeros.
    """

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_EDF: Tensor, offsets_E: Tensor) -> Tensor:
        x_RD = _owned(x_RD, offsets_E)
        ctx.save_for_backward(x_RD, w_EDF, offsets_E)
        return _products(x_RD, w_EDF, offsets_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RD, w_EDF, offsets_E = ctx.saved_tensors
        grad_RF = _owned(grad_RF, offsets_E)
        grad_x = _products(grad_RF, w_EDF.transpose(1, 2), offsets_E) if ctx.needs_input_grad[0] else None
        grad_w = _outer(x_RD, grad_RF, offsets_E) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def _owned(x_RD: Tensor, offsets_E: Tensor) -> Tensor:
    """Return the rows with zeros for those of nobody, whatever they hold."""
    if x_RD.shape[0] == 0:
        return x_RD
    row_R = torch.arange(x_RD.shape[0], device=x_RD.device)
    return x_RD.masked_fill((row_R >= offsets_E[-1]).unsqueeze(1), 0)


def _ends(offsets_E: Tensor, rows: int) -> Tensor:
    ends_E = offsets_E.to(torch.int64, copy=True)
    ends_E[-1] = rows
    return ends_E


def _products(x_RD: Tensor, w_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    if x_RD.shape[0] == 0:
        return x_RD.new_zeros(0, w_EDF.shape[2])
    out: Tensor = operator("npu_grouped_matmul")(
        [x_RD],
        [w_EDF],
        group_list=_ends(offsets_E, x_RD.shape[0]),
        split_item=3,
        group_type=ROWS,
        group_list_type=ENDS,
    )[0]
    return out


def _outer(x_RD: Tensor, grad_RF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return [E, D, F]: the sum over each group's rows of ``x`` outer ``grad``; an empty group's part nobody computes."""
    if x_RD.shape[0] == 0:
        return x_RD.new_zeros(offsets_E.shape[0], x_RD.shape[1], grad_RF.shape[1])
    ends_E = _ends(offsets_E, x_RD.shape[0])
    out: Tensor = operator("npu_grouped_matmul")(
        [x_RD.t()],
        [grad_RF],
        group_list=ends_E,
        split_item=2,
        group_type=REDUCTION,
        group_list_type=ENDS,
    )[0]
    empty_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
    return out.masked_fill_(empty_E[:, None, None], 0)
