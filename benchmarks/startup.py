#!/usr/bin/env python3
"""Start-up time of ``hp plugins list`` and ``hp --help`` beside a process that only reads the entry points.

    python benchmarks/startup.py                       # 9 plugins, 300 other distributions, 15 rounds
    python benchmarks/startup.py --rounds 31 --check   # exit 1 if a median is not under 0.13 s and under 3.2x the baseline

Everything runs in one interpreter environment: what is installed, plus generated distributions in a temporary folder on
``PYTHONPATH``. The three commands take turns, so that a busy machine slows all of them alike; the ratio is of medians.
Prints a table and one line ``JSON {...}``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hp_core.plugins._metadata import discover

PLUGINS, OTHERS = 9, 300
LIMIT_S, LIMIT_RATIO = 0.13, 3.2
BASELINE = "entry_points()"
HP = "import sys; from hp_core.cli.main import main; sys.exit(main({argv!r}))"
COMMANDS = {
    BASELINE: "import importlib.metadata as m; m.entry_points()",
    "hp plugins list": HP.format(argv=["plugins", "list"]),
    "hp --help": HP.format(argv=["--help"]),
}
PLUGIN = '''"""A generated plugin with as much as a real one declares."""

from hp_core.contracts import Command, Kernel, ModuleFamily, RecipeSection, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [
        ModuleFamily(name=f"{name}_{{part}}", baseline="{package}.modules:Module", arguments={{"eps": "float"}})
        for part in ("norm", "attention", "experts")
    ]


@hookimpl
def hp_kernels():
    return [Kernel(op="rms_norm", name="{name}", device="cpu", implementation="{package}.modules:rms_norm")]


@hookimpl
def hp_sections():
    return [RecipeSection(name="{name}", schema="{package}.modules:Section")]


@hookimpl
def hp_commands():
    return [Command(name="{name}", help="Do what {name} does", main="{package}.modules:main")]
'''
METADATA = """Metadata-Version: 2.1
Name: {name}
Version: 1.{number}
Requires-Python: >=3.10
{requires}
A description of some length, as real distributions have it.
"""


def main() -> int:
    """Measure, print, and return the exit code."""
    asked = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        installed = len(discover())
        generate(Path(folder), plugins=max(PLUGINS - installed, 0), others=OTHERS)
        medians, cpu = measure(folder, rounds=asked.rounds)
    ratios = {name: seconds / medians[BASELINE] for name, seconds in medians.items()}
    print(f"{'median of ' + str(asked.rounds):<16}  {'wall':>10}  {'ratio':>6}  {'cpu':>10}  {'ratio':>6}")
    for name, seconds in medians.items():
        by_cpu = f"{cpu[name] * 1000:7.1f} ms  {cpu[name] / cpu[BASELINE]:5.2f}x"
        print(f"{name:<16}  {seconds * 1000:7.1f} ms  {ratios[name]:5.2f}x  {by_cpu}")
    print("JSON", json.dumps({"median_s": medians, "ratio": ratios, "cpu_s": cpu, "rounds": asked.rounds}))
    slow = [name for name in medians if name != BASELINE and (medians[name] >= LIMIT_S or ratios[name] >= LIMIT_RATIO)]
    return int(asked.check and bool(slow))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=15, help="how often each command is run")
    made.add_argument("--check", action="store_true", help="exit with 1 if a limit is not kept")
    return made


def generate(folder: Path, *, plugins: int, others: int) -> None:
    """Write ``plugins`` distributions with a plugin and ``others`` without one, half of those with entry points."""
    for number in range(plugins):
        name, package = f"acme{number}", f"acme{number}_hp"
        _write(folder / package / "__init__.py", "")
        _write(folder / package / "plugin.py", PLUGIN.format(name=name, package=package))
        _write(folder / package / "modules.py", "import torch  # must not be imported\n")
        info = _distribution(folder, f"acme{number}-hp", number, requires="Requires-Dist: hp-core>=0.1,<0.2\n")
        _write(info / "entry_points.txt", f"[hp.plugins]\n{name} = {package}.plugin\n")
    for number in range(others):
        info = _distribution(folder, f"other-{number}", number, requires="Requires-Dist: attrs>=20\n" * 6)
        if number % 2:
            _write(info / "entry_points.txt", f"[console_scripts]\nother{number} = other{number}.main:main\n")


def _distribution(folder: Path, name: str, number: int, *, requires: str) -> Path:
    info = folder / f"{name.replace('-', '_')}-1.{number}.dist-info"
    _write(info / "METADATA", METADATA.format(name=name, number=number, requires=requires))
    _write(info / "RECORD", "".join(f"other/module_{line}.py,,\n" for line in range(40)))
    return info


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def measure(folder: str, *, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the medians of wall and of CPU seconds of each command, run in turns in a process that sees ``folder``."""
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
    environ = {**os.environ, "PYTHONPATH": path}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, code in COMMANDS.items():
            seconds = _run(code, environ=environ)
            if number:  # the first round writes byte code and fills the file cache
                times[name].append(seconds)
    wall, cpu = ({name: statistics.median(run[kind] for run in runs) for name, runs in times.items()} for kind in (0, 1))
    return wall, cpu


def _run(code: str, *, environ: Mapping[str, str]) -> tuple[float, float]:
    start, used = time.perf_counter(), _cpu_of_children()
    subprocess.run([sys.executable, "-c", code], env=dict(environ), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start, _cpu_of_children() - used


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
