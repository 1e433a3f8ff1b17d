"""Where a process stands in its job, as the launcher's environment says. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hp_core.errors import RunError

DIGITS = 9  # of a number of processes; Python refuses to convert thousands


@attrs.frozen(kw_only=True)
class Place:
    """Where this process stands in the job: ``rank`` of ``world`` processes, and ``local_rank`` among this machine's."""

    rank: int
    world: int
    local_rank: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """Return the place that RANK, WORLD_SIZE and LOCAL_RANK (without it, RANK) name; HP707 for one that is no number."""
        world = _number(environ, "WORLD_SIZE", least=1)
        rank = _number(environ, "RANK", least=0, below=world)
        local = _number(environ, "LOCAL_RANK", least=0, below=world) if "LOCAL_RANK" in environ else rank
        return cls(rank=rank, world=world, local_rank=local)


def _number(environ: Mapping[str, str], name: str, *, least: int, below: int | None = None) -> int:
    text = environ[name]
    number = int(text) if text.isdecimal() and len(text) <= DIGITS else -1
    if number < least or (below is not None and number >= below):
        expected = f"a number from {least}" + ("" if below is None else f" to {below - 1} (WORLD_SIZE is {below})")
        fix = "start the job with hp train, or with torchrun"
        raise RunError("HP707", f"the environment variable {name} is {text!r}", expected=expected, fix=fix)
    return number
