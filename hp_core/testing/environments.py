"""Thin virtual environments: what is installed here except HP's distributions, to try those as a user would install them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import attrs

from hp_core.testing.patience import HANG_S


@attrs.frozen(kw_only=True)
class Environment:
    """A virtual environment in ``folder``; its programs are run from ``cwd``, which is no checkout."""

    folder: Path
    cwd: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin") / "python"

    def run(self, *arguments: str, timeout: float = HANG_S) -> subprocess.CompletedProcess[str]:
        """Run its interpreter with ``arguments``, without what the caller's environment adds to the path."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HP_"))}
        command = [str(self.python), *arguments]
        return subprocess.run(command, cwd=self.cwd, env=environ, capture_output=True, text=True, check=False, timeout=timeout)

    def hp(self, *arguments: str, timeout: float = HANG_S) -> subprocess.CompletedProcess[str]:
        """Run the ``hp`` that is installed in it."""
        return self.run(str(self.python.with_name("hp")), *arguments, timeout=timeout)

    def install(self, *requirements: str, wheels: Path) -> None:
        """Install ``requirements`` and what they require from the folder ``wheels``; raises if pip does."""
        command = ("-m", "pip", "install", "-q", "--no-compile", "--no-index", "--find-links", str(wheels), *requirements)
        done = self.run(*command)
        if done.returncode:
            raise RuntimeError(done.stderr)


def thin_environment(folder: Path) -> Environment:
    """Create an environment that borrows everything installed here except hp-core and the plugins, and return it."""
    made = Environment(folder=folder / "venv", cwd=folder / "elsewhere")
    made.cwd.mkdir(parents=True)
    venv.create(made.folder, symlinks=os.name != "nt")
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for entry in _borrowed():
        (borrowed / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
    site = made.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    (Path(site) / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    return made


def build_wheels(projects: Iterable[Path], *, folder: Path) -> list[Path]:
    """Build a wheel of every project into ``folder``, with the build tools that are installed here, and return them."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run([*command, *map(str, projects)], capture_output=True, text=True, check=False, timeout=HANG_S)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return sorted(folder.glob("*.whl"))


def _borrowed() -> list[Path]:
    """Return the entries of this interpreter's package folders that do not belong to HP or to one of its plugins."""
    folders = sorted({Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})
    own = {name for found in distributions(path=[str(folder) for folder in folders]) if _is_hp(found) for name in _tops(found)}
    return [
        entry for folder in folders for entry in sorted(folder.iterdir()) if entry.name not in own and entry.suffix != ".pth"
    ]


def _is_hp(found: Distribution) -> bool:
    return found.name == "hp-core" or any(entry.group == "hp.plugins" for entry in found.entry_points)


def _tops(found: Distribution) -> Sequence[str]:
    return [file.parts[0] for file in found.files or ()]
