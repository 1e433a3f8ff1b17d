"""Fake installations: distributions with plugins, generated into a folder on ``sys.path``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from hp_core import __version__
from hp_core.plugins import _metadata
from hp_core.testing.patience import HANG_S


class FakeSite:
    """A folder that stands for ``site-packages``; :meth:`add` installs a distribution into it.

    Example::

        site = FakeSite(tmp_path / "site")
        site.add("acme-hp", version="2.0", entry="acme = acme_hp.plugin", files={"acme_hp/plugin.py": "HP_API = 1"})
        site.run("-m", "hp_core.cli.main")
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        distribution: str,
        *,
        version: str = "1.0",
        entry: str = "",
        requires: Sequence[str] = ("hp-core>=0.1",),
        files: Mapping[str, str] | None = None,
        tree: Path | None = None,
    ) -> Path:
        """Install a distribution and return its ``.dist-info`` folder.

        ``entry`` is a line of the group ``hp.plugins``; ``files`` maps paths to sources, ``tree`` is a source folder.
        """
        if tree is not None:
            shutil.copytree(tree, self.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for path, text in (files or {}).items():
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        headers = [f"Name: {distribution}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *headers, ""]), encoding="utf-8")
        if entry:
            (info / "entry_points.txt").write_text(f"[hp.plugins]\n{entry}\n", encoding="utf-8")
        return info

    def modules(self) -> set[str]:
        """Return the names of the imported modules that lie in the folder, packages without ``__init__.py`` included."""
        inside = f"{self.folder}{os.sep}"
        return {
            name for name, module in list(sys.modules.items()) if any(place.startswith(inside) for place in _places(module))
        }

    def run(
        self, *arguments: str, environ: Mapping[str, str] | None = None, timeout: float = HANG_S
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with ``arguments`` in a process that sees the folder first; output is captured as text."""
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH", ""))))
        env = {**os.environ, "PYTHONPATH": path, **(environ or {})}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=timeout)

    def hp(
        self, *arguments: str, environ: Mapping[str, str] | None = None, timeout: float = HANG_S
    ) -> subprocess.CompletedProcess[str]:
        """Run ``hp`` with ``arguments`` in such a process."""
        code = "import sys; from hp_core.cli.main import main; sys.exit(main())"
        return self.run("-c", code, *arguments, environ=environ, timeout=timeout)


def _places(module: object) -> list[str]:
    """Return a module's file and, for a package, its folders."""
    try:
        folders = list(getattr(module, "__path__", ()))  # computed anew for a namespace package, which may be gone
    except Exception:
        folders = []
    return [str(getattr(module, "__file__", "")), *map(str, folders)]


@pytest.fixture
def fake_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """Give an empty :class:`FakeSite` that comes first on ``sys.path``; what is imported from it is forgotten afterwards."""
    site = FakeSite(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site.folder))
    yield site
    for name in site.modules():
        sys.modules.pop(name, None)


@pytest.fixture
def lone_dist(fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """Give a :class:`FakeSite` beside which only hp-core counts as installed, whatever else really is."""
    fake_dist.add("hp-core", version=__version__)
    monkeypatch.setattr(_metadata, "sys", SimpleNamespace(path=[str(fake_dist.folder)]))
    return fake_dist
