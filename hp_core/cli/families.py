"""``hp families``: which families plugins provide, and which member every combination of selectors picks."""

from __future__ import annotations

import argparse
from typing import Any

from hp_core.cli.output import listing, table
from hp_core.contracts import Init, ModuleFamily, SelectorSpec
from hp_core.planner.families import PARALLEL, Choice, decision_table
from hp_core.plugins.missing import not_installed
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import Provided

COLUMNS = ("name", "baseline", "selectors", "members", "axis", "plugin")


def main(argv: list[str], plugins: Plugins) -> int:
    """Run ``hp families`` and return its exit code; HP101 for a name that no plugin provides."""
    asked = parser().parse_args(argv)
    if asked.command == "list":
        absent = not_installed("family", plugins)
        print(listing(families(plugins), columns=COLUMNS, what="families", missing=absent, json=asked.json))
        return 0
    found = plugins.provided("family", asked.name)
    if asked.json:
        import json

        print(json.dumps(as_data(found), indent=2))
    else:
        print("\n".join(description(found)))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hp families``."""
    made = argparse.ArgumentParser(prog="hp families", description="Show the module families of plugins.", allow_abbrev=False)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    lines = commands.add_parser("list", help="one line per family", description="List the families of the usable plugins.")
    lines.add_argument("--json", action="store_true", help="print a JSON list for programs")
    shown = commands.add_parser("show", help="one family with its decision table", description="Show one family in full.")
    shown.add_argument("name", metavar="NAME", help="name of a family")
    shown.add_argument("--json", action="store_true", help="print JSON for programs")
    return made


def families(plugins: Plugins) -> list[dict[str, Any]]:
    """Return one mapping per family of a usable plugin, sorted by name."""
    return [
        {
            "name": name,
            "baseline": found.declaration.baseline.rpartition(":")[2],
            "selectors": sorted(found.declaration.selectors),
            "members": len({choice.constructor for choice in decision_table(found.declaration)}),
            "axis": found.declaration.parallel_axis,
            "plugin": found.plugin.name,
        }
        for name, found in sorted(plugins.families.items())
    ]


def as_data(found: Provided) -> dict[str, Any]:
    """Return a family with its whole decision table as plain data."""
    family: ModuleFamily = found.declaration
    return {
        "name": family.name,
        "plugin": found.plugin.name,
        "distribution": found.plugin.distribution,
        "version": found.plugin.version,
        "baseline": family.baseline,
        "kind": kind(family),
        "parallel_axis": family.parallel_axis,
        "role": family.role,
        "sharding": family.sharding,
        "arguments": dict(family.arguments),
        "selectors": {name: _selector(spec) for name, spec in family.selectors.items()},
        "table": [
            {"when": dict(row.when), "member": row.variant, "constructor": row.constructor, "default": row.default}
            for row in decision_table(family)
        ],
        "operators": {row.variant: list(family.operators(row.variant)) for row in decision_table(family)},
        "transforms": {name: [str(step) for step in steps] for name, steps in family.transforms.items()},
        "init": [_init(entry) for entry in family.init],
    }


def description(found: Provided) -> list[str]:
    """Return the lines of ``hp families show``."""
    family: ModuleFamily = found.declaration
    facts = [
        ("provided by", f"{found.plugin.name} ({found.plugin.distribution} {found.plugin.version})"),
        ("baseline", family.baseline),
        ("kind", kind(family)),
        ("role", family.role or "-"),
        ("layout provider", family.sharding or "none: it is laid out by the rule of the module it replaces"),
        ("arguments", ", ".join(f"{name}: {type_}" for name, type_ in family.arguments.items()) or "none"),
    ]
    facts += [(f"selector {name}", _legal(spec)) for name, spec in family.selectors.items()]
    operators = {"operators": family.kernels, **{f"operators of {name}": ops for name, ops in family.variant_kernels.items()}}
    facts += [(label, ", ".join(ops)) for label, ops in operators.items() if ops]
    facts += [(f"weights of {name}", ", ".join(map(str, steps))) for name, steps in family.transforms.items()]
    facts += [(f"init of {entry.match}", _init(entry)) for entry in family.init]
    return [f"family {family.name}", *table(facts, indent=2), "", "members", *table(_rows(family), indent=2)]


def kind(family: ModuleFamily) -> str:
    """Return in words whether the member is picked at once or when the mesh is known."""
    if family.default_variant is None:
        return "immediate: the default combination is the baseline"
    if family.parallel_axis is None:
        return "deferred: the member is picked when the mesh is known"
    return f"deferred: the member is picked when the degree of {family.parallel_axis} is known"


def page(plugins: Plugins) -> str:
    """Return the reference page of the families: everything that their declarations say."""
    parts = [_HEAD]
    for name, found in sorted(plugins.families.items()):
        lines = description(found)
        parts.append("\n".join([f"## `{name}`", "", "```text", *lines[1:], "```", ""]))
    return "\n".join(parts)


_HEAD = """# Families

A family is one public name for several modules (its members), chosen by selectors. This page is made from the declarations
of the plugins in this repository; `hp families show NAME` prints the same of any installed family. How to use one:
[swap a component](../how-to/swap-a-component.md).
"""


def _rows(family: ModuleFamily) -> list[tuple[str, ...]]:
    names = [*family.selectors, *([PARALLEL] if family.default_variant is not None else [])]
    rows = [("MEMBER", "CLASS", *(name.upper() for name in names), "")]
    return rows + [_row(choice, names) for choice in decision_table(family)]


def _row(choice: Choice, names: list[str]) -> tuple[str, ...]:
    values = [str(choice.when[name]) for name in names]
    return (choice.variant, choice.constructor.rpartition(":")[2], *values, "default" if choice.default else "")


def _legal(spec: SelectorSpec) -> str:
    legal = f"one of {', '.join(map(str, spec.choices))}" if spec.choices is not None else str(spec.type)
    return f"{legal}; default {spec.default}"


def _selector(spec: SelectorSpec) -> dict[str, Any]:
    return {"type": spec.type, "choices": None if spec.choices is None else list(spec.choices), "default": spec.default}


def _init(entry: Init) -> str:
    if entry.kind == "computed":
        return f"computed by {entry.function}"
    return f"{entry.kind} {entry.config_key if entry.config_key is not None else entry.value}"
