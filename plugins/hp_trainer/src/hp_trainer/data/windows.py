"""Which tokens make batch k: the order of the data, as arithmetic on ints. Torch-free.

Window w of a row of N tokens is ``tokens[w * S : w * S + S + 1]`` with S the sequence length: inputs are all but its last
token, labels all but its first, so neighbours share one token and every token but the first is predicted exactly once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import lru_cache

import attrs


def window_count(tokens: int, *, sequence: int) -> int:
    """Return how many whole windows of ``sequence + 1`` tokens a row of ``tokens`` holds."""
    return max(tokens - 1, 0) // sequence


@lru_cache(maxsize=2)
def permutation(windows: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """Return ``range(windows)`` sorted by one uniform draw each, of a generator seeded with the text ``"seed:epoch"``."""
    generator = random.Random(f"{seed}:{epoch}")
    draws = [generator.random() for _ in range(windows)]
    return tuple(sorted(range(windows), key=draws.__getitem__))


@attrs.frozen(kw_only=True)
class WindowOrder:
    """The endless order in which ``windows`` windows are read: epoch after epoch, batch after batch, for every mesh alike.

    Batch k is positions ``k * batch`` to ``(k + 1) * batch - 1``; position p is entry ``p % windows`` of epoch
    ``p // windows``, so a batch may end one epoch and begin the next. An epoch is file order, or with ``shuffle`` its own
    permutation.
    """

    windows: int
    batch: int
    seed: int
    shuffle: bool

    def batch_windows(self, k: int) -> list[int]:
        """Return the windows of global batch ``k`` (from 0), in row order."""
        return [self._window(position) for position in range(k * self.batch, (k + 1) * self.batch)]

    def _window(self, position: int) -> int:
        epoch, entry = divmod(position, self.windows)
        return permutation(self.windows, seed=self.seed, epoch=epoch)[entry] if self.shuffle else entry


def rank_rows(rows: int, *, rank: int, size: int) -> range:
    """Return the rows of a global batch that data rank ``rank`` of ``size`` reads: one contiguous part each."""
    share = rows // size
    return range(rank * share, (rank + 1) * share)


def micro_batches(rows: Iterable[int], *, size: int) -> list[list[int]]:
    """Return ``rows`` cut into consecutive parts of ``size`` (the last one may be shorter)."""
    listed = list(rows)
    return [listed[first : first + size] for first in range(0, len(listed), size)]
