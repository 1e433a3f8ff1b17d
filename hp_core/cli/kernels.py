"""``hp kernels``: which operators plugins provide a kernel for, on which device, and whether it can run here."""

from __future__ import annotations

import argparse
from typing import Any

from hp_core.cli.output import listing
from hp_core.plugins import missing as known
from hp_core.plugins.availability import absent, extra_line, not_installed
from hp_core.plugins.plugins import Plugins

COLUMNS = ("op", "name", "device", "plugin", "status")


def main(argv: list[str], plugins: Plugins) -> int:
    """Run ``hp kernels`` and return its exit code."""
    asked = parser().parse_args(argv)
    missing = known.not_installed("kernel", plugins)
    print(listing(kernels(plugins), columns=COLUMNS, what="kernels", missing=missing, json=asked.json))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hp kernels``."""
    made = argparse.ArgumentParser(prog="hp kernels", description="Show the kernels of plugins.", allow_abbrev=False)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    lines = commands.add_parser("list", help="one line per kernel", description="List the kernels of the usable plugins.")
    lines.add_argument("--json", action="store_true", help="print a JSON list for programs")
    return made


def kernels(plugins: Plugins) -> list[dict[str, Any]]:
    """Return one mapping per kernel of a usable plugin, sorted by operator and name."""
    return [
        {
            "op": found.declaration.op,
            "name": found.declaration.name,
            "device": found.declaration.device,
            "plugin": found.plugin.name,
            "status": _status(found.declaration.requires, distribution=found.plugin.distribution),
        }
        for _, found in sorted(plugins.kernels.items())
    ]


def _status(requires: tuple[str, ...], *, distribution: str) -> str:
    missing = absent(requires)
    if not missing:
        return "ok"
    line = extra_line(distribution, missing)
    return f"unavailable: {not_installed(missing)}{line and f'. fix: {line}'}"
