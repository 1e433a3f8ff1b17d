"""Plain text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[str]], *, indent: int = 0) -> list[str]:
    """Return one line per row, columns aligned and two spaces apart, without trailing spaces."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [" " * indent + line.rstrip() for line in lines]
