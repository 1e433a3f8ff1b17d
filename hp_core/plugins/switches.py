"""Which plugins the user allows: ``HP_PLUGINS``, ``HP_PLUGINS_DISABLED``, and names given by a command or a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

from hp_core.errors import FoundError, suggest
from hp_core.plugins.record import PluginRecord


@attrs.frozen(kw_only=True)
class Switch:
    """Names of plugins that ``source`` allows (``only``) or forbids."""

    source: str
    names: tuple[str, ...]
    only: bool = False
    where: str = ""

    def blocks(self, record: PluginRecord) -> bool:
        """Return whether the plugin is not to be used."""
        return self.only != any(means(name, record) for name in self.names)

    @property
    def reason(self) -> str:
        """Why a plugin is blocked."""
        return f"not named by {self.source}" if self.only else f"disabled by {self.source}"

    def fix(self, record: PluginRecord) -> str:
        """Return how to let the plugin be used again."""
        if self.only:
            return f"add {record.name} to {self.source}"
        name = next(name for name in self.names if means(name, record))
        return f"leave out -p no:{name}" if self.source == "-p" else f"take {name} out of {self.source}"

    def check(self, records: Iterable[PluginRecord]) -> None:
        """Raise HP102 for a name that no installed plugin has."""
        known = list(records)
        for name in self.names:
            if not any(means(name, record) for record in known):
                from hp_core.plugins import uninstalled  # reads folders, and only a mistake needs it

                found, fix = uninstalled.hint(name)
                if not found:
                    found = suggest(name, (word for record in known for word in (record.name, record.distribution)))
                    fix = "" if found else "hp plugins list --static names those that are"
                text = f"{self.source} names {name!r}, but no plugin of that name is installed{found}"
                raise FoundError("HP102", text, where=self.where, fix=fix)


def from_environment(environ: Mapping[str, str]) -> list[Switch]:
    """Return the switches of the environment; an empty ``HP_PLUGINS`` allows none."""
    switches = []
    if "HP_PLUGINS" in environ:
        switches.append(Switch(source="HP_PLUGINS", names=_names(environ["HP_PLUGINS"]), only=True))
    if environ.get("HP_PLUGINS_DISABLED"):
        switches.append(Switch(source="HP_PLUGINS_DISABLED", names=_names(environ["HP_PLUGINS_DISABLED"])))
    return switches


def is_strict(environ: Mapping[str, str]) -> bool:
    """Return whether ``HP_PLUGINS_STRICT`` is set; empty and ``0`` mean no."""
    return environ.get("HP_PLUGINS_STRICT", "") not in ("", "0")


def blocking(record: PluginRecord, switches: Iterable[Switch]) -> Switch | None:
    """Return the switch that blocks the plugin; one that forbids it by name speaks first."""
    ordered = sorted(switches, key=lambda switch: switch.only)
    return next((switch for switch in ordered if switch.blocks(record)), None)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def means(name: str, record: PluginRecord) -> bool:
    """Return whether ``name`` is the plugin's, or its distribution's in any spelling."""
    return name == record.name or _normal(name) == _normal(record.distribution)


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
