"""Rectangles against the mask written out: every visible pair is computed once, every hidden one never."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_context_parallel.rectangles import Rectangle, Run, merged, rectangles, runs, visible
from hp_core.mesh.sequence import Span, sequence_spans

LENGTH = 24


def pairs(rectangle: Rectangle) -> set[tuple[int, int]]:
    """Return the (query, key) pairs that a rectangle computes, by global place."""
    queries, keys = rectangle.queries, rectangle.keys
    every = itertools.product(range(queries.start, queries.stop), range(keys.start, keys.stop))
    if rectangle.kind == "all":
        return set(every)
    window = rectangle.window or LENGTH
    return {(q, k) for q, k in every if k <= q and q - k < window}


def expected(queries: list[Span], keys: list[Span], window: int | None, documents: list[Span]) -> set[tuple[int, int]]:
    places = [set(itertools.chain(*(range(*span) for span in spans))) for spans in (queries, keys)]
    return {
        (q, k)
        for q, k in itertools.product(*places)
        if k <= q and (window is None or q - k < window) and any(a <= q < b and a <= k < b for a, b in documents)
    }


spans_of_ranks = st.sampled_from(
    [
        [list(sequence_spans(LENGTH, cp=cp, rank=rank, layout=layout)) for rank in range(cp)]
        for cp, layout in ((1, "contiguous"), (2, "contiguous"), (3, "contiguous"), (2, "zigzag"), (3, "zigzag"), (4, "zigzag"))
    ]
)
cuts = st.lists(st.integers(1, LENGTH - 1), max_size=5, unique=True)


@settings(max_examples=200, deadline=None)
@given(ranks=spans_of_ranks, window=st.none() | st.integers(1, LENGTH + 2), ends=cuts, data=st.data())
def test_every_visible_pair_is_computed_once(
    ranks: list[list[Span]], window: int | None, ends: list[int], data: st.DataObject
) -> None:
    queries, keys = data.draw(st.sampled_from(ranks)), data.draw(st.sampled_from(ranks))
    documents = list(itertools.pairwise([0, *sorted(ends), LENGTH]))
    found = rectangles(runs(queries), runs(keys), window=window, documents=documents if ends else None)
    computed = [pairs(rectangle) for rectangle in found]
    assert all(computed)
    assert sum(map(len, computed)) == len(set().union(*computed)) if computed else True
    assert set().union(*computed) == expected(queries, keys, window, documents)


@given(ranks=spans_of_ranks, window=st.none() | st.integers(1, LENGTH + 2), data=st.data())
def test_what_is_visible_is_what_some_query_sees(ranks: list[list[Span]], window: int | None, data: st.DataObject) -> None:
    queries, keys = data.draw(st.sampled_from(ranks)), data.draw(st.sampled_from(ranks))
    found = set(itertools.chain(*(range(*span) for span in visible(queries, keys, window=window))))
    assert found >= {k for _, k in expected(queries, keys, window, [(0, LENGTH)])}
    assert found <= set(itertools.chain(*(range(*span) for span in keys)))


def test_a_rectangle_knows_where_its_tokens_lie() -> None:
    first, second = runs([(4, 8), (16, 20)])
    assert (first, second) == (Run(4, 8, 0), Run(16, 20, 4))
    assert second.part(17, 30).slice == slice(5, 8)
    assert second.part(30, 40).length == 0


@pytest.mark.parametrize(
    ("spans", "found"),
    [([(0, 2), (2, 4)], ((0, 4),)), ([(4, 6), (0, 2), (1, 3)], ((0, 3), (4, 6))), ([(3, 3)], ()), ([], ())],
)
def test_spans_are_joined_where_they_touch(spans: list[Span], found: tuple[Span, ...]) -> None:
    assert merged(spans) == found


def test_a_later_query_sees_a_zigzag_rank_in_four_rectangles() -> None:
    low, high = runs(sequence_spans(16, cp=2, rank=1, layout="zigzag"))
    found = rectangles([low, high], [low, high], window=None)
    assert [(r.queries, r.keys, r.kind) for r in found] == [
        (low, low, "causal"),
        (high, low, "all"),
        (high, high, "causal"),
    ]
