"""What travels over cp, each with its exact adjoint: keys to those who see them, and heads for tokens.

Everything works on local tensors. Sums of gradients are accumulated in at least fp32, in order of rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_context_parallel.rectangles import Run, merged, runs, visible
from hp_core.applier.collectives import reduce_scatter
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup
from hp_core.mesh.sequence import Span


@attrs.frozen
class Needs:
    """Who needs which of whose tokens, from every rank's spans of queries and of keys, the same on every rank.

    ``send``: for every rank, the runs of this rank's memory that it needs. ``receive``: for every rank, the runs of its memory
    that this rank needs. Those of this rank itself are among both. ``spans``: all tokens needed here, in global order.
    """

    axis: AxisGroup
    send: tuple[tuple[Run, ...], ...]
    receive: tuple[tuple[Run, ...], ...]
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, places: Sequence[Sequence[Span]], *, axis: AxisGroup, window: int | None) -> Needs:
        """Return the needs of a causal mask; ``places`` are the spans that each rank holds."""
        here = places[axis.rank]
        send = tuple(_needed(there, here, window=window) for there in places)
        receive = tuple(_needed(here, there, window=window) for there in places)
        return cls(axis, send, receive, merged([(run.start, run.stop) for runs in receive for run in runs]))

    @property
    def arriving(self) -> list[int]:
        """Number of tokens that come from every rank; 0 from this one."""
        return self._elsewhere(self.receive)

    @property
    def leaving(self) -> list[int]:
        """Number of tokens that go to every rank; 0 to this one."""
        return self._elsewhere(self.send)

    def _elsewhere(self, runs: Sequence[Sequence[Run]]) -> list[int]:
        return [0 if rank == self.axis.rank else sum(run.length for run in part) for rank, part in enumerate(runs)]


def _needed(queries: Sequence[Span], keys: Sequence[Span], *, window: int | None) -> tuple[Run, ...]:
    """Return the runs of a rank that holds ``keys`` which some of ``queries`` sees, in global order."""
    parts = [run.part(*span) for run in runs(keys) for span in visible(queries, keys, window=window)]
    return tuple(sorted((part for part in parts if part.length), key=lambda part: part.start))


def gather_visible(tensors: Sequence[Tensor], *, dim: int, needs: Needs) -> tuple[Tensor, ...]:
    """Return, for each of ``tensors``, the tokens of all ranks that this rank sees, along ``dim`` in global order.

    All travel together, and to nobody who does not see them. The backward sends every gradient home and adds it up.
    """
    if needs.axis.size == 1:
        return tuple(tensors)
    flat = [tensor.movedim(dim, 0) for tensor in tensors]
    rows = torch.cat([tensor.flatten(1) for tensor in flat], 1)
    arrived: Tensor = _GatherVisible.apply(rows, needs)
    widths = [tensor[0].numel() for tensor in flat]
    parts = zip(arrived.split(widths, 1), flat, strict=True)
    return tuple(part.unflatten(1, tensor.shape[1:]).movedim(0, dim) for part, tensor in parts)


class _GatherVisible(torch.autograd.Function):
    """Rows [tokens here, width] -> rows [tokens seen, width] in global order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, needs: Needs) -> Tensor:
        ctx.needs, ctx.held = needs, rows.shape[0]
        mine = needs.axis.rank
        sent = _joined([rows[run.slice] for run in _foreign(needs.send, mine)], like=rows)
        arrived = rows.new_empty(sum(needs.arriving), rows.shape[1])
        needs.axis.all_to_all(arrived, sent, receive=needs.arriving, send=needs.leaving)
        foreign = _foreign(needs.receive, mine)
        pieces = [*zip(foreign, arrived.split([run.length for run in foreign]), strict=True)]
        pieces += [(run, rows[run.slice]) for run in needs.receive[mine]]
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda item: item[0].start)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        needs, mine = ctx.needs, ctx.needs.axis.rank
        places = runs(needs.spans)
        sent = _joined([gradient[_found(places, run).slice] for run in _foreign(needs.receive, mine)], like=gradient)
        arrived = gradient.new_empty(sum(needs.leaving), gradient.shape[1])
        needs.axis.all_to_all(arrived, sent, receive=needs.leaving, send=needs.arriving)
        total = gradient.new_zeros(ctx.held, gradient.shape[1], dtype=torch.promote_types(gradient.dtype, torch.float32))
        offset = 0
        for rank, parts in enumerate(needs.send):
            for run in parts:
                if rank == mine:
                    total[run.slice] += gradient[_found(places, run).slice]
                    continue
                total[run.slice] += arrived[offset : offset + run.length]
                offset += run.length
        return total.to(gradient.dtype), None


