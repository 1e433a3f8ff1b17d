"""Tables on the terminal."""

from __future__ import annotations

from hp_core.cli.output import table


def test_a_cell_with_line_breaks_stays_one_row() -> None:
    assert table([("NAME", "STATUS"), ("a", "broken: x\ny\x1b[31m\u2028z")]) == ["NAME  STATUS", "a     broken: x y [31m z"]
