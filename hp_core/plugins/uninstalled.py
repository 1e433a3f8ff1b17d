"""What a name that no plugin has may stand for: a project or a package that was never installed. Nothing is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_ENTRIES = re.compile(r"^\[project\.entry-points\.[\"']?hp\.plugins[\"']?\][^\n]*\n((?:(?!\[).*\n?)*)", re.MULTILINE)
_LINE = re.compile(r"^\s*[\"']?([\w-]+)[\"']?\s*=\s*[\"']", re.MULTILINE)
_TITLE = re.compile(r"^name\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)


def hint(name: str) -> tuple[str, str]:
    """Return what is there under ``name`` and how to install it, or two empty texts.

    Looked at: the folders of ``sys.path``, those that they lie in (``src``), and the working folder.
    """
    for project in _projects():
        text = _read(project)
        if _entries(text) and name in {*_entries(text), *_TITLE.findall(text)}:
            return f"; its project is there but not installed: {project.parent}", f"pip install -e {project.parent}"
    module = name.replace("-", "_")
    for folder in map(Path, filter(None, sys.path)):
        if (folder / module / "plugin.py").is_file():
            return _package(module, folder)
    return "", ""


def _package(module: str, folder: Path) -> tuple[str, str]:
    """Return the texts for a package that can be imported and has no entry point."""
    found = f"; the package {folder / module} can be imported, but a plugin is found by its entry point alone"
    project = next((path for path in (folder / "pyproject.toml", folder.parent / "pyproject.toml") if path.is_file()), None)
    entry = f"the entry point {module} = '{module}.plugin' of the group hp.plugins"
    if project is None:
        return found, f"give it a pyproject.toml with {entry}, and pip install -e its folder"
    return found, f"add {entry} to {project}, and pip install -e {project.parent}"


def _projects() -> Iterator[Path]:
    folders = [Path.cwd(), *map(Path, filter(None, sys.path))]
    seen = dict.fromkeys(place.resolve() for folder in folders for place in (folder, folder.parent))
    yield from (folder / "pyproject.toml" for folder in seen if (folder / "pyproject.toml").is_file())


def _entries(text: str) -> list[str]:
    return [name for section in _ENTRIES.findall(text) for name in _LINE.findall(section)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
