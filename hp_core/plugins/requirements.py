"""Stage 1: whether the distributions that a plugin's metadata asks for are installed, in a version that fits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hp_core.contracts.ranges import fits
from hp_core.errors import MetadataError
from hp_core.plugins._metadata import installed_version
from hp_core.plugins.record import PluginRecord

_SIMPLE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*\(?((?:(?:>=|<=|==|!=|>|<)\s*\d+(?:\.\d+)*\s*,?\s*)*)\)?")


def check_requirements(requires: Iterable[str], *, record: PluginRecord) -> None:
    """Raise HP202 for the first distribution that is missing, HP201 for the first whose version does not fit."""
    for name, asked, found in misfits(requires):
        if found is None:
            fix = f"pip install '{name}{asked}'" if asked else f"pip install {name}"
            raise MetadataError("HP202", f"{record.label} needs {name}{asked}, which is not installed", fix=fix)
        raise MetadataError("HP201", f"{record.label} needs {name}{asked}, found {found}", fix=f"pip install -U {name}")


def misfits(requires: Iterable[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield name, range and version found (None: not installed) of every requirement that is not met."""
    for line in requires:
        name, asked = _requirement(line)
        found = installed_version(name) if name is not None else None
        if name is not None and (found is None or not fits(found, asked=asked)):
            yield name, asked, found


def core_range(requires: Iterable[str]) -> str | None:
    """Return the range of hp-core asked for, ``""`` for any, or None if hp-core is not asked for."""
    for line in requires:
        name, asked = _requirement(line)
        if name is not None and re.sub(r"[-_.]+", "-", name).lower() == "hp-core":
            return asked
    return None


def _requirement(line: str) -> tuple[str | None, str]:
    """Return the distribution's name and range; the name is None if the line does not apply here."""
    simple = _SIMPLE.fullmatch(line.strip())
    if simple:
        return simple[1], re.sub(r"\s+", "", simple[2]).rstrip(",")
    if re.search(r";.*\bextra\s*==", line):
        return None, ""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return None, ""
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return (requirement.name if applies else None), str(requirement.specifier)
