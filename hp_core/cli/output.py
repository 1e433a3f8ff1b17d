"""Plain text for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hp_core.errors import HPError, one_line
from hp_core.plugins.missing import unreleased


def table(rows: Iterable[Sequence[str]], *, indent: int = 0) -> list[str]:
    """Return one line per row whatever its cells hold, columns aligned and two spaces apart, without trailing spaces."""
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [" " * indent + line.rstrip() for line in lines]


def listing(
    rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str], what: str, missing: Mapping[str, Sequence[str]], json: bool
) -> str:
    """Return ``rows`` as a JSON list or as a table that ends with what a distribution that is not installed would add.

    ``what`` names the rows in the plural; ``missing`` maps distributions to the names that they are known to provide.
    """
    if json:
        from json import dumps

        return dumps(list(rows), indent=2)
    header = [column.upper() for column in columns]
    lines = table([header, *([_cell(row[column]) for column in columns] for row in rows)]) if rows else []
    lines = lines or [f"no installed plugin provides {what}"]
    lines += [_added(name, names=names) for name, names in missing.items()]
    return "\n".join(lines)


@contextmanager
def told(*, json: bool) -> Iterator[list[HPError]]:
    """Tell the errors that the block appends to what this gives, before the one that ends it.

    Each is a line on standard error; the last is told by ``hp`` itself. With ``json``, where a program reads the output, all
    are also one object on standard output: ``{"errors": [{"code", "message", "what", "expected", "where", "fix"}]}``.
    """
    others: list[HPError] = []
    try:
        yield others
    except HPError as error:
        for other in others:
            print(other.line, file=sys.stderr)
        if json:
            from json import dumps

            print(dumps({"errors": [{name: getattr(found, name) for name in _TOLD} for found in (*others, error)]}, indent=2))
        raise


_TOLD = ("code", "message", "what", "expected", "where", "fix")


def _added(distribution: str, *, names: Sequence[str]) -> str:
    if distribution in unreleased():
        return f"{distribution}, which is not released yet, will add {', '.join(names)}"
    return f"pip install {distribution} adds {', '.join(names)}"


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
