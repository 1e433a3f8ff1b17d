"""From single plugins to one :class:`Plugins`: names are unique over all plugins, or withheld and reported (HP401)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hp_core.errors import DeclarationError
from hp_core.plugins import kinds, missing
from hp_core.plugins.plugins import TABLES, Plugins
from hp_core.plugins.record import Loaded, Provided

Claims = Mapping[tuple[str, str], Sequence[tuple[int, Any]]]  # (kind, key) -> (index of the plugin, declaration)


def combine(loaded: Iterable[Loaded]) -> Plugins:
    """Return the plugins as one value, sorted by name.

    A name that is claimed twice is provided by nobody and marks both owners as conflicting; what else they declare
    stays usable, so that a run that does not use the name is not disturbed.
    """
    plugins = sorted(loaded, key=lambda plugin: (plugin.record.name, plugin.record.distribution))
    claims = _claims(plugins)
    clashes = {claim: _clash(*claim, owners, plugins) for claim, owners in claims.items() if len(owners) > 1}
    for claim, error in clashes.items():
        for index in {index for index, _ in claims[claim]}:
            if plugins[index].record.code is None:
                plugins[index] = plugins[index].failed(error)
    free = {claim: owners[0] for claim, owners in claims.items() if len(owners) == 1}
    tables = {name: _table(kind, free, plugins) for kind, name in TABLES.items()}
    return Plugins(loaded=tuple(plugins), clashes=clashes, aliases=_aliases(free), **tables)


def _claims(plugins: Sequence[Loaded]) -> dict[tuple[str, str], list[tuple[int, Any]]]:
    claims: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for index, plugin in enumerate(plugins):
        for kind, item in plugin.declarations if plugin.record.usable else ():
            for key in kinds.keys(kind, item):
                claims.setdefault((kind, key), []).append((index, item))
    return dict(sorted(claims.items(), key=lambda claim: claim[0]))


def _table(kind: str, free: Mapping[tuple[str, str], tuple[int, Any]], plugins: Sequence[Loaded]) -> dict[str, Provided]:
    return {
        key: Provided(declaration=item, plugin=plugins[index].record, place=plugins[index].places.get(kind, ""))
        for (found, key), (index, item) in free.items()
        if found == kind and key == kinds.keys(kind, item)[0]
    }


def _aliases(free: Mapping[tuple[str, str], tuple[int, Any]]) -> dict[str, str]:
    return {key: item.name for (kind, key), (_, item) in free.items() if kind == "adapter" and key != item.name}


def _clash(kind: str, key: str, owners: Sequence[tuple[int, Any]], plugins: Sequence[Loaded]) -> DeclarationError:
    records = [plugins[index].record for index in sorted({index for index, _ in owners})]
    name = key.replace(":", "@") if kind == "kernel" else key
    if len(records) == 1:
        text = f"{kind} {name} is provided twice by {records[0].label}"
        return DeclarationError("HP401", text, fix=f"give one of the two {kinds.plural(kind)} another name")
    ours = missing.known_distributions()  # the plugin to switch off is rather the one that came later
    records.sort(key=lambda record: (record.distribution not in ours, record.name))
    named = ", ".join(f"{record.name} ({record.distribution} {record.version})" for record in records)
    fix = f"HP_PLUGINS_DISABLED={records[-1].name}"
    return DeclarationError("HP401", f"{kind} {name} is provided twice: {named}", fix=fix)
