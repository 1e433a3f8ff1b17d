"""Corpus: the tokens of a run, cut into a training part and a held-out part. Torch-free."""

from __future__ import annotations

import attrs

from hp_core.errors import RunError
from hp_trainer.data.sources import read_documents
from hp_trainer.data.tokens import Tokens, encode
from hp_trainer.data.windows import window_count
from hp_trainer.sections import Data, Train


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """A row of token ids, and the places at which documents begin in it, the first 0, where documents are packed."""

    tokens: Tokens
    starts: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@attrs.frozen(kw_only=True, eq=False)
class Corpus:
    """``train`` and ``held_out`` are rows of token ids; together they are the whole text in file order."""

    train: Part
    held_out: Part


def load_corpus(data: Data, *, train: Train, vocabulary: int) -> Corpus:
    """Read, encode and split the text that ``data`` names; ``vocabulary`` is the model's.

    Of N tokens the last ``int(N * held_out)`` are held out. The training part must hold one global batch of windows, the
    held-out part (unless ``held_out`` is 0) one window.

    Raises:
        RunError: HP710 unreadable, HP711 too short, HP712 the tokenizer does not fit.
    """
    documents = read_documents(data)
    tokens, starts = encode(documents, tokenizer=data.tokenizer, vocabulary=vocabulary, packing=data.packing)
    cut = len(tokens) - int(len(tokens) * data.held_out)
    corpus = Corpus(train=_part(tokens, starts, 0, cut, data), held_out=_part(tokens, starts, cut, len(tokens), data))
    _check_lengths(corpus, data=data, train=train)
    return corpus


def _part(tokens: Tokens, starts: list[int], first: int, last: int, data: Data) -> Part:
    """Return tokens ``first`` to ``last``; a document that the cut goes through begins at the cut."""
    begins = (0, *(start - first for start in starts if first < start < last))
    return Part(tokens=tokens[first:last], starts=begins if data.packing else None)


def _check_lengths(corpus: Corpus, *, data: Data, train: Train) -> None:
    sequence = train.sequence_length
    total = len(corpus.train) + len(corpus.held_out)
    if not total:
        raise RunError("HP711", f"the text of {_name(data)} is empty", expected=f"at least {sequence + 1} tokens")
    if window_count(len(corpus.train), sequence=sequence) < train.global_batch_size:
        raise RunError(
            "HP711",
            f"the text of {_name(data)} has {len(corpus.train)} tokens for training ({total} in all)",
            expected=f"{train.global_batch_size * sequence + 1} or more: train.global_batch_size {train.global_batch_size} x"
            f" train.sequence_length {sequence} + 1",
            fix="add text, or lower one of the two",
        )
    if data.held_out and not window_count(len(corpus.held_out), sequence=sequence):
        raise RunError(
            "HP711",
            f"the text of {_name(data)} has {len(corpus.held_out)} held-out tokens (data.held_out {data.held_out} of {total})",
            expected=f"{sequence + 1} or more: train.sequence_length {sequence} + 1",
            fix="raise data.held_out, or set it to 0",
        )


def _name(data: Data) -> str:
    return str(data.path or data.source)