def _foreign(parts: Sequence[Sequence[Run]], mine: int) -> list[Run]:
    return [run for rank, runs in enumerate(parts) if rank != mine for run in runs]


def _joined(pieces: Sequence[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat(list(pieces)) if pieces else like[:0]


def _found(places: Sequence[Run], run: Run) -> Run:
    """Return where the tokens of ``run`` lie in a memory that holds ``places``."""
    return next(place for place in places if place.start <= run.start < place.stop).part(run.start, run.stop)


def exchange(x: Tensor, *, cut: int, join: int, axis: AxisGroup) -> Tensor:
    """Return ``x`` whole along dim ``join`` for a part of dim ``cut``: part r of ``cut`` goes to rank r; its own adjoint.

    HP550 if ``cut`` does not divide by the degree.
    """
    if axis.size == 1:
        return x
    if x.shape[cut] % axis.size:
        what = f"dim {cut} of a tensor of shape {tuple(x.shape)} cannot be cut into {axis.size} equal parts"
        raise PlanError("HP550", what, expected=f"a size divisible by {axis.name} = {axis.size}")
    return _Exchange.apply(x, cut % x.dim(), join % x.dim(), axis)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, axis: AxisGroup) -> Tensor:
        ctx.cut, ctx.join, ctx.axis = cut, join, axis
        return _exchanged(x, cut, join, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.join, ctx.cut, ctx.axis), None, None, None


def _exchanged(x: Tensor, cut: int, join: int, axis: AxisGroup) -> Tensor:
    outgoing = x.unflatten(cut, (axis.size, -1)).movedim(cut, 0).contiguous()
    arrived = torch.empty_like(outgoing)
    axis.all_to_all(arrived, outgoing)
    return arrived.movedim(0, join).flatten(join, join + 1)


def shift(tensors: Sequence[Tensor], *, axis: AxisGroup) -> Handle:
    """Start sending ``tensors`` to the next rank of the ring, and receiving as many of the same shape from the one before."""
    arriving = [torch.empty_like(tensor) for tensor in tensors]
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    swaps = []
    for ours, theirs in zip(tensors, arriving, strict=True):
        swaps.append(dist.P2POp(dist.isend, ours, group=axis.group, group_peer=after))
        swaps.append(dist.P2POp(dist.irecv, theirs, group=axis.group, group_peer=before))
    return Handle(dist.batch_isend_irecv(swaps), arriving, list(tensors))


class Handle:
    """Something on its way. ``wait()`` returns what arrived, once."""

    def __init__(self, works: Sequence[dist.Work], arriving: list[Tensor], kept: Sequence[Tensor] = ()) -> None:
        self._works, self._arriving, self._kept = works, arriving, kept
        self._done = False

    def wait(self) -> list[Tensor]:
        """Return the tensors when they are there; a second call is HP550."""
        if self._done:
            raise PlanError("HP550", "a handle is waited for twice", expected="one wait() for one launch")
        self._done = True
        for work in self._works:
            work.wait()
        return self._arriving


class Gather:
    """The whole of a tensor that is cut along ``dim``, on its way; ``order`` puts what lies rank after rank in order."""

    def __init__(self, tensor: Tensor, *, dim: int, axis: AxisGroup, order: Callable[[Tensor], Tensor]) -> None:
        self._dim, self._order = dim % tensor.dim(), order
        self._works: list[dist.Work] = []
        self._parts = tensor.unsqueeze(0) if axis.size == 1 else _Launch.apply(tensor, axis, self._works)
        self._handle = Handle(self._works, [self._parts])

    def wait(self) -> Tensor:
        """Return the whole tensor when it is there; a second call is HP550."""
        (parts,) = self._handle.wait()
        return self._order(parts.movedim(0, self._dim).flatten(self._dim, self._dim + 1))


class _Launch(torch.autograd.Function):
    """[..] -> [degree, ..], there when the work is done; the backward adds up every rank's gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup, works: list[dist.Work]) -> Tensor:
        ctx.axis = axis
        parts = x.new_empty((axis.size, *x.shape))
        ctx.sent = x.contiguous()  # alive until it has left
        if axis.shared is not None:
            axis.all_gather(parts, ctx.sent)
        else:
            works.append(dist.all_gather_single(parts.view(-1), ctx.sent.view(-1), group=axis.group, async_op=True))
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradient.flatten(0, 1), dim=0, axis=ctx.axis), None, None
