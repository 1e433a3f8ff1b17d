"""Placements: how one tensor lies on one mesh axis. Torch-free; only the applier converts them to torch's."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

AXES = ("tp", "cp", "ep")  # the axes a layout may name; storage axes are FSDP's business


@attrs.frozen
class Shard:
    """Each rank of the axis holds an equal, contiguous slice of ``dim`` (``dim >= 0``)."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@attrs.frozen
class Replicate:
    """Each rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "Replicate"


@attrs.frozen
class Partial:
    """Each rank of the axis holds a summand; the tensor is their sum."""

    def __str__(self) -> str:
        return "Partial"


Placement = Shard | Replicate | Partial
Layout = Mapping[str, Placement]  # axis -> placement; a missing axis means Replicate


@attrs.frozen
class HeadSlice:
    """A replicated parameter of which a rank computes with one of ``parts`` equal slices of ``dim``.

    Rank ``r`` of ``n`` sees slice ``r * parts // n`` (``n % parts == 0``): the key and value projections when there are
    fewer key-value heads than tensor-parallel ranks. The other slices get a zero gradient, so the gradient is Partial.
    """

    dim: int
    parts: int


@attrs.frozen
class FirstRank:
    """A replicated parameter that is added inside a body whose output is Partial: rank 0 sees it, the others see zeros.

    The exit's sum then adds it exactly once: the bias of a row-wise linear layer. Its gradient is Partial.
    """


View = HeadSlice | FirstRank


def placement_of(layout: Layout, axis: str) -> Placement:
    """Return the placement on ``axis``; a missing axis means Replicate."""
    return layout.get(axis, Replicate())


def describe(layout: Layout) -> str:
    """Return ``"tp=Shard(0) cp=Replicate"``, axes in the order of :data:`AXES`."""
    return " ".join(f"{axis}={layout[axis]}" for axis in AXES if axis in layout) or "Replicate"
