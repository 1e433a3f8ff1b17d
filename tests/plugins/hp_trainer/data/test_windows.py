"""Windows and their order."""

from __future__ import annotations

import pytest

from hp_trainer.data.windows import WindowOrder, micro_batches, permutation, rank_rows, window_count


@pytest.mark.parametrize(
    ("tokens", "sequence", "windows"), [(0, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2), (2, 1, 1), (1, 1, 0)]
)
def test_a_window_needs_one_token_more_than_the_sequence(tokens: int, sequence: int, windows: int) -> None:
    assert window_count(tokens, sequence=sequence) == windows


def test_without_shuffling_batches_run_on_over_the_end_of_an_epoch() -> None:
    order = WindowOrder(windows=5, batch=3, seed=0, shuffle=False)
    assert [order.batch_windows(k) for k in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_shuffled_epochs_are_permutations_that_differ() -> None:
    first, second = permutation(50, seed=3, epoch=0), permutation(50, seed=3, epoch=1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert len({first, second, permutation(50, seed=4, epoch=0), tuple(range(50))}) == 4


def test_the_shuffled_order_is_the_same_in_every_version_of_python() -> None:
    assert permutation(8, seed=0, epoch=0) == (3, 5, 7, 1, 2, 0, 4, 6)


def test_ranks_read_contiguous_rows_and_together_all() -> None:
    assert [list(rank_rows(6, rank=rank, size=3)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_micro_batches_are_consecutive() -> None:
    assert micro_batches(range(5), size=2) == [[0, 1], [2, 3], [4]]
