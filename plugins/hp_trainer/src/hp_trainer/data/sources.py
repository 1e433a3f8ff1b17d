"""Reading text: the documents of a source, in an order that depends on nothing but the files. Torch-free."""

from __future__ import annotations

import glob
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

from hp_core.errors import RunError
from hp_trainer.sections import Data

TEXT_KEY = "text"


def read_documents(data: Data) -> list[str]:
    """Return the documents of ``data``: topics, files or JSON lines, in their documented order.

    Raises:
        RunError: HP710 for a file that is missing, unreadable, not UTF-8 or not JSON lines.
    """
    if data.path is None:
        return _python_docs()
    documents: list[str] = []
    for file in matching_files(data.path):
        text = _read(file)
        documents += [text] if data.source == "text" else list(_json_lines(text, file=file))
    return documents


def matching_files(path: Path) -> list[Path]:
    """Return the files that ``path`` names: itself, every file below a folder, or every match of a pattern; sorted by path."""
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.is_file()]
    elif path.exists():
        found = [path]
    else:
        found = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]
    if not found:
        raise RunError("HP710", f"data.path {str(path)!r} names no file", expected="a file, a folder or a pattern with matches")
    return sorted(found, key=lambda file: file.as_posix())


def _python_docs() -> list[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise RunError(
            "HP710",
            "data.source is 'python-docs', but this Python has no module pydoc_data.topics",
            fix="install the complete standard library, or set data.source: text and data.path",
        ) from error
    return [topics[name] for name in sorted(topics)]


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise RunError("HP710", f"{file} cannot be read: {error.strerror}", fix="set data.path to a readable file") from error
    except UnicodeDecodeError as error:
        raise RunError(
            "HP710", f"{file} is not UTF-8 (byte {error.start})", fix="convert it to UTF-8, or leave it out of data.path"
        ) from error


def _json_lines(text: str, *, file: Path) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RunError(
                "HP710", f"{file}:{number} is not JSON: {_reason(error)}", expected="one JSON object a line"
            ) from error
        if not isinstance(value, dict) or not isinstance(value.get(TEXT_KEY), str):
            raise RunError(
                "HP710", f"{file}:{number} has no text", expected=f"an object with a string under {TEXT_KEY!r} on each line"
            )
        yield _unicode(value[TEXT_KEY], place=f"{file}:{number}")


def _reason(error: ValueError | RecursionError) -> str:
    return "it nests too deeply" if isinstance(error, RecursionError) else str(error)


def _unicode(text: str, *, place: str) -> str:
    """Return ``text``; HP710 if it has half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RunError(
            "HP710",
            f"{place} has the lone surrogate \\u{ord(text[error.start]):04x} under {TEXT_KEY!r}",
            expected="Unicode text",
            fix="write the whole pair, or leave the character out",
        ) from error
    return text
