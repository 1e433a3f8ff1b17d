"""Reading documents."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_core.errors import RunError
from hp_trainer.data.sources import read_documents
from hp_trainer.sections import Data


def test_python_docs_are_the_topics_in_the_order_of_their_names() -> None:
    topics = pytest.importorskip("pydoc_data.topics").topics
    documents = read_documents(Data())
    assert documents[0] == topics[min(topics)]
    assert len(documents) == len(topics)


def test_a_python_without_its_manual_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RunError) as error:
        read_documents(Data())
    assert error.value.line == (
        "hp: error[HP710]: data.source is 'python-docs', but this Python has no module pydoc_data.topics."
        " fix: install the complete standard library, or set data.source: text and data.path"
    )


def test_a_pattern_crosses_folders_and_sorts_by_path(tmp_path: Path) -> None:
    for name in ("z.md", "a/y.md", "a/b/x.md", "a/skip.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_documents(Data(source="text", path=tmp_path / "**" / "*.md")) == ["a/b/x.md", "a/y.md", "z.md"]


def test_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    assert read_documents(Data(source="text", path=tmp_path / "a.txt")) == ["one\r\ntwo\n"]


def test_json_lines_are_documents_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": ""}\n{"text": "two"}\n')
    assert read_documents(Data(source="jsonl", path=tmp_path / "a.jsonl")) == ["one", "", "two"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            '{"text": "one"}\n{"text": \n',
            "FILE:2 is not JSON: Expecting value: line 1 column 10 (char 9); expected one JSON object a line",
        ),
        ('{"body": "one"}\n', "FILE:1 has no text; expected an object with a string under 'text' on each line"),
        ('["one"]\n', "FILE:1 has no text; expected an object with a string under 'text' on each line"),
        ('{"text": 1}\n', "FILE:1 has no text; expected an object with a string under 'text' on each line"),
        (
            '{"text": "one"}\n{"text": "a\\ud800"}\n',
            "FILE:2 has the lone surrogate \\ud800 under 'text'; expected Unicode text."
            " fix: write the whole pair, or leave the character out",
        ),
        ("[" * 200_000, "FILE:1 is not JSON: it nests too deeply; expected one JSON object a line"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(RunError) as error:
        read_documents(Data(source="jsonl", path=file))
    assert error.value.line == f"hp: error[HP710]: {text.replace('FILE', str(file))}"


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        read_documents(Data(source="text", path=tmp_path / "no*.txt"))
    assert error.value.line == (
        f"hp: error[HP710]: data.path '{tmp_path}/no*.txt' names no file; expected a file, a folder or a pattern with matches"
    )


def test_a_file_that_is_not_utf_8_is_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(RunError) as error:
        read_documents(Data(source="text", path=tmp_path))
    assert error.value.line == (
        f"hp: error[HP710]: {tmp_path}/a.txt is not UTF-8 (byte 3). fix: convert it to UTF-8, or leave it out of data.path"
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RunError) as error:
        read_documents(Data(source="text", path=tmp_path))
    assert error.value.line == (
        f"hp: error[HP710]: {tmp_path}/a.txt cannot be read: Permission denied. fix: set data.path to a readable file"
    )
