"""Packed documents: where each begins and ends in the whole row, known on every rank.

Legend: B batch, S whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hp_core.mesh.sequence import Span

Spans = tuple[Span, ...]


class Documents:
    """The documents of each row, read on the host once for every tensor of ids: all layers of a step ask for the same.

    ``gather`` returns the ids of the whole row, in global order, for those of this rank; ranks call it together.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        self._gather = gather
        self._known = WeakIdKeyDictionary()

    def of(self, ids: Tensor) -> tuple[Spans, ...]:
        """Return the spans of the documents of each row of ``ids`` [B, tokens here]; documents are runs of equal ids."""
        version, found = self._known.get(ids, (None, ()))
        if version != ids._version:
            found = tuple(_spans(row) for row in self._gather(ids))
            self._known[ids] = (ids._version, found)
        return found


def _spans(ids: Tensor) -> Spans:
    lengths: list[int] = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return tuple((end - length, end) for end, length in zip(ends, lengths, strict=True))
