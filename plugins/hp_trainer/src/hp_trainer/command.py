"""``hp train``: check everything that can be checked, then start the ranks, or be one of them under torchrun."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hp_core.errors import RunError
from hp_core.plugins.plugins import Plugins
from hp_trainer.files import claim_directory
from hp_trainer.job import Job, load_job
from hp_trainer.phases import say
from hp_trainer.place import DIGITS, Place
from hp_trainer.stopping import interruptible


def main(argv: Sequence[str], plugins: Plugins) -> int:
    """Train as ``argv`` says and return the exit code; raises the one :class:`HPError` that explains a failure."""
    given = _parser().parse_args(argv)
    sets = [*given.sets, *([f"run.dir={json.dumps(given.run_dir, ensure_ascii=False)}"] if given.run_dir else [])]
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _be_a_rank(given, sets=sets, plugins=plugins)
    with interruptible():
        job = load_job(given.recipe, plugins=plugins, sets=sets, trust=given.trust, world=given.nproc)
        for package in job.recipe.trusted:
            print(f"trusted: the recipe may name code of {package}")
        return _start_ranks(job, sets=sets, port=given.port, plugins=plugins)


def _start_ranks(job: Job, *, sets: list[str], port: int, plugins: Plugins) -> int:
    say("checking the model and the data")
    from hp_trainer.launch import check_port, launch  # torch: seconds that a wrong recipe or --help should not cost
    from hp_trainer.rehearsal import rehearse

    check_port(port)
    rehearse(job)
    directory = claim_directory(job.run.dir, recipe=job.path)
    arguments = [str(job.path), "--directory", str(directory)]
    arguments += [part for text in sets for part in ("--set", text)]
    arguments += [part for package in job.recipe.trusted for part in ("--trust", package)]
    arguments += [part for record in plugins.records if record.status == "blocked" for part in ("--disable", record.name)]
    try:
        say(f"starting {job.topology.world} {'process' if job.topology.world == 1 else 'processes'}")
        launch(arguments, nproc=job.topology.world, port=port, directory=directory, device=job.recipe.device)
    except KeyboardInterrupt:  # before the first step: what lies there, this run has begun to write
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return 0


def _be_a_rank(given: argparse.Namespace, *, sets: list[str], plugins: Plugins) -> NoReturn:
    world = Place.of(os.environ).world
    if given.nproc not in (None, world):
        raise RunError(
            "HP707",
            f"--nproc is {given.nproc}, but this process was started as one of {world} (WORLD_SIZE)",
            fix="leave --nproc to torchrun's --nproc-per-node",
        )
    from hp_trainer.worker import Request, run_rank  # torch

    run_rank(Request(recipe=given.recipe, sets=tuple(sets), trust=tuple(given.trust)), plugins=plugins)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hp train", description="Train a model as a recipe says.")
    parser.add_argument("recipe", type=Path, help="the recipe, a YAML file")
    parser.add_argument("--nproc", type=_process_count, help="number of processes (default: what the recipe's mesh needs)")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="A.B=VALUE", help="change a recipe value")
    parser.add_argument(
        "--trust", action="append", default=[], metavar="PACKAGE", help="let the recipe name code of PACKAGE; may be repeated"
    )
    parser.add_argument("--run-dir", help="run directory, new or empty (default: runs/<recipe>-<n>)")
    parser.add_argument("--port", type=_port, default=0, help="port where the processes meet (default: a free one)")
    return parser


def _process_count(text: str) -> int:
    if not text.isdecimal() or len(text) > DIGITS or not int(text):
        raise argparse.ArgumentTypeError(f"--nproc is {_short(text)}; expected 1 or more (up to {DIGITS} digits)")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > DIGITS or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"--port is {_short(text)}; expected 0 to 65535")
    return int(text)


def _short(text: str) -> str:
    """Return ``text`` as a message quotes it: the start of one that fills the terminal."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
