"""The recipes that come with hp-deepseek: ``python -m hp_deepseek`` names them, with a name it prints one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

INSTALLED = Path(__file__).with_name("recipes")
CHECKOUT = Path(__file__).parents[2] / "recipes"


def recipes() -> dict[str, Path]:
    """Return the recipes by name: those of the wheel, or of the project that is installed editable."""
    folder = INSTALLED if INSTALLED.is_dir() else CHECKOUT
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def main() -> int:
    """Print what the command line asks for and return the exit code."""
    found = recipes()
    parser = argparse.ArgumentParser(prog="python -m hp_deepseek", description="Name the shipped recipes, or print one.")
    parser.add_argument("name", nargs="?", choices=tuple(found), help="recipe to print; none: their names")
    name = parser.parse_args().name
    sys.stdout.write(found[name].read_text(encoding="utf-8") if name else "".join(f"{name}\n" for name in found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
