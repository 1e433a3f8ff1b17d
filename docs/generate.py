"""Write the pages that are generated from the code: ``python docs/generate.py`` after a change of error codes."""

from __future__ import annotations

from pathlib import Path

from hp_core.errors import reference_page

PAGES = {"reference/errors.md": reference_page}


def main() -> None:
    """Write every generated page into this folder."""
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
