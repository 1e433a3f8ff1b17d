"""``hp protocols``: which cp and ep protocols plugins provide."""

from __future__ import annotations

import argparse
from typing import Any

from hp_core.cli.output import listing
from hp_core.plugins.missing import not_installed
from hp_core.plugins.plugins import Plugins

COLUMNS = ("kind", "name", "version", "sequence", "masks", "backends", "plugin")


def main(argv: list[str], plugins: Plugins) -> int:
    """Run ``hp protocols`` and return its exit code."""
    asked = parser().parse_args(argv)
    absent = not_installed("protocol", plugins)
    print(listing(protocols(plugins), columns=COLUMNS, what="protocols", missing=absent, json=asked.json))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hp protocols``."""
    made = argparse.ArgumentParser(prog="hp protocols", description="Show the protocols of plugins.", allow_abbrev=False)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    lines = commands.add_parser("list", help="one line per protocol", description="List the protocols of the usable plugins.")
    lines.add_argument("--json", action="store_true", help="print a JSON list for programs")
    return made


def protocols(plugins: Plugins) -> list[dict[str, Any]]:
    """Return one mapping per protocol of a usable plugin, sorted by kind and name; its own order of tokens comes first."""
    return [
        {
            "kind": found.declaration.kind,
            "name": found.declaration.name,
            "version": found.declaration.version,
            "sequence": [*filter(None, (found.declaration.sequence_layout, *found.declaration.other_layouts))],
            "masks": list(found.declaration.masks),
            "backends": list(found.declaration.backends) or ["all"],
            "plugin": found.plugin.name,
        }
        for _, found in sorted(plugins.protocols.items())
    ]
