"""Failing together: an error on one rank becomes an error on every rank, so that nobody waits for a rank that left."""

from __future__ import annotations

import torch.distributed as dist

from hp_core.errors import HPError


def agree(error: HPError | None, *, world: int) -> None:
    """Raise ``error`` on the rank that has one, and the error of the lowest such rank on those that have none.

    Every one of the ``world`` ranks of the job must call this; with one rank it only raises.
    """
    found = _everybodys(error, world)
    if error is not None:
        raise error
    for rank, other in enumerate(found):
        if other is not None:
            where = f"Found by rank {rank}. {other.where}".rstrip()
            raise type(other)(other.code, other.what, expected=other.expected, where=where, fix=other.fix)


def _everybodys(error: HPError | None, world: int) -> list[HPError | None]:
    found: list[HPError | None] = [None] * world
    if world > 1:
        dist.all_gather_object(found, error)
    return found
