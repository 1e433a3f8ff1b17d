"""The order of tokens over cp: every token once, equal shares, balanced causal work under zigzag."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.mesh.sequence import sequence_parts, sequence_spans


def tokens(length: int, **cut: object) -> list[int]:
    return [token for start, stop in sequence_spans(length, **cut) for token in range(start, stop)]  # type: ignore[arg-type]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, dict[str, object]]:
    cp = draw(st.integers(1, 12))
    inner = draw(st.sampled_from([size for size in range(1, cp + 1) if cp % size == 0]))
    layout = draw(st.sampled_from(["contiguous", "zigzag"]))
    length = sequence_parts(cp=cp, layout=layout, inner=inner) * draw(st.integers(1, 4))
    return length, {"cp": cp, "layout": layout, "inner": inner}


@given(cuts())
def test_every_token_is_held_once_and_shares_are_equal(cut: tuple[int, dict[str, object]]) -> None:
    length, given_cut = cut
    held = [tokens(length, rank=rank, **given_cut) for rank in range(given_cut["cp"])]  # type: ignore[call-overload]
    assert sorted(token for part in held for token in part) == list(range(length))
    assert {len(part) for part in held} == {length // given_cut["cp"]}  # type: ignore[operator]


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_zigzag_gives_every_rank_as_many_causal_pairs(cp: int) -> None:
    length = 2 * cp * 3
    assert len({sum(tokens(length, cp=cp, rank=rank, layout="zigzag")) for rank in range(cp)}) == 1


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({"cp": 2, "rank": 0, "layout": "zigzag"}, ((0, 2), (6, 8))),
        ({"cp": 2, "rank": 1, "layout": "zigzag"}, ((2, 4), (4, 6))),
        ({"cp": 2, "rank": 1, "layout": "contiguous"}, ((4, 8),)),
        ({"cp": 4, "rank": 0, "layout": "zigzag", "inner": 2}, ((0, 2),)),
        ({"cp": 4, "rank": 1, "layout": "zigzag", "inner": 2}, ((6, 8),)),
        ({"cp": 2, "rank": 1, "layout": "zigzag", "inner": 2}, ((4, 8),)),
        ({"cp": 1, "rank": 0, "layout": "zigzag"}, ((0, 8),)),
    ],
)
def test_eight_tokens(cut: dict[str, object], expected: tuple[tuple[int, int], ...]) -> None:
    assert sequence_spans(8, **cut) == expected  # type: ignore[arg-type]


def test_inner_ranks_of_one_outer_part_hold_its_chunks_one_after_the_other() -> None:
    part = [token for rank in range(3) for token in tokens(24, cp=6, rank=rank, layout="zigzag", inner=3)]
    assert part == [*range(6), *range(18, 24)]
