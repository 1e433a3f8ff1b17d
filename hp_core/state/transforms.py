"""Running transforms: from a tensor as Hugging Face's model holds it to a tensor as our component holds it, and back.

``forward`` maps Hugging Face's runtime tensor to ours; ``inverse`` maps ours back and restores every bit (``AddScalar``
restores what rounding left). Transforms run in the order they are listed, inverses in the reverse order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hp_core.contracts.transform import AddScalar, Transform, Transpose, Unflatten

Shape = tuple[int, ...]


def forward(transforms: Sequence[Transform], tensor: Tensor) -> Tensor:
    """Return ``tensor`` (Hugging Face's runtime shape) as the component holds it; a view where the transforms allow it."""
    return functools.reduce(_forward, transforms, tensor)


def inverse(transforms: Sequence[Transform], tensor: Tensor) -> Tensor:
    """Return ``tensor`` (the component's shape) as Hugging Face's model holds it; a view where the transforms allow it."""
    return functools.reduce(_inverse, reversed(transforms), tensor)


def inverse_gradient(transforms: Sequence[Transform], gradient: Tensor) -> Tensor:
    """Return the gradient with respect to Hugging Face's tensor, given that of ours: offsets have derivative one."""
    return inverse([step for step in transforms if not isinstance(step, AddScalar)], gradient)


def source_shape(transforms: Sequence[Transform], shape: Shape) -> Shape:
    """Return the shape that Hugging Face's model has where ours has ``shape``."""
    return functools.reduce(_inverse_shape, reversed(transforms), shape)


def _forward(tensor: Tensor, step: Transform) -> Tensor:
    if isinstance(step, Unflatten):
        return torch.unflatten(tensor, step.dim, step.sizes)
    if isinstance(step, Transpose):
        return tensor.transpose(step.dim0, step.dim1)
    return tensor + step.value


def _inverse(tensor: Tensor, step: Transform) -> Tensor:
    if isinstance(step, Unflatten):
        return tensor.flatten(step.dim, step.dim + len(step.sizes) - 1)
    if isinstance(step, Transpose):
        return tensor.transpose(step.dim0, step.dim1)
    return tensor - step.value


def _inverse_shape(shape: Shape, step: Transform) -> Shape:
    if isinstance(step, Unflatten):
        end = step.dim + len(step.sizes)
        return (*shape[: step.dim], math.prod(shape[step.dim : end]), *shape[end:])
    if isinstance(step, Transpose):
        order = list(range(len(shape)))
        order[step.dim0], order[step.dim1] = order[step.dim1], order[step.dim0]
        return tuple(shape[dim] for dim in order)
    return shape
