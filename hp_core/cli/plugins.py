"""``hp plugins``: what is installed, whether it can be used, and if not, what to do."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from hp_core.cli.output import table
from hp_core.plugins import kinds
from hp_core.plugins._metadata import location
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import Loaded, PluginRecord
from hp_core.plugins.switches import Switch, means

HEADER = ("NAME", "DISTRIBUTION", "VERSION", "PROVIDES", "STATUS")
METADATA = tuple(column for column in HEADER if column != "PROVIDES")  # what is known without running a plugin's code


def main(argv: list[str], plugins: Plugins) -> int:
    """Run ``hp plugins`` and return its exit code; the error of a plugin that is shown or checked may be raised."""
    asked = parser().parse_args(argv)
    if asked.command == "list":
        return _list(asked, plugins)
    names = list(asked.name) if asked.command == "check" else [asked.name]
    Switch(source=f"hp plugins {asked.command}", names=tuple(names)).check(plugins.records)
    if asked.command == "show":
        print("\n\n".join(description(plugin) for plugin in chosen(plugins, names)))
        return 0
    from hp_core.cli.check import check  # it goes on to import torch

    return check(chosen(plugins, names), plugins=plugins, named=bool(names))


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hp plugins``."""
    made = argparse.ArgumentParser(prog="hp plugins", description="Show and check the installed plugins.", allow_abbrev=False)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="one line per plugin", description="List the installed plugins.")
    form = listing.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list for programs")
    form.add_argument("--requirements", action="store_true", help="print the pip lines that reproduce the usable plugins")
    what = listing.add_mutually_exclusive_group()
    what.add_argument("--static", action="store_true", help="look at the metadata only and run no plugin's code")
    what.add_argument("--kind", choices=sorted(kinds.TYPES), help="only plugins that provide this, and only this of them")
    listing.add_argument("--strict", action="store_true", help="exit with 1 if one is broken, incompatible or in conflict")
    showing = commands.add_parser("show", help="everything about one plugin", description="Show a plugin.")
    showing.add_argument("name", metavar="NAME", help="its name or its distribution's")
    checking = commands.add_parser(
        "check",
        help="a line per stage, from its metadata to its code",
        description="Check plugins stage by stage; the last imports their code and plans their models on the meta device.",
    )
    chosen_by = checking.add_mutually_exclusive_group(required=True)
    chosen_by.add_argument("name", metavar="NAME", nargs="*", default=[], help="names of plugins or distributions")
    chosen_by.add_argument("--all", action="store_true", help="check every plugin that can be used here")
    return made


def chosen(plugins: Plugins, names: Sequence[str]) -> list[Loaded]:
    """Return the plugins called ``names`` (all if there are none), in the order of the list."""
    return [plugin for plugin in plugins.loaded if not names or any(means(name, plugin.record) for name in names)]


def _list(asked: argparse.Namespace, plugins: Plugins) -> int:
    records = plugins.records if asked.kind is None else _of_kind(plugins.records, asked.kind)
    if asked.requirements:
        print("\n".join(requirements(plugins)))
    else:
        which = f" that provide {_article(asked.kind)} {asked.kind}" if asked.kind else ""
        columns = METADATA if asked.static else HEADER
        print(as_json(records) if asked.json else as_table(records, columns=columns) or f"no plugins are installed{which}")
    if asked.strict:
        plugins.check_strictly()
    return 0


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _of_kind(records: Iterable[PluginRecord], kind: str) -> list[PluginRecord]:
    cut = [attrs.evolve(r, provides=tuple(e for e in r.provides if e.startswith(f"{kind} "))) for r in records]
    return [record for record in cut if record.provides]


def as_table(records: Iterable[PluginRecord], *, columns: Sequence[str] = HEADER) -> str:
    """Return the table of ``hp plugins list``, with the ``columns`` that are asked for; no records give an empty text."""
    rows = [[_cell(record, column) for column in columns] for record in records]
    return "\n".join(table([columns, *rows])) if rows else ""


def _cell(record: PluginRecord, column: str) -> str:
    if column == "PROVIDES":
        return provides(record)
    return status(record) if column == "STATUS" else str(getattr(record, column.lower()))


def as_data(record: PluginRecord) -> dict[str, Any]:
    """Return a record as plain data: every field but the error itself, whose code and reason are fields."""
    return attrs.asdict(record, filter=lambda field, _: field.name != "error")


def as_json(records: Iterable[PluginRecord]) -> str:
    """Return a JSON list with every field of every record."""
    import json

    return json.dumps([as_data(record) for record in records], indent=2)


def requirements(plugins: Plugins) -> list[str]:
    """Return the lines of a requirements file for hp-core and every usable plugin; editable ones by their folder."""
    places = {"hp-core": location("hp-core")}
    places.update({r.distribution: (r.version, r.path if r.editable else None) for r in plugins.records if r.usable})
    return [f"-e {shlex.quote(path)}" if path else f"{name}=={version}" for name, (version, path) in sorted(places.items())]


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


def description(plugin: Loaded) -> str:
    """Return what ``hp plugins show`` prints: one fact a line, then every declaration with its references."""
    from hp_core.contracts.references import references

    record = plugin.record
    facts = [
        ("name", record.name),
        ("distribution", f"{record.distribution} {record.version}"),
        ("path", f"{record.path} (editable)" if record.editable else record.path),
        ("needs hp-core", "does not say" if record.core is None else record.core or "any"),
        ("plugin API", "unknown" if record.api is None else str(record.api)),
        ("status", f"{record.status}: {record.reason}" if record.reason else record.status),
    ]
    lines = table(facts)
    if record.error is not None:
        lines.append(record.error.line)
    for kind, item in sorted(plugin.declarations, key=lambda entry: (entry[0], kinds.label(*entry))):
        lines += ["", f"{kind} {kinds.label(kind, item)}"]
        lines += table([(field, str(reference)) for field, reference in references(item)], indent=2)
    return "\n".join(lines)
