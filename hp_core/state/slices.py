"""Slices: which part of a full tensor a rank owns, putting it there, and putting the parts together again.

A parameter is a plain tensor, a DTensor on one model-parallel axis, a DTensor that FSDP2 cut (over one axis, or
replicated over another one and cut), or both: FSDP2 cuts the part that the model-parallel axis left, which torch writes
as a strided shard on the storage axis. Dim 0 need not divide evenly over the storage axis.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def owned_slice(parameter: Tensor, full: Tensor) -> Tensor:
    """Return the part of ``full`` (the whole tensor, same on every rank) that this rank's ``parameter`` holds, as a view.

    The shape is that of the local tensor: empty along the cut dim on ranks for which nothing is left.
    """
    if not isinstance(parameter, DTensor):
        return full
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not on the parameter's mesh"
    for axis in _cutting_order(parameter):
        dim = parameter.placements[axis].dim  # type: ignore[attr-defined]
        full = _chunk(full, dim, parts=parameter.device_mesh.size(axis), index=coordinate[axis])
    return full


def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy the owned part of ``full`` into ``parameter`` in place, cast to its dtype; ``full`` has the global shape."""
    assert parameter.shape == full.shape, f"{tuple(parameter.shape)} is not {tuple(full.shape)}"
    assert not parameter.is_meta, "a parameter on the meta device holds nothing"
    with torch.no_grad():
        _local(parameter).copy_(owned_slice(parameter, full))


def assemble(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a parameter or a gradient on every rank; all ranks of its mesh must take part.

    The result is detached. Of a plain tensor it is the tensor itself, not a copy.
    """
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _cutting_order(parameter: DTensor) -> list[int]:
    """Return the mesh dims that cut the tensor, first cut first: a strided shard cuts what the others left."""
    plain = [axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, Shard)]
    strided = [axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, _StridedShard)]
    return plain + strided


def _chunk(tensor: Tensor, dim: int, *, parts: int, index: int) -> Tensor:
    """Return piece ``index`` of ``parts``, all but the last ones of size ``ceil(size / parts)``, as FSDP2 cuts."""
    size = tensor.shape[dim]
    step = -(-size // parts)
    start = min(index * step, size)
    return tensor.narrow(dim, start, min(step, size - start))
