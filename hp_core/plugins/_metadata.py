"""Installed distributions that offer a plugin, read from their metadata files. No plugin code runs here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import importlib_metadata

GROUP = "hp.plugins"


@attrs.frozen(kw_only=True)
class Found:
    """One entry point of the group and the distribution that brings it.

    ``value``: ``"package.plugin"``. ``path``: the project folder of an editable installation, else the folder it is
    installed in. ``requires``: its ``Requires-Dist`` lines. ``twice``: the metadata folders of the same distribution, in
    the order of ``sys.path``, if there are several.
    """

    name: str
    value: str
    distribution: str
    version: str
    path: str
    editable: bool = False
    requires: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()


def discover() -> list[Found]:
    """Return every plugin entry point, sorted by name and distribution; a distribution found twice counts once."""
    found: dict[tuple[str, str], Found] = {}
    for distribution in _distributions():
        text = _read(distribution, "entry_points.txt")
        for name, value in _entries(text) if GROUP in text else ():
            plugin = _found(distribution, name, value)
            found.setdefault((plugin.name, plugin.distribution), plugin)
    return sorted(found.values(), key=lambda plugin: (plugin.name, plugin.distribution))


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    for found in _distributions(distribution):
        versions = _headers(found).get("version")
        if versions:
            return versions[0]
    return None


def requires(distribution: str) -> tuple[str, ...]:
    """Return the ``Requires-Dist`` lines of an installed distribution; none if it is not installed."""
    for found in _distributions(distribution):
        return tuple(_headers(found).get("requires-dist", ()))
    return ()


def location(distribution: str) -> tuple[str, str | None]:
    """Return an installed distribution's version, and its project folder if it is editable."""
    for found in _distributions(distribution):
        return _headers(found).get("version", ["?"])[0], _project(found)
    return "?", None


def _distributions(name: str | None = None) -> Iterator[importlib_metadata.Distribution]:
    """Yield the distributions called ``name`` (all if None), in the order of ``sys.path``.

    Folders that do not exist are left out: the library would import zipfile to look into them.
    """
    path = [folder for folder in sys.path if os.path.exists(folder or ".")]
    yield from importlib_metadata.Distribution.discover(name=name, path=path)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section == GROUP and line and line[0] not in "#;":
            name, _, value = line.partition("=")
            yield name.strip(), value.partition("[")[0].strip()


def _found(distribution: importlib_metadata.Distribution, name: str, value: str) -> Found:
    headers = _headers(distribution)
    folder = _metadata_folder(distribution)
    title = headers.get("name", [folder])[0]
    project = _project(distribution)
    return Found(
        name=name,
        value=value,
        distribution=title,
        version=headers.get("version", ["?"])[0],
        path=project or str(distribution.locate_file("")),
        editable=project is not None,
        requires=tuple(headers.get("requires-dist", ())),
        twice=_copies(title),
    )


def _copies(distribution: str) -> tuple[str, ...]:
    folders = tuple(dict.fromkeys(_metadata_folder(copy) for copy in _distributions(distribution)))
    return folders if len(folders) > 1 else ()


def _metadata_folder(distribution: importlib_metadata.Distribution) -> str:
    return str(getattr(distribution, "_path", distribution.locate_file("")))


def _headers(distribution: importlib_metadata.Distribution) -> dict[str, list[str]]:
    """Return the one-line headers, lower case; parsing only these is many times faster than a whole message."""
    text = _read(distribution, "METADATA") or _read(distribution, "PKG-INFO")
    headers: dict[str, list[str]] = {}
    for key, value in re.findall(r"^([A-Za-z-]+):[ \t]*(.*?)\r?$", text.partition("\n\n")[0], re.MULTILINE):
        headers.setdefault(key.lower(), []).append(value)
    return headers


def _project(distribution: importlib_metadata.Distribution) -> str | None:
    text = _read(distribution, "direct_url.json")
    if '"editable"' not in text:
        return None
    import json
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(text)
        editable = origin["dir_info"]["editable"] is True
        return unquote(urlsplit(origin["url"]).path) if editable else None
    except (ValueError, LookupError, TypeError):
        return None


def _read(distribution: importlib_metadata.Distribution, name: str) -> str:
    """Return the text of a metadata file, or nothing. Every distribution is asked, so folders are read without the library."""
    folder = getattr(distribution, "_path", None)
    try:
        if isinstance(folder, Path):
            with open(f"{folder}{os.sep}{name}", encoding="utf-8") as file:
                return file.read()
        return distribution.read_text(name) or ""
    except (OSError, UnicodeDecodeError):  # another distribution's damaged file is not our concern
        return ""
