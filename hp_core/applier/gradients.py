"""The norm of all gradients and clipping by it: every logical element once, whatever meshes the parameters lie on."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup

_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same
_ROWS, _LONG = 64, 2**16
_Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], *, pp: AxisGroup | None = None) -> Tensor:
    """Return the 2-norm of all gradients as one scalar, equal on every rank, in at least fp32.

    A sharded gradient is summed over the axes that shard it, a replicated one counts once, a parameter that occurs twice
    (tied) counts once, and one without a gradient counts nothing. ``pp`` adds the stages of a pipeline, each of which
    passes its own parameters. One all-reduce per distinct group. HP522 if a gradient is Partial.
    """
    buckets: dict[_Groups, list[Tensor]] = {}
    for gradient in _gradients(parameters):
        buckets.setdefault(_sharding_groups(gradient), []).append(gradient)
    sums = [_sum_of_squares(gradients) for gradients in buckets.values()]
    squares = torch.stack(sums) if sums else torch.zeros(1)
    for group, members in _members(list(buckets)).items():
        part = squares[members]
        dist.all_reduce(part, group=group)
        squares[members] = part
    total = squares.sum()
    if pp is not None and pp.group is not None:
        dist.all_reduce(total, group=pp.group)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float, pp: AxisGroup | None = None) -> Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``; return the norm before, as there."""
    parameters = list(parameters)
    norm = gradient_norm(parameters, pp=pp)
    _divide(parameters, _divisor(norm, max_norm=max_norm))
    return norm


def clipped_step(optimizer: Optimizer, *, norm: Tensor, max_norm: float) -> None:
    """Run ``optimizer.step()`` with gradients scaled so that their norm, which is ``norm``, is at most ``max_norm``.

    The result is that of :func:`clip_gradients` and a step. A fused optimizer scales in its own pass over the gradients, which
    saves one over all of them. ``norm`` is :func:`gradient_norm` of the optimizer's parameters.
    """
    divisor = _divisor(norm, max_norm=max_norm)
    fused = all(group.get("fused") for group in optimizer.param_groups)  # a loaded state may say otherwise than the optimizer
    if not (fused and getattr(optimizer, "_step_supports_amp_scaling", False) and divisor.dtype == torch.float32):
        _divide((parameter for group in optimizer.param_groups for parameter in group["params"]), divisor)
        optimizer.step()
        return
    optimizer.grad_scale, optimizer.found_inf = divisor, None  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _divisor(norm: Tensor, *, max_norm: float) -> Tensor:
    return ((norm + _EPSILON) / max_norm).clamp(min=1.0)


@torch.no_grad()
def _divide(parameters: Iterable[nn.Parameter], divisor: Tensor) -> None:
    if divisor.device.type == "cpu" and divisor == 1:  # elsewhere looking would wait for the device
        return
    scale = 1 / divisor
    for gradient in _gradients(parameters):
        local = _local(gradient)
        local.mul_(scale.to(local.device))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradient of every distinct parameter that has one, in order."""
    distinct = {id(parameter): parameter for parameter in parameters}
    return [parameter.grad for parameter in distinct.values() if parameter.grad is not None]


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _sharding_groups(gradient: Tensor) -> _Groups:
    """Return the groups over which the ranks hold different elements."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh, groups = gradient.device_mesh, []
    for dim, placement in enumerate(gradient.placements):
        if placement.is_partial():
            axis = (mesh.mesh_dim_names or ("?",) * mesh.ndim)[dim]
            raise PlanError(
                "HP522",
                f"a gradient of shape {tuple(gradient.shape)} is Partial on {axis}",
                expected="a complete one: the parameter's view reduces it",
            )
        if not placement.is_replicate() and mesh.size(dim) > 1:
            groups.append(mesh.get_group(dim))
    return tuple(groups)


def _sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum over the local elements, in at least fp32, on the device that the first one's collectives use."""
    first = gradients[0]
    dtype = functools.reduce(torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32)
    locals_ = [_local(gradient) for gradient in gradients]
    rows = [local.view(_ROWS, -1) for local in locals_ if _is_long(local)]
    norms = [torch.linalg.vector_norm(row, dim=1, dtype=dtype) for row in rows]
    rest = [local for local in locals_ if not _is_long(local)]
    if rest:
        norms.append(torch.stack(torch._foreach_norm(rest, 2, dtype=dtype)))
    return torch.cat(norms).square().sum().to(first.device_mesh.device_type if isinstance(first, DTensor) else first.device)


def _is_long(local: Tensor) -> bool:
    """Return whether several norms are faster than one: on CPUs torch divides rows over threads, but not one long sum."""
    return local.device.type == "cpu" and local.numel() >= _LONG and local.numel() % _ROWS == 0 and local.is_contiguous()


def _members(buckets: Sequence[_Groups]) -> dict[dist.ProcessGroup, list[int]]:
    """Return, for every group, the indices of the buckets that it shards."""
    found: dict[dist.ProcessGroup, list[int]] = {}
    for index, groups in enumerate(buckets):
        for group in groups:
            found.setdefault(group, []).append(index)
    return found
