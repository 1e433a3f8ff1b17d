"""``hp doctor``: what this machine has, the state of every plugin, what is missing and what that costs."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from hp_core.cli.output import table
from hp_core.cli.plugins import as_data, as_table, provides
from hp_core.plugins import _metadata, kinds, missing
from hp_core.plugins.availability import absent_for, extra_line
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import Loaded, PluginRecord
from hp_core.plugins.requirements import misfits

PACKAGES = ("hp-core", "torch", "transformers")


@attrs.frozen(kw_only=True)
class Missing:
    """Something that is not there: what it costs to be without, and how to get it (empty: not with a command)."""

    what: str
    costs: str
    fix: str = ""


@attrs.frozen(kw_only=True)
class Health:
    """What the doctor found.

    ``devices``: kind -> a description of each. ``backends``: communication backends that torch was built with. ``faults``:
    what somebody has to repair, in one line each; what is only ``missing`` is no fault.
    """

    python: str
    packages: Mapping[str, str | None]
    devices: Mapping[str, tuple[str, ...]]
    backends: tuple[str, ...]
    plugins: tuple[PluginRecord, ...]
    missing: tuple[Missing, ...]
    faults: tuple[str, ...]


def main(argv: list[str], plugins: Plugins) -> int:
    """Run ``hp doctor`` and return its exit code: 1 if there are faults."""
    asked = parser().parse_args(argv)
    health = examine(plugins)
    print(as_json(health) if asked.json else as_text(health))
    return int(bool(health.faults))


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hp doctor``."""
    made = argparse.ArgumentParser(
        prog="hp doctor",
        description="Report Python, torch, devices, plugins, and what is missing. Exits with 1 if something is faulty.",
        allow_abbrev=False,
    )
    made.add_argument("--json", action="store_true", help="print one JSON object for programs")
    return made


def examine(plugins: Plugins) -> Health:
    """Return the state of this machine and of ``plugins``; a torch that cannot be imported is one of the faults."""
    needs = {name: (asked, found) for name, asked, found in misfits(_metadata.requires("hp-core"))}
    faults = [_misfit(name, asked, found) for name, (asked, found) in needs.items()]
    devices: Mapping[str, tuple[str, ...]] = {}
    backends: tuple[str, ...] = ()
    try:
        from hp_core.cli.machine import backends_built, devices_found  # torch

        devices, backends = devices_found(), backends_built()
    except Exception as error:
        if "torch" not in needs:
            faults.append(f"torch cannot be imported: {type(error).__name__}: {error}")
    faults += [error.line for error in plugins.faults]
    return Health(
        python=platform.python_version(),
        packages={name: _metadata.installed_version(name) for name in PACKAGES},
        devices=devices,
        backends=backends,
        plugins=plugins.records,
        missing=(*_missing_plugins(plugins), *_unavailable(plugins.loaded), *_missing_hardware(devices, backends)),
        faults=tuple(faults),
    )


def _misfit(name: str, asked: str, found: str | None) -> str:
    if found is None:
        return f"hp-core needs {name}{asked}, which is not installed. fix: pip install '{name}{asked}'"
    return f"hp-core needs {name}{asked}, found {found}. fix: pip install '{name}{asked}'"


def _missing_plugins(plugins: Plugins) -> Iterator[Missing]:
    """Yield every known distribution that is not installed, with all that it would provide."""
    provided: dict[str, list[str]] = {}
    for kind in kinds.TYPES:
        for distribution, names in missing.not_installed(kind, plugins).items():
            provided.setdefault(distribution, []).append(_lost(kind, names))
    for distribution, parts in sorted(provided.items()):
        later = distribution in missing.unreleased()
        what = f"{distribution} (not released yet)" if later else distribution
        yield Missing(what=what, costs="; ".join(parts), fix="" if later else f"pip install {distribution}")


def _lost(kind: str, names: Sequence[str]) -> str:
    """Return ``"no protocols cp:ring, cp:ulysses"``; many names are only counted."""
    if len(names) > 4:
        return f"{len(names)} {kinds.plural(kind)} less"
    return f"no {kind if len(names) == 1 else kinds.plural(kind)} {', '.join(names)}"


def _unavailable(loaded: Iterable[Loaded]) -> Iterator[Missing]:
    for plugin in loaded:
        record = plugin.record
        if record.status == "unavailable":
            lost = provides(record) if record.provides else "nothing that it provides can be used"
            fix = record.error.fix if record.error else extra_line(record.distribution, absent_for(plugin))
            yield Missing(what=f"{record.name}: {record.reason}", costs=lost, fix=fix)


def _missing_hardware(devices: Mapping[str, Sequence[str]], backends: Sequence[str]) -> Iterator[Missing]:
    import shutil

    if set(devices) == {"cpu"}:
        yield Missing(what="an accelerator", costs="models run on the CPU: plans, tests and small models only")
    if "cuda" in devices and "nccl" not in backends:
        yield Missing(what="nccl", costs="no job on several GPUs", fix="install a torch built for CUDA")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        yield Missing(what="a C++ compiler", costs="no compile on the CPU", fix="install g++ or clang++")


def as_json(health: Health) -> str:
    """Return the report as one JSON object."""
    import json

    data: dict[str, Any] = {**attrs.asdict(health), "plugins": [as_data(record) for record in health.plugins]}
    return json.dumps(data, indent=2)


def as_text(health: Health) -> str:
    """Return the report for people: facts, plugins, what is missing, faults last."""
    devices = "; ".join(f"{kind} ({', '.join(found)})" for kind, found in health.devices.items())
    versions = [(name, version or "not installed") for name, version in health.packages.items()]
    facts = [("python", health.python), *versions, ("devices", devices or "-"), ("backends", " ".join(health.backends) or "-")]
    lines = [*table(facts), "", as_table(health.plugins) or "no plugins are installed"]
    if health.missing:
        rows = [(item.what, item.costs, item.fix or "-") for item in health.missing]
        lines += ["", *table([("MISSING", "COSTS", "FIX"), *rows])]
    lines += ["", *health.faults] if health.faults else ["", "no faults"]
    return "\n".join(lines)
