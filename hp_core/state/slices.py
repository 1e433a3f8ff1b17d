"""Slices: which part of a full tensor a rank owns, putting it there, and putting the parts together again.

A parameter is a plain tensor, a DTensor on one model-parallel axis, a DTensor that FSDP2 cut (over one axis, or
replicated over another one and cut), or both: FSDP2 cuts the part that the model-parallel axis left, which torch writes
as a strided shard on the storage axis. Dim 0 need not divide evenly over the storage axis.
"""

from __future__ import annotations

import functools

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_core.state.transforms import Block


def owned_region(parameter: Tensor) -> tuple[list[int], list[int]]:
    """Return start and size per dim of the box of the whole tensor that this rank's ``parameter`` holds."""
    start = [0] * parameter.dim()
    sizes = list(parameter.shape)
    for cut in _cuts(parameter) if isinstance(parameter, DTensor) else ():
        start[cut.dim] += min(cut.rank * cut.step, cut.size)
        sizes[cut.dim] = cut.length
    return start, sizes


def owned_slice(parameter: Tensor, full: Tensor) -> Tensor:
    """Return the part of ``full`` (the whole tensor, same on every rank) that this rank's ``parameter`` holds, as a view.

    The shape is that of the local tensor: empty along the cut dim on ranks for which nothing is left.
    """
    for dim, (start, size) in enumerate(zip(*owned_region(parameter), strict=True)):
        full = full.narrow(dim, start, size)
    return full


def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy the owned part of ``full`` into ``parameter`` in place, cast to its dtype; ``full`` has the global shape."""
    assert parameter.shape == full.shape, f"{tuple(parameter.shape)} is not {tuple(full.shape)}"
    assert not parameter.is_meta, "a parameter on the meta device holds nothing"
    with torch.no_grad():
        _local(parameter).copy_(owned_slice(parameter, full))


def fill(parameter: Tensor, block: Block) -> None:
    """Copy what this rank owns of a block of the whole tensor into ``parameter``, cast to its dtype before offsets are added.

    Nothing else of the block is read.
    """
    assert not parameter.is_meta, "a parameter on the meta device holds nothing"
    here, there = _local(parameter), block.tensor
    for dim, (start, size) in enumerate(zip(*owned_region(parameter), strict=True)):
        first = max(start, block.start[dim])
        length = min(start + size, block.start[dim] + block.tensor.shape[dim]) - first
        if length <= 0:
            return
        here, there = here.narrow(dim, first - start, length), there.narrow(dim, first - block.start[dim], length)
    with torch.no_grad():
        here.copy_(functools.reduce(torch.add, block.offsets, there.to(here.dtype) if block.offsets else there))


def assemble(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a parameter or a gradient on every rank; all ranks of its mesh must take part.

    The result is detached. Where nothing is cut it shares memory with the tensor. (``DTensor.full_tensor`` gives the same
    values and logs a warning for each strided shard.)
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        part = tensor.to_local()
        for cut in reversed(_cuts(tensor)):
            part = _gather(part, cut)
        return part.detach()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@attrs.frozen(kw_only=True)
class _Cut:
    """One cut of a tensor: ``dim`` of ``size`` among ``parts`` ranks, ``step`` rows each as long as there are any left."""

    dim: int
    size: int
    parts: int
    rank: int
    group: dist.ProcessGroup

    @property
    def step(self) -> int:
        return -(-self.size // self.parts)

    @property
    def length(self) -> int:
        """Rows that this rank gets."""
        return max(0, min(self.step, self.size - self.rank * self.step))


def _cuts(tensor: DTensor) -> list[_Cut]:
    """Return the cuts that lead from the whole tensor to this rank's, first cut first."""
    mesh, coordinate, shape = tensor.device_mesh, tensor.device_mesh.get_coordinate(), list(tensor.shape)
    assert coordinate is not None, "this rank is not on the tensor's mesh"
    cuts = []
    for axis, dim in _cutting_order(tensor):
        group = mesh.get_group(axis)
        cuts.append(_Cut(dim=dim, size=shape[dim], parts=mesh.size(axis), rank=coordinate[axis], group=group))
        shape[dim] = cuts[-1].length
    return cuts


def _cutting_order(tensor: DTensor) -> list[tuple[int, int]]:
    """Return (mesh dim, tensor dim) of every cut in order: a strided shard cuts what the other axes left."""
    placements = [(axis, placement) for axis, placement in enumerate(tensor.placements) if tensor.device_mesh.size(axis) > 1]
    for _, placement in placements:
        assert isinstance(placement, Replicate | Shard | _StridedShard), f"{placement} cannot be put together"
    plain = [(axis, placement.dim) for axis, placement in placements if isinstance(placement, Shard)]
    return plain + [(axis, placement.dim) for axis, placement in placements if isinstance(placement, _StridedShard)]


def _gather(part: Tensor, cut: _Cut) -> Tensor:
    """Undo one cut: all ranks of its group send their rows, padded to the same number."""
    padded = part.new_zeros([*part.shape[: cut.dim], cut.step, *part.shape[cut.dim + 1 :]])
    padded.narrow(cut.dim, 0, cut.length).copy_(part)
    found = [torch.empty_like(padded) for _ in range(cut.parts)]
    dist.all_gather(found, padded, group=cut.group)
    return torch.cat(found, cut.dim).narrow(cut.dim, 0, cut.size)
