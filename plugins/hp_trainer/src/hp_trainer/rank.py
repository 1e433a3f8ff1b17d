"""The process of one rank that the launcher started. It can be stopped from its first line on; torch comes later."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from hp_trainer.stopping import StopRequest


def main() -> NoReturn:
    """Run the rank and end the process."""
    parser = argparse.ArgumentParser(prog="hp_trainer.rank")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--trust", action="append", default=[])
    parser.add_argument("--disable", action="append", default=[])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    given = parser.parse_args()
    stop = StopRequest(control=given.control)
    stop.install()
    from hp_core.plugins.load import load_plugins
    from hp_trainer.worker import Request, run_rank  # torch

    request = Request(
        recipe=given.recipe,
        sets=tuple(given.sets),
        trust=tuple(given.trust),
        directory=given.directory,
        control=given.control,
    )
    run_rank(request, plugins=load_plugins(disabled=given.disable), stop=stop)


if __name__ == "__main__":
    main()
