"""All ranks of a job load the same plugins: compared through the rendezvous store, before the first collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hp_core.errors import RunError
from hp_core.plugins.plugins import Plugins

KEY = "hp/plugins"


class Store(Protocol):
    """What is needed of ``torch.distributed``'s store: ``get`` waits until the key is there."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return a stored value."""


def check_same_plugins(plugins: Plugins, *, store: Store, rank: int) -> None:
    """Raise HP701 on a rank whose plugins differ from rank 0's; call it on every rank, before the first collective."""
    lines, _ = plugins.digest()
    if rank == 0:
        store.set(KEY, "\n".join(lines))
        return
    first = store.get(KEY).decode().splitlines()
    if lines != first:
        difference = _difference(first, lines)
        fix = "install the same plugins on every machine"
        raise RunError("HP701", f"rank {rank} loaded other plugins than rank 0: {difference}", fix=fix)


def _difference(first: Sequence[str], other: Sequence[str]) -> str:
    """Return ``"- acme-hp 1.0 + acme-hp 1.1"``: what only the first has, and what only the other has."""
    missing, added = set(first) - set(other), set(other) - set(first)
    versions = [{line.rpartition(" ")[0] for line in lines} for lines in (missing, added)]
    if versions[0] != versions[1]:  # the entry points' names tell nothing more
        missing, added = versions
    return " ".join([f"- {line}" for line in sorted(missing)] + [f"+ {line}" for line in sorted(added)])
