"""The order of the data, rebuilt by hand as docs/reference/data-order.md says."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import pytest
import torch

from hp_trainer.data.batches import TokenRow, micro_batch, token_row
from hp_trainer.data.corpus import Part, load_corpus
from hp_trainer.data.windows import WindowOrder, micro_batches, rank_rows, window_count
from hp_trainer.sections import Data, Train

TEXT = ["".join(chr(97 + (7 * i * i + i) % 26) for i in range(length)) for length in (23, 31, 57)]
S, G, SEED, HELD_OUT = 4, 6, 11, 0.2


def batch_by_hand(k: int, *, W: int, G: int, seed: int, shuffle: bool) -> list[int]:
    """The windows of batch k, in row order: the code of the page."""
    windows = []
    for position in range(k * G, (k + 1) * G):
        epoch, entry = divmod(position, W)
        order = list(range(W))
        if shuffle:
            generator = random.Random(f"{seed}:{epoch}")
            draws = [generator.random() for _ in range(W)]
            order.sort(key=lambda window: draws[window])
        windows.append(order[entry])
    return windows


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Three files whose names sort against the order of writing."""
    for name, text in zip(("b/2.txt", "a.txt", "b/1.txt"), TEXT, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Data(source="text", path=tmp_path, held_out=HELD_OUT)


def tokens_by_hand() -> list[int]:
    return list(f"{TEXT[1]}\n\n{TEXT[2]}\n\n{TEXT[0]}".encode())


def test_the_text_is_the_files_in_path_order_with_blank_lines_between(data: Data) -> None:
    corpus = load_corpus(data, train=Train(sequence_length=S, global_batch_size=G), vocabulary=256)
    assert list(corpus.train.tokens) + list(corpus.held_out.tokens) == tokens_by_hand()


def test_the_last_fifth_is_held_out(data: Data) -> None:
    corpus = load_corpus(data, train=Train(sequence_length=S, global_batch_size=G), vocabulary=256)
    assert len(corpus.held_out) == int(len(tokens_by_hand()) * HELD_OUT)
    assert list(corpus.held_out.tokens) == tokens_by_hand()[-len(corpus.held_out) :]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_rebuilt_by_hand_equal_those_that_ranks_read(data: Data, shuffle: bool, ranks: int) -> None:
    corpus = load_corpus(data, train=Train(sequence_length=S, global_batch_size=G), vocabulary=256)
    row, hand = token_row(corpus.train), list(corpus.train.tokens)
    order = WindowOrder(windows=window_count(len(row), sequence=S), batch=G, seed=SEED, shuffle=shuffle)
    assert order.windows == 22  # so that batch 3 (entries 18 to 23) wraps into the second epoch
    for k in range(9):
        expected = [hand[w * S : w * S + S + 1] for w in batch_by_hand(k, W=22, G=G, seed=SEED, shuffle=shuffle)]
        read = chain.from_iterable(_read(order.batch_windows(k), row, rank=rank, ranks=ranks) for rank in range(ranks))
        assert list(read) == expected


def _read(windows: list[int], row: TokenRow, *, rank: int, ranks: int) -> list[list[int]]:
    """Return the windows, each as its inputs and its last label, that one rank feeds to the model."""
    mine = [windows[index] for index in rank_rows(G, rank=rank, size=ranks)]
    rows = []
    for part in micro_batches(mine, size=2):
        batch = micro_batch(row, windows=part, sequence=S, device=torch.device("cpu"))
        assert torch.equal(batch.input_ids[:, 1:], batch.labels[:, :-1])
        rows += torch.cat([batch.input_ids, batch.labels[:, -1:]], dim=1).tolist()
    return rows


def test_every_token_but_the_first_is_a_label_once() -> None:
    row = token_row(Part(tokens=bytearray(range(1 + 5 * S))))
    batch = micro_batch(row, windows=range(5), sequence=S, device=torch.device("cpu"))
    assert sorted(batch.labels.flatten().tolist()) == list(range(1, 1 + 5 * S))


def test_positions_start_at_zero_in_every_window() -> None:
    row = token_row(Part(tokens=bytearray(range(1 + 5 * S))))
    batch = micro_batch(row, windows=[3, 1], sequence=S, device=torch.device("cpu"))
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_filling_is_run_but_never_counted() -> None:
    row = token_row(Part(tokens=bytearray(range(1 + 5 * S))))
    batch = micro_batch(row, windows=[2, None], sequence=S, device=torch.device("cpu"))
    assert batch.labels.tolist() == [[9, 10, 11, 12], [-100] * 4]
    assert batch.input_ids[1].tolist() == [0, 1, 2, 3]
