"""What hp-context-parallel declares. Torch-free."""

from __future__ import annotations

from hp_core.contracts import Protocol, hookimpl

HP_API = 1
MASKS = ("causal", "sliding", "packed")
_TRAFFIC = "hp_context_parallel.traffic"
_LEGALITY = "hp_context_parallel.legality"


@hookimpl
def hp_protocols() -> list[Protocol]:
    """Return the four protocols over cp: gathered keys, exchanged heads, keys in a ring, and heads inside of either."""
    return [
        Protocol(
            kind="cp",
            name="allgather",
            implementation="hp_context_parallel.allgather:AllGather",
            sequence_layout="zigzag",
            other_layouts=("contiguous",),
            masks=MASKS,
            traffic=f"{_TRAFFIC}:allgather",
        ),
        Protocol(
            kind="cp",
            name="ulysses",
            implementation="hp_context_parallel.ulysses:Ulysses",
            sequence_layout="contiguous",
            masks=MASKS,
            traffic=f"{_TRAFFIC}:ulysses",
            validate=f"{_LEGALITY}:check_ulysses",
        ),
        Protocol(
            kind="cp",
            name="ring",
            implementation="hp_context_parallel.ring:Ring",
            sequence_layout="zigzag",
            other_layouts=("contiguous",),
            masks=MASKS,
            traffic=f"{_TRAFFIC}:ring",
        ),
        Protocol(
            kind="cp",
            name="hybrid",
            implementation="hp_context_parallel.hybrid:Hybrid",
            sequence_layout="zigzag",
            other_layouts=("contiguous",),
            sub_axes=("cp_outer", "cp_inner"),
            masks=MASKS,
            traffic=f"{_TRAFFIC}:hybrid",
            validate=f"{_LEGALITY}:check_hybrid",
        ),
    ]
