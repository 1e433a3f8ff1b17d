"""Write the pages that are generated from the code: ``python docs/generate.py`` after a change of codes or declarations."""

from __future__ import annotations

from pathlib import Path

from hp_components.pages import components_page, kernels_page
from hp_core.cli.families import page as families_page
from hp_core.errors import reference_page
from hp_core.plugins.load import load_plugins
from hp_core.plugins.reference import hooks_page


def families() -> str:
    """Return the page of the families that are installed."""
    return families_page(load_plugins())


def kernels() -> str:
    """Return the page of the operators and of the kernels that are installed."""
    return kernels_page(load_plugins())


PAGES = {
    "reference/components.md": components_page,
    "reference/errors.md": reference_page,
    "reference/families.md": families,
    "reference/hookspecs.md": hooks_page,
    "reference/kernels.md": kernels,
}


def main() -> None:
    """Write every generated page into this folder."""
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
