"""ring: blocks of keys and values go round; each is attended to while the next is on its way.

Legend: B batch, N query heads, S tokens of this rank, D head dim, V value width, L log-sum-exp over all keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_context_parallel.blocks import Kernel, Rows, compute, merge
from hp_context_parallel.context import Context, rows_of
from hp_context_parallel.documents import Spans
from hp_context_parallel.rectangles import runs
from hp_context_parallel.transport import shift
from hp_core.contracts import KeyValue
from hp_core.mesh.context import AxisGroup
from hp_core.mesh.sequence import Span


class Ring(Context):
    """Only two blocks of keys are here at a time. The backward sends them round again, their gradients behind them."""

    def attend(
        self, query: Tensor, kv: KeyValue, *, window: int | None, documents: tuple[Spans, ...] | None, kernel: Kernel
    ) -> Tensor:
        """Return [B, N, S, V]."""
        places = self.places(query.shape[2])
        return in_ring(query, kv, places=places, axis=self.axis, window=window, documents=documents, kernel=kernel)


def in_ring(
    query: Tensor,
    kv: KeyValue,
    *,
    places: Sequence[Sequence[Span]],
    axis: AxisGroup,
    window: int | None,
    documents: tuple[Spans, ...] | None,
    kernel: Kernel,
) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks of ``axis``, whose tokens lie as ``places`` say."""
    here = runs(places[axis.rank])
    rows = tuple(rows_of(here, runs(place), window=window, documents=documents) for place in places)
    turn = _Turn(kv=attrs.evolve(kv, compact=(), weights=()), parts=len(kv.compact), axis=axis, rows=rows, kernel=kernel)
    out: Tensor = _Ring.apply(turn, query, *kv.compact, *kv.weights)
    return out


@attrs.frozen(kw_only=True, eq=False)
class _Turn:
    """One attention: ``kv`` without its tensors, of which the first ``parts`` travel, and each rank's rectangles."""

    kv: KeyValue
    parts: int
    axis: AxisGroup
    rows: tuple[Rows, ...]
    kernel: Kernel

    def blocks(self, own: Sequence[Tensor]) -> Iterator[tuple[Rows, Sequence[Tensor]]]:
        """Yield the rectangles and the tensors of every rank's block, this one's first; the next one travels meanwhile."""
        block = [tensor.contiguous() for tensor in own]
        for step in range(self.axis.size):
            sent = shift(block, axis=self.axis) if step + 1 < self.axis.size else None
            yield self.rows[(self.axis.rank - step) % self.axis.size], block
            if sent is not None:
                block = sent.wait()

    def computed(self, query: Tensor, block: Sequence[Tensor], weights: Sequence[Tensor], rows: Rows) -> list[_Part]:
        """Return what every rectangle of a block gives; nothing is expanded where the block is hidden."""
        if not any(rectangles for _, rectangles in rows):
            return []
        key, value = self.kv.expand(*block, *weights)
        found = []
        for row, rectangles in rows:
            tensors = [tensor[row] for tensor in (query, key, value)]
            for rectangle in rectangles:
                out, lse = compute(*tensors, rectangle=rectangle, kernel=self.kernel)
                found.append(_Part((row, slice(None), rectangle.queries.slice), out, lse))
        return found


@attrs.frozen
class _Part:
    """The output and log-sum-exp of the queries at ``place`` over some keys."""

    place: tuple[slice, slice, slice]
    out: Tensor
    lse: Tensor


