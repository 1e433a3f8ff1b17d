"""From documents to one row of token ids. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from hp_core.errors import RunError

SEPARATOR = "\n\n"
BYTES = "bytes"
BYTES_VOCABULARY = 256

Tokens = bytearray | array  # type: ignore[type-arg]  # of token ids: one byte each, or C ints


def encode(
    documents: Sequence[str], *, tokenizer: Path | str, vocabulary: int, packing: bool = False
) -> tuple[Tokens, list[int]]:
    """Return the token ids of ``documents``, one after another, and the place at which each begins; each is encoded by itself.

    Every document but the last is followed by a blank line, unless ``packing`` keeps them apart; an empty one begins nowhere.
    ``tokenizer`` is ``bytes`` (the UTF-8 bytes are the ids) or a path. ``vocabulary`` is the model's vocabulary size.

    Raises:
        RunError: HP710 if the tokenizer cannot be read, HP712 if its ids do not fit the model.
    """
    separator = "" if packing else SEPARATOR
    pieces = [document + separator for document in documents[:-1]] + list(documents[-1:])
    if tokenizer == BYTES:
        check_vocabulary(BYTES_VOCABULARY, tokenizer=BYTES, vocabulary=vocabulary)
        return _joined(bytearray(), (piece.encode("utf-8") for piece in pieces))
    return _joined(array("i"), _encode_with(tokenizer_file(Path(tokenizer)), pieces, vocabulary=vocabulary))


def _joined(tokens: Tokens, pieces: Iterable[Sequence[int]]) -> tuple[Tokens, list[int]]:
    starts = []
    for piece in pieces:
        if piece:
            starts.append(len(tokens))
            tokens.extend(piece)
    return tokens, starts


def tokenizer_file(path: Path) -> Path:
    """Return the ``tokenizer.json`` that ``path`` names: itself, or the file of that name in a folder."""
    return path / "tokenizer.json" if path.is_dir() else path


def check_vocabulary(size: int, *, tokenizer: str, vocabulary: int) -> None:
    """Raise HP712 if a tokenizer of ``size`` ids does not fit a model of ``vocabulary`` rows."""
    if size > vocabulary:
        raise RunError(
            "HP712",
            f"the tokenizer {tokenizer} has {size} ids, the model has vocab_size {vocabulary}",
            expected="a model with at least as many",
            fix="set model.config.vocab_size, or choose another data.tokenizer",
        )


def _encode_with(file: Path, pieces: list[str], *, vocabulary: int) -> Iterator[list[int]]:
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for what it cannot parse
        raise RunError(
            "HP710",
            f"the tokenizer {file} cannot be read: {error}",
            fix="set data.tokenizer to 'bytes' or to a tokenizer.json of the tokenizers library",
        ) from error
    check_vocabulary(tokenizer.get_vocab_size(with_added_tokens=True), tokenizer=str(file), vocabulary=vocabulary)
    return (encoding.ids for encoding in tokenizer.encode_batch(pieces, add_special_tokens=False))
