"""How a sequence lies over the ranks of cp: the order of tokens, as arithmetic on ints. Torch-free.

- ``contiguous``: rank r holds the r-th of cp equal parts.
- ``zigzag``: the sequence is cut into 2 x outer chunks, and outer rank r holds chunks r and 2 x outer - 1 - r, so that every
  rank has as many causal pairs. Each outer part (its two chunks, one after the other) is cut contiguously over the inner ranks.

``inner`` is the degree of the inner sub-axis of cp (1 without one); neighbours in rank are neighbours on the inner axis.
"""

from __future__ import annotations

import math
from typing import Literal

SequenceLayout = Literal["contiguous", "zigzag"]
Span = tuple[int, int]  # first token, and one past the last


def sequence_parts(*, cp: int, layout: SequenceLayout | None, inner: int = 1) -> int:
    """Return the number that a sequence's length must be divisible by."""
    if layout != "zigzag" or cp == 1:
        return cp
    return cp // inner * math.lcm(2, inner)


def sequence_spans(length: int, *, cp: int, rank: int, layout: SequenceLayout | None, inner: int = 1) -> tuple[Span, ...]:
    """Return the spans of a sequence of ``length`` tokens that cp rank ``rank`` holds, in the order it holds them.

    ``length`` must be divisible by :func:`sequence_parts`.

    Example::

        >>> sequence_spans(8, cp=2, rank=1, layout="zigzag")
        ((2, 4), (4, 6))
    """
    share = length // cp
    if layout != "zigzag" or cp == 1:
        return ((rank * share, (rank + 1) * share),)
    outer, place = cp // inner, rank % inner
    chunk, part = length // (2 * outer), rank // inner
    starts = (part * chunk, (2 * outer - 1 - part) * chunk)
    return tuple(
        (start + max(0, low), start + min(chunk, high))
        for start, low, high in (
            (start, place * share - half * chunk, (place + 1) * share - half * chunk) for half, start in enumerate(starts)
        )
        if low < chunk and high > 0
    )
