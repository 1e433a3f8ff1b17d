"""Packed documents: which document a token is of, positions that start again, no label across, rows that are padded."""

from __future__ import annotations

from pathlib import Path

import torch

from hp_trainer.data.batches import IGNORED, TokenRow, micro_batch, token_row
from hp_trainer.data.corpus import Part, load_corpus
from hp_trainer.sections import Data, Train

CPU = torch.device("cpu")
ROW = token_row(Part(tokens=bytearray(range(17)), starts=(0, 3, 4, 13)))  # documents of 3, 1, 9 and 4 tokens
S = 4


def test_a_document_s_last_token_predicts_nothing() -> None:
    batch = micro_batch(ROW, windows=[0, 1, 2, 3], sequence=S, device=CPU)
    assert batch.labels.tolist() == [
        [1, 2, IGNORED, IGNORED],
        [5, 6, 7, 8],
        [9, 10, 11, 12],
        [IGNORED, 14, 15, 16],
    ]


def test_positions_start_again_with_documents_and_with_rows() -> None:
    batch = micro_batch(ROW, windows=[0, 1, 3], sequence=S, device=CPU)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 1, 2]]


def test_ids_are_equal_within_a_document_only() -> None:
    batch = micro_batch(ROW, windows=[0, 1, 3], sequence=S, device=CPU)
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[1, 1, 1, 2], [3, 3, 3, 3], [3, 4, 4, 4]]


def test_labels_are_counted_as_they_are_made() -> None:
    for windows in ([0], [1, 2], [3, 0, 3], [0, None, 3], [None]):
        batch = micro_batch(ROW, windows=windows, sequence=S, device=CPU)
        assert ROW.label_count(windows, sequence=S) == int((batch.labels != IGNORED).sum())


def test_without_packing_every_token_of_a_window_is_a_label() -> None:
    row = TokenRow(tokens=torch.arange(17))
    assert row.label_count([2, None, 0], sequence=S) == 2 * S
    assert micro_batch(row, windows=[0], sequence=S, device=CPU).document_ids is None


def test_padding_lies_behind_the_row_has_no_labels_and_is_a_document_of_its_own() -> None:
    batch = micro_batch(ROW, windows=[0, 3], sequence=S, device=CPU, length=6)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 0, 0], [12, 13, 14, 15, 0, 0]]
    assert batch.labels[:, S:].tolist() == [[IGNORED] * 2] * 2
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[1, 1, 1, 2, 0, 0], [3, 4, 4, 4, 0, 0]]
    assert batch.position_ids[:, S:].tolist() == [[0, 1], [0, 1]]


def test_padding_of_a_row_that_is_not_packed_goes_on_counting() -> None:
    batch = micro_batch(TokenRow(tokens=torch.arange(17)), windows=[1], sequence=S, device=CPU, length=6)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_document_that_the_held_out_cut_goes_through_begins_again(tmp_path: Path) -> None:
    for name, length in (("a", 6), ("b", 10), ("c", 4)):
        (tmp_path / name).write_text(name * length)
    data = Data(source="text", path=tmp_path, packing=True, held_out=0.4)
    corpus = load_corpus(data, train=Train(sequence_length=2, global_batch_size=1), vocabulary=256)
    assert (corpus.train.starts, corpus.held_out.starts) == ((0, 6), (0, 4))
    assert bytes(corpus.held_out.tokens) == b"bbbbcccc"
