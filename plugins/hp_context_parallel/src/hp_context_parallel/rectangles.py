"""Which parts of a score matrix are computed, as arithmetic on ints: rectangles of queries and keys. Torch-free.

Tokens lie in memory in spans of global places; a rectangle names its queries and keys by where they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from hp_core.mesh.sequence import Span

Kind = Literal["all", "causal", "window"]


@attrs.frozen
class Run:
    """Neighbouring tokens: global places ``start`` to ``stop``, the first at ``offset`` in memory."""

    start: int
    stop: int
    offset: int

    def part(self, start: int, stop: int) -> Run:
        """Return the tokens of this run from global place ``start`` to ``stop``."""
        start, stop = max(self.start, start), min(self.stop, stop)
        return Run(start, max(start, stop), self.offset + start - self.start)

    @property
    def slice(self) -> slice:
        """Where the run lies in memory."""
        return slice(self.offset, self.offset + self.stop - self.start)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@attrs.frozen
class Rectangle:
    """Queries that see keys: ``all`` of them, ``causal`` (the same tokens, square), or those of a ``window`` only."""

    queries: Run
    keys: Run
    kind: Kind
    window: int | None = None


def runs(spans: Sequence[Span]) -> tuple[Run, ...]:
    """Return the runs of spans that lie one after the other in memory."""
    found, offset = [], 0
    for start, stop in spans:
        found.append(Run(start, stop, offset))
        offset += stop - start
    return tuple(found)


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the union of spans, in order, neighbours joined."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif stop > start:
            found.append((start, stop))
    return tuple(found)


def visible(queries: Sequence[Span], keys: Sequence[Span], *, window: int | None) -> tuple[Span, ...]:
    """Return the parts of ``keys`` that some query sees under a causal mask with this window, in order."""
    found = []
    for first, last in queries:
        low = 0 if window is None else max(0, first - window + 1)
        found += [(max(start, low), min(stop, last)) for start, stop in keys if max(start, low) < min(stop, last)]
    return merged(found)


def rectangles(
    queries: Sequence[Run], keys: Sequence[Run], *, window: int | None, documents: Sequence[Span] | None = None
) -> list[Rectangle]:
    """Return the rectangles of a causal mask; tokens see each other within a span of ``documents`` only. None is empty."""
    found: list[Rectangle] = []
    for query in queries:
        for key in keys:
            for query_part, key_part in _by_document(query, key, documents):
                found += _causal(query_part, key_part, window)
    return found


def _by_document(query: Run, key: Run, documents: Sequence[Span] | None) -> Iterator[tuple[Run, Run]]:
    for start, stop in documents if documents is not None else ((0, max(query.stop, key.stop)),):
        parts = query.part(start, stop), key.part(start, stop)
        if all(part.length for part in parts):
            yield parts


def _causal(query: Run, key: Run, window: int | None) -> Iterator[Rectangle]:
    """Yield the keys before all queries, the square of the same tokens, and that square's keys for later queries.

    Queries before the square see none of these keys, and no query sees those behind its run.
    """
    yield from _behind(query, key.part(key.start, query.start), window)
    first, last = max(query.start, key.start), min(query.stop, key.stop)
    if first < last:
        limit = window if window is not None and window < last - first else None
        yield Rectangle(query.part(first, last), key.part(first, last), "causal" if limit is None else "window", limit)
        yield from _behind(query.part(last, query.stop), key.part(first, last), window)


def _behind(query: Run, key: Run, window: int | None) -> Iterator[Rectangle]:
    """Yield the rectangle of keys that lie before every query, trimmed to what the window reaches."""
    if window is not None:
        key = key.part(query.start - window + 1, key.stop)
        query = query.part(query.start, key.stop + window - 1)
    if key.length and query.length:
        whole = window is None or query.stop - 1 - key.start < window
        yield Rectangle(query, key, "all" if whole else "window", None if whole else window)
