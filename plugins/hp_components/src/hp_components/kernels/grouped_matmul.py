"""``hp::grouped_matmul``: products of groups of rows as an operator of our own, for every dtype, compiled or not.

Legend: R rows, E groups, D and F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hp_components import matmul


def grouped_matmul(x_RD: Tensor, w_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return [R, F]: :func:`hp_components.reference.grouped_matmul.grouped_matmul` as the operator ``hp::grouped_matmul``."""
    return _product(x_RD, w_EDF, offsets_E)


@torch.library.custom_op("hp::grouped_matmul", mutates_args=())
def _product(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return matmul.grouped_matmul(x, w, groups=matmul.Groups.of(offsets))


@torch.library.custom_op("hp::grouped_outer", mutates_args=())
def _outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Return [E, D, F]: the sum over the rows of each group of ``x`` outer ``y``: the weight gradient."""
    return matmul.grouped_outer(x, y, groups=matmul.Groups.of(offsets))


@_product.register_fake
def _(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[2]))


@_outer.register_fake
def _(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0], x.shape[1], y.shape[1]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w, offsets = ctx.saved_tensors
    grad_x = _product(grad, w.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    grad_w = _outer(x, grad, offsets) if ctx.needs_input_grad[1] else None
    return grad_x, grad_w, None


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, y, offsets = ctx.saved_tensors
    grad_x = _product(y, grad.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    grad_y = _product(x, grad, offsets) if ctx.needs_input_grad[1] else None
    return grad_x, grad_y, None


_product.register_autograd(_product_backward, setup_context=_keep)
_outer.register_autograd(_outer_backward, setup_context=_keep)
