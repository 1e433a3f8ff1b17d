"""Running transforms: from tensors as Hugging Face's model holds them to the tensor that our component holds, and back.

A parameter has one strand for each of Hugging Face's tensors that it is made of. Forward, blocks (parts of Hugging Face's
tensor, as views of a file) become blocks of the component's, and nothing is read; ``inverse`` takes a strand's tensor out of
the whole one and restores every bit (``AddScalar`` restores what rounding left).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import attrs
from torch import Tensor

from hp_core.contracts.transform import AddScalar, Join, Transform, Transpose, Unflatten

Shape = tuple[int, ...]


@attrs.frozen
class Within:
    """The tensor is the part of a larger one that begins at ``start`` of ``dim`` and is ``size`` long."""

    dim: int
    start: int
    size: int


Step = Unflatten | Transpose | AddScalar | Within


@attrs.frozen(kw_only=True)
class Strand:
    """The steps from one of Hugging Face's tensors to the parameter.

    ``source`` is its path below the component; None if it is called like the parameter, as all are that are not joined.
    """

    source: str | None
    steps: tuple[Step, ...]


@attrs.frozen(eq=False)
class Block:
    """A part of a tensor: what it holds from ``start`` on is ``tensor`` plus each of ``offsets`` in turn."""

    tensor: Tensor
    start: Shape
    offsets: tuple[float, ...] = ()


def strands(transforms: Sequence[Transform], shape: Shape) -> tuple[Strand, ...]:
    """Return the strands of a parameter of (the component's) ``shape``, in the order in which it joins them."""
    before: list[Step] = []
    for place, step in enumerate(transforms):
        if isinstance(step, Join):
            after = _without_join(transforms[place + 1 :])
            return tuple(_joined(step, before, after, source_shape(after, shape)))
        before.append(step)
    return (Strand(source=None, steps=tuple(before)),)


def forward(steps: Sequence[Step], blocks: Iterable[Block], *, shape: Shape) -> Iterator[Block]:
    """Yield the blocks of the component's tensor, of ``shape``, that blocks of Hugging Face's become; all views."""
    shapes = [shape]
    for step in reversed(steps):
        shapes.append(_inverse_shape(shapes[-1], step))
    for step, made in zip(steps, reversed(shapes[:-1]), strict=True):
        blocks = itertools.chain.from_iterable([_moved(block, step, made) for block in blocks])
    yield from blocks


def inverse(steps: Sequence[Step], tensor: Tensor) -> Tensor:
    """Return Hugging Face's tensor of a strand, out of the component's whole one; a view where the steps allow it."""
    return functools.reduce(_inverse, reversed(steps), tensor)


def inverse_gradient(steps: Sequence[Step], gradient: Tensor) -> Tensor:
    """Return the gradient with respect to Hugging Face's tensor, given that of ours: offsets have derivative one."""
    return inverse([step for step in steps if not isinstance(step, AddScalar)], gradient)


def source_shape(steps: Sequence[Step], shape: Shape) -> Shape:
    """Return the shape that Hugging Face's model has where ours has ``shape``."""
    return functools.reduce(_inverse_shape, reversed(steps), shape)


def _without_join(transforms: Sequence[Transform]) -> tuple[Step, ...]:
    return tuple(step for step in transforms if not isinstance(step, Join))


def _joined(join: Join, before: Sequence[Step], after: Sequence[Step], whole: Shape) -> Iterator[Strand]:
    """Yield a strand for each part of a tensor that has the shape ``whole`` once it is joined."""
    rest = whole[join.dim] - sum(size for size in join.parts.values() if size > 0)
    start = 0
    for source, declared in join.parts.items():
        size = declared if declared > 0 else rest
        yield Strand(source=source, steps=(*before, Within(join.dim, start, size), *after))
        start += size


def _moved(block: Block, step: Step, made: Shape) -> Iterator[Block]:
    """Yield what a block becomes by a step that makes a tensor of the shape ``made``."""
    match step:
        case AddScalar(value):
            yield attrs.evolve(block, offsets=(*block.offsets, value))
        case Transpose(one, other):
            yield attrs.evolve(block, tensor=block.tensor.transpose(one, other), start=_exchanged(block.start, one, other))
        case Within(dim, start, _):
            yield attrs.evolve(block, start=(*block.start[:dim], block.start[dim] + start, *block.start[dim + 1 :]))
        case Unflatten(dim, sizes):
            for box in _boxes(block.start[dim], block.tensor.shape[dim], made[dim : dim + len(sizes)]):
                part = block.tensor.narrow(dim, box.offset, math.prod(box.sizes)).unflatten(dim, box.sizes)
                yield attrs.evolve(block, tensor=part, start=(*block.start[:dim], *box.start, *block.start[dim + 1 :]))


@attrs.frozen(kw_only=True)
class _Box:
    """A box of several dims that is a run of the flattened one; ``offset`` counts from the first element asked for."""

    offset: int
    start: Shape
    sizes: Shape


def _boxes(first: int, length: int, sizes: Shape) -> Iterator[_Box]:
    """Yield the boxes of dims ``sizes`` that together are ``length`` elements of the flattened dim from ``first`` on."""
    if len(sizes) == 1:
        yield _Box(offset=0, start=(first,), sizes=(length,))
        return
    row, at, end = math.prod(sizes[1:]), first, first + length
    while at < end:
        index, column = divmod(at, row)
        rows = (end - at) // row
        if column == 0 and rows:
            yield _Box(offset=at - first, start=(index, *(0 for _ in sizes[1:])), sizes=(rows, *sizes[1:]))
            at += rows * row
            continue
        part = min(row - column, end - at)
        for box in _boxes(column, part, sizes[1:]):
            yield _Box(offset=at - first + box.offset, start=(index, *box.start), sizes=(1, *box.sizes))
        at += part


def _inverse(tensor: Tensor, step: Step) -> Tensor:
    match step:
        case Unflatten(dim, sizes):
            return tensor.flatten(dim, dim + len(sizes) - 1)
        case Transpose(one, other):
            return tensor.transpose(one, other)
        case Within(dim, start, size):
            return tensor.narrow(dim, start, size)
        case AddScalar(value):
            return tensor - value


def _inverse_shape(shape: Shape, step: Step) -> Shape:
    match step:
        case Unflatten(dim, sizes):
            end = dim + len(sizes)
            return (*shape[:dim], math.prod(shape[dim:end]), *shape[end:])
        case Transpose(one, other):
            return _exchanged(shape, one, other)
        case Within(dim, _, size):
            return (*shape[:dim], size, *shape[dim + 1 :])
        case AddScalar():
            return shape


def _exchanged(shape: Shape, one: int, other: int) -> Shape:
    found = list(shape)
    found[one], found[other] = found[other], found[one]
    return tuple(found)
