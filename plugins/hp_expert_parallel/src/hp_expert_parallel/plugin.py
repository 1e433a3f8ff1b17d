"""What hp-expert-parallel declares: two protocols over ep. Torch-free."""

from __future__ import annotations

from hp_core.contracts import Protocol, hookimpl

HP_API = 1


@hookimpl
def hp_protocols() -> list[Protocol]:
    """Return ``all_to_all`` (a row for every choice of an expert) and ``dedup`` (a row for every rank that a token goes to)."""
    return [
        Protocol(
            kind="ep",
            name="all_to_all",
            implementation="hp_expert_parallel.contexts:AllToAll",
            masks=(),
            traffic="hp_expert_parallel.traffic:all_to_all",
        ),
        Protocol(
            kind="ep",
            name="dedup",
            implementation="hp_expert_parallel.contexts:Dedup",
            masks=(),
            traffic="hp_expert_parallel.traffic:dedup",
        ),
    ]
