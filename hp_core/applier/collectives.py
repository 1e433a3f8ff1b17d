"""The collectives of activations and parameter gradients on one mesh axis, each with its exact adjoint. All in one file.

Everything here works on local tensors. A sum is accumulated in at least fp32 whatever travels on the wire, and its
summands are added in the same order on every rank, so that a replicated result is equal to the last bit. Tensors that
carry no gradient (token ids, expert indices) pass through the same functions. Degree 1 returns the tensor itself.

| function                              | forward        | backward       |
|---------------------------------------|----------------|----------------|
| ``all_gather(backward="reduce_scatter")`` | all-gather | reduce-scatter |
| ``all_gather(backward="split")``      | all-gather     | split          |
| ``reduce_scatter``                    | reduce-scatter | all-gather     |
| ``all_reduce``                        | all-reduce     | identity       |
| ``identity``                          | identity       | all-reduce     |
| ``split``                             | split          | all-gather     |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup, accumulation_dtype


def all_gather(x: Tensor, *, dim: int, axis: AxisGroup, backward: Literal["reduce_scatter", "split"]) -> Tensor:
    """Return the slices of all ranks of ``axis`` side by side along ``dim``.

    ``backward`` is ``reduce_scatter`` where each rank computes a different part from the result, and ``split`` where all
    compute the same.
    """
    return x if axis.size == 1 else _AllGather.apply(x, _positive(x, dim), axis, backward)


def reduce_scatter(x: Tensor, *, dim: int, axis: AxisGroup) -> Tensor:
    """Return this rank's slice along ``dim`` of the sum over ``axis``; HP550 if the dim does not divide evenly."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, _divisible(x, dim, axis), axis)


def all_reduce(x: Tensor, *, axis: AxisGroup) -> Tensor:
    """Return the sum over ``axis``; the gradient is complete already and passes unchanged."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def identity(x: Tensor, *, axis: AxisGroup) -> Tensor:
    """Return ``x``; its gradient is the sum over ``axis`` of what the ranks compute, in ``x``'s dtype."""
    return x if axis.size == 1 else _Identity.apply(x, axis)


def split(x: Tensor, *, dim: int, axis: AxisGroup) -> Tensor:
    """Return this rank's slice along ``dim``, a view; HP550 if the dim does not divide evenly."""
    return x if axis.size == 1 else _Split.apply(x, _divisible(x, dim, axis), axis)


COLLECTIVES: Mapping[str, Callable[..., Tensor]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "identity": identity,
    "split": split,
}


def _positive(x: Tensor, dim: int) -> int:
    return dim if dim >= 0 else dim + x.dim()


def _divisible(x: Tensor, dim: int, axis: AxisGroup) -> int:
    """Return ``dim`` as a non-negative number; HP550 unless the tensor has it and it divides by the degree."""
    found = _positive(x, dim)
    if not 0 <= found < x.dim() or x.shape[found] % axis.size:
        raise PlanError(
            "HP550",
            f"dim {dim} of a tensor of shape {tuple(x.shape)} cannot be cut into {axis.size} equal parts",
            expected=f"a size divisible by {axis.name} = {axis.size}",
        )
    return found


def _gathered(x: Tensor, axis: AxisGroup) -> Tensor:
    """Return [degree, *x.shape]: the tensor of every rank."""
    parts = x.new_empty((axis.size, *x.shape))
    axis.all_gather(parts, x.contiguous())
    return parts


def _gather(x: Tensor, dim: int, axis: AxisGroup) -> Tensor:
    return _gathered(x, axis).movedim(0, dim).flatten(dim, dim + 1)


def _slice(x: Tensor, dim: int, axis: AxisGroup) -> Tensor:
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * size, size)


def _scatter_sum(x: Tensor, dim: int, axis: AxisGroup) -> Tensor:
    """Send every rank its slice and add up what arrives: exact in low precision, and the cheapest collective of CPUs."""
    outgoing = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    total = torch.empty_like(outgoing[0])
    axis.reduce_scatter(total, outgoing)
    return total


def _add(parts: Tensor) -> Tensor:
    """Return the sum over dim 0, rounded once to the dtype of ``parts``."""
    if parts.shape[0] == 2:  # a single addition is rounded once in every dtype
        return parts[0] + parts[1]
    return parts.sum(dim=0, dtype=accumulation_dtype(parts.dtype)).to(parts.dtype)


def _sum(x: Tensor, axis: AxisGroup) -> Tensor:
    if axis.size <= (2 if axis.shared is None else 4):  # one exchange of all instead of a scatter and a gather of parts
        return _add(_gathered(x, axis))
    total = x.to(accumulation_dtype(x.dtype), memory_format=torch.contiguous_format, copy=True)
    dist.all_reduce(total, group=axis.group)
    return total.to(x.dtype)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: AxisGroup, backward: str) -> Tensor:
        ctx.dim, ctx.axis, ctx.adjoint = dim, axis, backward
        return _gather(x, dim, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        adjoint = _scatter_sum if ctx.adjoint == "reduce_scatter" else _slice
        return adjoint(gradient, ctx.dim, ctx.axis), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: AxisGroup) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return _scatter_sum(x, dim, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.dim, ctx.axis), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.axis), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: AxisGroup) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return _slice(x, dim, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.dim, ctx.axis), None, None
