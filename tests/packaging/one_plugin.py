"""Try one distribution alone: ``python tests/packaging/one_plugin.py hp-trainer TESTS...``; needs hatchling.

It is installed from its wheel, with what its metadata requires and nothing else of this repository, into a thin environment
over the running one. Then its plugins must be sound, and the TESTS must pass there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from hp_core.testing.environments import build_wheels, thin_environment

ROOT = Path(__file__).resolve().parents[2]


def projects() -> list[Path]:
    """Return the folder of every distribution of this repository."""
    found = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("hp_*/pyproject.toml")]
    return [path.parent for path in sorted(found)]


def main(name: str, tests: list[str]) -> int:
    """Return pytest's exit code, or that of the ``hp`` command which finds the plugin unsound."""
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder) / "wheels"
        build_wheels(projects(), folder=wheels)
        made = thin_environment(Path(folder))
        made.install(name, wheels=wheels)
        for command in (["plugins", "list", "--strict"], ["plugins", "check", "--all"]):
            done = made.hp(*command)
            print(done.stdout + done.stderr, end="", flush=True)
            if done.returncode:
                return done.returncode
        paths = [str(ROOT / test) for test in tests]
        return subprocess.run([str(made.python), "-m", "pytest", "-q", *paths], cwd=made.cwd, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
