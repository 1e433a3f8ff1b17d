"""The split, and texts that are too short."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.errors import RunError
from hp_trainer.data.corpus import load_corpus
from hp_trainer.sections import Data, Train

TRAIN = Train(sequence_length=8, global_batch_size=2)


def line_of(tmp_path: Path, *, length: int, held_out: float) -> str:
    """Return the error for a text of ``length`` bytes, with the path cut out; empty if there is none."""
    file = tmp_path / "text"
    file.write_text("x" * length)
    try:
        load_corpus(Data(source="text", path=file, held_out=held_out), train=TRAIN, vocabulary=256)
    except RunError as error:
        return error.line.replace(str(file), "FILE")
    return ""


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    assert line_of(tmp_path, length=0, held_out=0) == "hp: error[HP711]: the text of FILE is empty; expected at least 9 tokens"


def test_the_training_part_must_hold_one_batch(tmp_path: Path) -> None:
    assert line_of(tmp_path, length=17, held_out=0) == ""
    assert line_of(tmp_path, length=20, held_out=0.25) == (
        "hp: error[HP711]: the text of FILE has 15 tokens for training (20 in all); expected 17 or more:"
        " train.global_batch_size 2 x train.sequence_length 8 + 1. fix: add text, or lower one of the two"
    )


def test_the_held_out_part_must_hold_one_window(tmp_path: Path) -> None:
    assert line_of(tmp_path, length=36, held_out=0.25) == ""
    assert line_of(tmp_path, length=35, held_out=0.25) == (
        "hp: error[HP711]: the text of FILE has 8 held-out tokens (data.held_out 0.25 of 35); expected 9 or more:"
        " train.sequence_length 8 + 1. fix: raise data.held_out, or set it to 0"
    )


@pytest.mark.parametrize(("held_out", "expected"), [(0, 0), (0.1, 10), (0.29, 28)])
def test_the_held_out_part_is_a_fraction_of_the_tokens_at_the_end(tmp_path: Path, held_out: float, expected: int) -> None:
    (tmp_path / "text").write_bytes(bytes(range(100)))
    corpus = load_corpus(Data(source="text", path=tmp_path / "text", held_out=held_out), train=TRAIN, vocabulary=256)
    assert list(corpus.held_out.tokens) == list(range(100 - expected, 100))
