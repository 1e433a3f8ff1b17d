"""From documents to token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from hp_core.errors import RunError
from hp_trainer.data.bytes_tokenizer import byte_tokenizer_files
from hp_trainer.data.tokens import encode

EVERY_BYTE_AND_MORE = "".join(map(chr, range(256))) + " don't café 漢字 🙂\r\n\t  two  spaces"


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer.json of four words."""
    tokenizer = Tokenizer(WordLevel(vocab={"?": 0, "a": 1, "b": 2, "c": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_bytes_are_the_utf_8_of_the_documents_with_a_blank_line_between() -> None:
    assert bytes(encode(["é", "b"], tokenizer="bytes", vocabulary=256)[0]) == "é\n\nb".encode()


def test_a_tokenizer_file_encodes_each_document(words: Path) -> None:
    assert list(encode(["a b", "c x"], tokenizer=words, vocabulary=4)[0]) == [1, 2, 3, 0]


def test_a_folder_stands_for_its_tokenizer_file(words: Path) -> None:
    assert list(encode(["b"], tokenizer=words.parent, vocabulary=4)[0]) == [2]


def test_no_documents_are_no_tokens() -> None:
    assert encode([], tokenizer="bytes", vocabulary=256) == (b"", [])


def test_a_model_with_too_few_rows_is_refused(words: Path) -> None:
    with pytest.raises(RunError) as error:
        encode(["a"], tokenizer=words, vocabulary=3)
    assert error.value.line == (
        f"hp: error[HP712]: the tokenizer {words} has 4 ids, the model has vocab_size 3; expected a model with at least as"
        " many. fix: set model.config.vocab_size, or choose another data.tokenizer"
    )


def test_bytes_need_256_rows() -> None:
    with pytest.raises(RunError, match="HP712: the tokenizer bytes has 256 ids, the model has vocab_size 255"):
        encode(["a"], tokenizer="bytes", vocabulary=255)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError) as error:
        encode(["a"], tokenizer=tmp_path, vocabulary=256)
    assert error.value.code == "HP710"
    assert error.value.what.startswith(f"the tokenizer {tmp_path}/tokenizer.json cannot be read: ")
    assert error.value.fix == "set data.tokenizer to 'bytes' or to a tokenizer.json of the tokenizers library"


def test_the_exported_byte_tokenizer_has_the_same_ids_and_decodes_them() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer_files()["tokenizer.json"].decode())
    ids = tokenizer.encode(EVERY_BYTE_AND_MORE, add_special_tokens=False).ids
    assert bytes(ids) == EVERY_BYTE_AND_MORE.encode()
    assert tokenizer.decode(ids) == EVERY_BYTE_AND_MORE


def test_plain_transformers_load_the_exported_byte_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, content in byte_tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert bytes(tokenizer(EVERY_BYTE_AND_MORE)["input_ids"]) == EVERY_BYTE_AND_MORE.encode()


def test_packed_documents_stand_one_after_another_without_a_blank_line() -> None:
    tokens, starts = encode(["ab", "", "c"], tokenizer="bytes", vocabulary=256, packing=True)
    assert (tokens, starts) == (b"abc", [0, 2])


def test_documents_begin_behind_the_blank_line_of_the_one_before() -> None:
    assert encode(["ab", "c"], tokenizer="bytes", vocabulary=256) == (b"ab\n\nc", [0, 4])
