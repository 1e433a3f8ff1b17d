"""Why a name is not available: a clash, a plugin that cannot be used, a plugin to install, or a typing mistake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hp_core.errors import FoundError, suggest
from hp_core.plugins import kinds
from hp_core.plugins.record import Loaded, PluginRecord

if TYPE_CHECKING:
    from hp_core.plugins.plugins import Plugins


LISTINGS = {  # kind -> the command that lists what is provided
    **{kind: f"hp plugins list --kind {kind}" for kind in kinds.TYPES},
    "command": "hp --help",
    "family": "hp families list",
    "kernel": "hp kernels list",
    "protocol": "hp protocols list",
}


def known_owner(kind: str, name: str) -> str | None:
    """Return the distribution that is known to provide ``name``, installed or not; None if nobody is known to."""
    return _known().get(kind, {}).get(name)


def known_distributions() -> frozenset[str]:
    """Return the distributions of the known plugins."""
    return frozenset(distribution for names in _known().values() for distribution in names.values())


def not_installed(kind: str, plugins: Plugins) -> dict[str, list[str]]:
    """Return the known distributions that are not installed and would provide something of ``kind``, with the names."""
    installed = {record.distribution for record in plugins.records}
    found: dict[str, list[str]] = {}
    for name, distribution in sorted(_known().get(kind, {}).items()):
        if distribution not in installed:
            found.setdefault(distribution, []).append(name.replace(":", "@") if kind == "kernel" else name)
    return dict(sorted(found.items()))


def _known() -> Mapping[str, Mapping[str, str]]:
    return {kind: names for kind, names in _table().items() if kind in kinds.TYPES}


def unreleased() -> Mapping[str, str]:
    """Return the known distributions that are not released yet, with what they are for: no pip line helps."""
    return _table()["unreleased"]


def device_provider(device: str) -> str | None:
    """Return the requirement that brings torch's backend for a kind of device; None if torch has it, or nobody is known."""
    return _table()["device"].get(device)


def _table() -> Mapping[str, Mapping[str, str]]:
    import json
    from pathlib import Path

    return json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))


def unusable_owner(kind: str, name: str, *, loaded: Iterable[Loaded]) -> PluginRecord | None:
    """Return the installed plugin that would provide ``name`` if it could be used."""
    owner = known_owner(kind, name)
    for plugin in loaded:
        record = plugin.record
        declared = [key for found, item in plugin.declarations if found == kind for key in kinds.keys(kind, item)]
        if not record.usable and (name in declared or record.distribution == owner or record.name == name):
            return record
    return None


def not_provided(kind: str, name: str, *, loaded: Iterable[Loaded], names: Iterable[str], where: str = "") -> FoundError:
    """Return HP101 for ``name``, which no usable plugin provides; ``names`` are those that could have been meant."""
    record = unusable_owner(kind, name, loaded=loaded)
    if record is not None:
        reason = f": {record.reason}" if record.reason else ""
        text = f"no working plugin provides the {kind} {name!r}; {record.label} is {record.status}{reason}"
        return FoundError("HP101", text, where=where, fix=_repair(record))
    text, distribution = f"no installed plugin provides the {kind} {name!r}", known_owner(kind, name)
    if distribution is not None:
        later = f"; {distribution}, which will, is not released yet" if distribution in unreleased() else ""
        return FoundError("HP101", text + later, where=where, fix="" if later else f"pip install {distribution}")
    names = sorted(names)
    hint = suggest(name, names) or suggest(name, _known().get(kind, {}))
    fix = "" if hint else f"{LISTINGS[kind]} shows what there is" if names else "hp plugins list shows what is installed"
    return FoundError("HP101", text + hint, where=where, fix=fix)


def _repair(record: PluginRecord) -> str:
    """Return how to have a plugin that cannot be used: its switch, its pip line, or what tells more."""
    if record.status in ("blocked", "unavailable") and record.fix:
        return record.fix
    return f"hp plugins check {record.name} tells what to repair"


def section_missing(name: str, *, loaded: Iterable[Loaded], where: str = "") -> FoundError | None:
    """Return HP104 if the section ``name`` belongs to a plugin that is missing or cannot be used, else None."""
    record = unusable_owner("section", name, loaded=loaded)
    if record is not None:
        reason = f": {record.reason}" if record.reason else ""
        text = f"the recipe section {name!r} belongs to {record.label}, which is {record.status}{reason}"
        return FoundError("HP104", text, where=where, fix=_repair(record))
    distribution = known_owner("section", name)
    if distribution is None:
        return None
    text = f"the recipe section {name!r} belongs to {distribution}, which is not installed"
    return FoundError("HP104", text, where=where, fix=f"pip install {distribution}")
