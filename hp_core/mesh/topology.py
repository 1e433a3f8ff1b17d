"""Topology: the degrees of a job's mesh and the views of it, for any world size, without a process group."""

from __future__ import annotations

import math

import attrs

from hp_core.errors import PlanError

SHORT_FORMS = {"fsdp": "dp_shard", "dp": "dp_replicate"}
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # of the activation view, outer to inner


@attrs.frozen
class LogicalDeviceMesh:
    """A view of a topology: axis names and sizes, outer to inner."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    topology: Topology

    def size(self, axis: str) -> int:
        """Return the degree of ``axis``."""
        return self.sizes[self.names.index(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on each axis of the view."""
        found: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the global ranks that differ from ``rank`` on ``axis`` only, in order."""
        stride = math.prod(self.sizes[self.names.index(axis) + 1 :])
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(first + step * stride for step in range(self.size(axis)))


@attrs.frozen(kw_only=True)
class Topology:
    """Degrees and flags. ``world = pp * dp_replicate * dp_shard * cp * tp``; ``ep`` divides ``dp_shard * cp * tp``."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    sequence_parallel: bool = True
    loss_parallel: bool = True

    def __attrs_post_init__(self) -> None:
        for axis in ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate"):
            degree = getattr(self, axis)
            if type(degree) is not int or degree < 1:
                raise PlanError("HP503", f"mesh.{axis} is {degree!r}", expected="a positive integer")
        if self.dp_shard * self.cp * self.tp % self.ep:
            raise PlanError(
                "HP502",
                f"dp_shard * cp * tp ({self.dp_shard * self.cp * self.tp}) must be divisible by ep ({self.ep})",
                where=f"mesh: {self}",
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def fsdp(self) -> int:
        """Degree of the axis over which dense parameters are cut: ``dp_shard * cp``."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Degree of the axis over which routed experts are cut: ``dp_shard * cp * tp / ep``."""
        return self.dp_shard * self.cp * self.tp // self.ep

    def degree(self, axis: str) -> int:
        """Return the degree of any axis of any view."""
        return int(getattr(self, SHORT_FORMS.get(axis, axis) if axis != "fsdp" else axis))

    def view(self, name: str) -> LogicalDeviceMesh:
        """Return the ``activation``, ``dense`` or ``expert`` view."""
        names = {
            "activation": DEGREES,
            "dense": ("pp", "dp_replicate", "fsdp", "tp"),
            "expert": ("pp", "dp_replicate", "efsdp", "ep"),
        }[name]
        return LogicalDeviceMesh(names, tuple(self.degree(axis) for axis in names), self)

    def __str__(self) -> str:
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp", "ep"))
