"""What travels over ep: rows, and behind each rank's rows the numbers that belong to them, packed into rows as bits.

So both share one collective whatever their dtypes are. Legend: D ranks of the group, U rows, P pairs (a row and one of its
experts), X rows of a buffer (packed ones included), H hidden, C elements of a buffer that a pair's numbers take.
"""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup


@attrs.frozen(kw_only=True, eq=False)
class Traffic:
    """What one rank sends to (or gets from) each of the group: ``rows`` and ``pairs``, by rank, on the host and as tensors."""

    rows: tuple[int, ...]
    pairs: tuple[int, ...]
    rows_D: Tensor
    pairs_D: Tensor

    def packing(self, *, elements: int, width: int) -> Packing:
        """Return where rows of ``width`` and ``elements`` numbers a pair lie in a buffer."""
        extra = [-(-pairs * elements // width) for pairs in self.pairs]
        extra_D = (self.pairs_D * elements + width - 1) // width
        size_D = self.rows_D + extra_D
        peer_U, peer_P = _peers(self.rows_D, sum(self.rows)), _peers(self.pairs_D, sum(self.pairs))
        place_U = _count(peer_U) + (extra_D.cumsum(0) - extra_D)[peer_U]
        begin_D = (size_D.cumsum(0) - extra_D) * width - (self.pairs_D.cumsum(0) - self.pairs_D) * elements
        first_P = _count(peer_P) * elements + begin_D[peer_P]
        return Packing(
            splits=[rows + more for rows, more in zip(self.rows, extra, strict=True)],
            size_D=size_D,
            place_U=place_U,
            element_PC=first_P.unsqueeze(1) + torch.arange(elements, device=first_P.device),
        )

    def pair_ends(self) -> Tensor:
        """Return the end [D] of each rank's pairs."""
        return self.pairs_D.cumsum(0)


@attrs.frozen(kw_only=True, eq=False)
class Packing:
    """A buffer [X, H]: how many of its rows belong to each rank (on the host and as a tensor), where a row is, and the flat
    elements of a pair's numbers.
    """

    splits: list[int]
    size_D: Tensor
    place_U: Tensor
    element_PC: Tensor

    @property
    def size(self) -> int:
        """The number X of rows."""
        return sum(self.splits)

    def write(self, buffer_XH: Tensor, numbers_PN: Tensor) -> None:
        """Put the bits of ``numbers_PN`` into their place."""
        buffer_XH.view(-1)[self.element_PC.view(-1)] = numbers_PN.view(buffer_XH.dtype).view(-1)

    def read(self, buffer_XH: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what the sender wrote, [P, N] of ``dtype``."""
        return buffer_XH.view(-1)[self.element_PC.view(-1)].view(self.element_PC.shape).view(dtype)


def elements_of(numbers: int, dtype: torch.dtype, *, wire: torch.dtype) -> int:
    """Return how many elements of ``wire`` hold ``numbers`` numbers of ``dtype``."""
    return numbers * dtype.itemsize // wire.itemsize


def exchange(rows_XH: Tensor, *, send: list[int], receive: list[int], axis: AxisGroup, spare: int = 0) -> Tensor:
    """Return what the ranks sent to this one, in their order, with ``spare`` uninitialised rows behind it."""
    arrived = rows_XH.new_empty((sum(receive) + spare, *rows_XH.shape[1:]))
    target = arrived[: sum(receive)]
    if axis.group is None:
        target.copy_(rows_XH)
    else:
        axis.all_to_all(target, rows_XH, receive=receive, send=send)
    return arrived


def exchange_counts(counts_DN: Tensor, *, axis: AxisGroup) -> Tensor:
    """Return row by row what the ranks counted for this one."""
    if axis.group is None:
        return counts_DN.clone()
    arrived = torch.empty_like(counts_DN)
    axis.all_to_all(arrived, counts_DN)
    return arrived


def check_backend(axis: AxisGroup, *, device: torch.device, name: str) -> None:
    """Ask the group's backend for an exchange of unequal parts; HP580 if it refuses or gives something else.

    Rank r sends r + 1 numbers to each. A group whose backend moves nothing (``fake``) is not asked.
    """
    if axis.group is None or dist.get_backend(axis.group) == "fake":
        return
    sizes = [rank + 1 for rank in range(axis.size)]
    sent = torch.full(((axis.rank + 1) * axis.size,), axis.rank, device=device)
    try:
        arrived = exchange(sent, send=[axis.rank + 1] * axis.size, receive=sizes, axis=axis)
    except (RuntimeError, ValueError) as error:
        raise _refused(axis, f"refuses it: {error}", name=name) from error
    expected = torch.arange(axis.size).repeat_interleave(torch.tensor(sizes)).tolist()
    if arrived.tolist() != expected:
        raise _refused(axis, f"gives {arrived.tolist()} for {expected}", name=name)


def _refused(axis: AxisGroup, how: str, *, name: str) -> PlanError:
    backend = dist.get_backend(axis.group)
    what = f"protocol ep:{name} needs an all_to_all of unequal parts, and {backend} {how}"
    return PlanError("HP580", what, expected="a backend that can", where=f"ep ({axis.size})")


def _peers(sizes_D: Tensor, total: int) -> Tensor:
    """Return for each of ``total`` things the rank that it belongs to; nothing waits for the device."""
    return torch.arange(sizes_D.shape[0], device=sizes_D.device).repeat_interleave(sizes_D, output_size=total)


def _count(like: Tensor) -> Tensor:
    return torch.arange(like.shape[0], device=like.device)