class _Ring(torch.autograd.Function):
    """The backward computes each block again: with ``w = exp(lse - L)`` its output's gradient is ``w g`` and its
    log-sum-exp's ``w g . (out - total)``, which no other block is needed for.
    """

    @staticmethod
    def forward(ctx: Any, turn: _Turn, query: Tensor, *tensors: Tensor) -> Tensor:
        own, weights = tensors[: turn.parts], tensors[turn.parts :]
        total: Tensor | None = None
        lse: Tensor | None = None
        for rows, block in turn.blocks(own):
            for part in turn.computed(query, block, weights, rows):
                if total is None or lse is None:
                    total, lse = _nothing(query, part)
                before = (total[part.place], lse[part.place])
                total[part.place], lse[part.place] = merge([before, (part.out, part.lse)])
        assert total is not None, "every query sees itself"
        ctx.turn = turn
        ctx.save_for_backward(query, total, lse, *tensors)
        return total.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        turn, (query, total, lse, *tensors) = ctx.turn, ctx.saved_tensors
        own, weights = tensors[: turn.parts], tensors[turn.parts :]
        gradient = gradient.to(total.dtype)
        grad_query, *grad_weights = (_zeros(tensor) for tensor in (query, *weights))
        homeward = _Homeward(turn.axis, own)
        for rows, block in turn.blocks(own):
            leaves = [tensor.detach().requires_grad_() for tensor in (query, *block, *weights)]
            found = _gradients(turn, leaves, rows, total=total, lse=lse, gradient=gradient)
            grad_query += found[0]
            for sum_, part in zip(grad_weights, found[1 + turn.parts :], strict=True):
                sum_ += part
            homeward.add(found[1 : 1 + turn.parts])
        grads = [grad_query, *homeward.home(), *grad_weights]
        return None, *(grad.to(tensor.dtype) for grad, tensor in zip(grads, (query, *tensors), strict=True))


class _Homeward:
    """Gradients of the blocks, which follow them round: what was found of a block goes with it to the next rank, and home.

    The part of this rank's own block, which comes first, stays here.
    """

    def __init__(self, axis: AxisGroup, own: Sequence[Tensor]) -> None:
        self._axis = axis
        self._kept: list[Tensor] = []
        self._sum = [_zeros(tensor) for tensor in own]
        self._step = 0

    def add(self, parts: Sequence[Tensor]) -> None:
        """Take what was found of the next block."""
        if self._step == 0:
            self._kept = list(parts)
        else:
            if self._step > 1:
                self._sum = shift(self._sum, axis=self._axis).wait()
            for sum_, part in zip(self._sum, parts, strict=True):
                sum_ += part
        self._step += 1

    def home(self) -> list[Tensor]:
        """Return the gradient of this rank's own block."""
        arrived = shift(self._sum, axis=self._axis).wait() if self._axis.size > 1 else self._sum
        return [kept + sum_ for kept, sum_ in zip(self._kept, arrived, strict=True)]


def _gradients(
    turn: _Turn, leaves: Sequence[Tensor], rows: Rows, *, total: Tensor, lse: Tensor, gradient: Tensor
) -> list[Tensor]:
    """Return the gradients of query, block and weights through one block; zeros where it is hidden."""
    query, block, weights = leaves[0], leaves[1 : 1 + turn.parts], leaves[1 + turn.parts :]
    with torch.enable_grad():
        parts = turn.computed(query, block, weights, rows)
    if not parts:
        return [torch.zeros_like(leaf) for leaf in leaves]
    outputs, grads = [], []
    for part in parts:
        weight = (part.lse.detach() - lse[part.place]).exp().unsqueeze(-1)
        weighted = weight * gradient[part.place]
        outputs += [part.out, part.lse]
        grads += [weighted.to(part.out.dtype), (weighted * (part.out.detach() - total[part.place])).sum(-1).to(part.lse.dtype)]
    return list(torch.autograd.grad(outputs, leaves, grads, allow_unused=True, materialize_grads=True))


def _nothing(query: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp over no keys, for all queries, in the dtype that parts are merged in."""
    dtype = torch.promote_types(part.out.dtype, torch.float32)
    total = query.new_zeros(*query.shape[:3], part.out.shape[-1], dtype=dtype)
    return total, query.new_full(query.shape[:3], float("-inf"), dtype=part.lse.dtype)


def _zeros(tensor: Tensor) -> Tensor:
    """Return zeros to add gradients up in."""
    return torch.zeros_like(
        tensor, dtype=torch.promote_types(tensor.dtype, torch.float32), memory_format=torch.contiguous_format
    )
