"""``hp plugins``: what is installed and whether it can be used."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import attrs

from hp_core.cli.output import table
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import PluginRecord

HEADER = ("NAME", "DISTRIBUTION", "VERSION", "PROVIDES", "STATUS")


def main(argv: list[str], plugins: Plugins) -> int:
    """Run ``hp plugins`` and return its exit code."""
    parser = argparse.ArgumentParser(prog="hp plugins", description="Show the installed plugins.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="one line per plugin", description="List the installed plugins.")
    listing.add_argument("--json", action="store_true", help="print a JSON list for programs")
    asked = parser.parse_args(argv)
    print(as_json(plugins.records) if asked.json else as_table(plugins.records))
    return 0


def as_table(records: Iterable[PluginRecord]) -> str:
    """Return the table of ``hp plugins list``."""
    rows = [(record.name, record.distribution, record.version, provides(record), status(record)) for record in records]
    return "\n".join(table([HEADER, *rows])) if rows else "no plugins are installed"


def as_json(records: Iterable[PluginRecord]) -> str:
    """Return a JSON list with every field of every record."""
    import json

    fields = [attrs.asdict(record, filter=lambda field, _: field.name != "error") for record in records]
    return json.dumps(fields, indent=2)


def provides(record: PluginRecord) -> str:
    """Return a short account of what a plugin provides: ``"adapter acme; family mla (+1)"``."""
    kinds: dict[str, list[str]] = {}
    for entry in record.provides:
        kind, _, name = entry.partition(" ")
        kinds.setdefault(kind, []).append(name)
    return "; ".join(_summary(kind, names) for kind, names in kinds.items()) or "-"


def _summary(kind: str, names: list[str]) -> str:
    if kind == "kernel" and len(names) > 1:
        return f"{len(names)} kernels {' '.join(sorted({'@' + name.partition('@')[2] for name in names}))}"
    return f"{kind} {names[0]}" + (f" (+{len(names) - 1})" if len(names) > 1 else "")


def status(record: PluginRecord) -> str:
    """Return the status with its reason: ``"ok (editable)"``, ``"unavailable: torch_npu is not installed"``."""
    if record.status == "ok":
        return "ok (editable)" if record.editable else "ok"
    return f"{record.status}: {record.reason}"
