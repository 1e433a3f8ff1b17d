"""Topology: the degrees of a job's mesh and the views of it, for any world size, without a process group."""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

import attrs

from hp_core.errors import PlanError, suggest

SHORT_FORMS = {"fsdp": "dp_shard", "dp": "dp_replicate"}
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # of the activation view, outer to inner; their product is the world
VIEWS = {
    "activation": DEGREES,
    "dense": ("pp", "dp_replicate", "fsdp", "tp"),
    "expert": ("pp", "dp_replicate", "efsdp", "ep"),
}
_SETTABLE = ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate")
_DERIVED = ("fsdp", "efsdp", "data")
_PAIR = re.compile(r"([a-z_]+)\s*=\s*([0-9]+)")
MEANT = {  # a word of the field that is no axis here -> what to do
    "sp": "sequence parallelism is part of tp: set tp, and mesh.sequence_parallel switches it (on by default)",
    "etp": "experts are cut over tp where ep is 1, and never where it is more: set tp or ep",
    "efsdp": "it follows from the others (dp_shard * cp * tp / ep): set dp_shard or ep",
    "edp": "it follows from the others (dp_shard * cp * tp / ep): set dp_shard or ep",
}


@attrs.frozen
class LogicalDeviceMesh:
    """A view of a topology: axis names and sizes, outer to inner. Rank 0 has coordinate 0 on every axis."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    topology: Topology

    def size(self, axis: str) -> int:
        """Return the degree of ``axis``."""
        return self.sizes[self._index(axis)]

    def stride(self, axis: str) -> int:
        """Return how far apart, in ranks, two neighbours on ``axis`` are."""
        return math.prod(self.sizes[self._index(axis) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on each axis of the view; HP501 if there is no such rank."""
        if not 0 <= rank < self.topology.world:
            raise PlanError(
                "HP501", f"rank {rank} is not in a mesh of {self.topology.world} ranks", where=f"mesh: {self.topology}"
            )
        return {name: rank // self.stride(name) % self.size(name) for name in self.names}

    def rank(self, coordinates: dict[str, int]) -> int:
        """Return the rank at ``coordinates``; an axis that is not named counts as 0. Inverse of :meth:`coordinates`."""
        return sum(coordinate * self.stride(axis) for axis, coordinate in coordinates.items())

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` on ``axis`` only, ascending; ``rank`` is one of them."""
        stride = self.stride(axis)
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(first + step * stride for step in range(self.size(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ``axis``, by first rank; together they hold every rank once."""
        return tuple(sorted({self.group(rank, axis) for rank in range(self.topology.world)}))

    def _index(self, axis: str) -> int:
        if axis not in self.names:
            _refuse_axis(axis, self.names)
        return self.names.index(axis)


@attrs.frozen(kw_only=True)
class Topology:
    """Degrees and flags. ``world = pp * dp_replicate * dp_shard * cp * tp``; ``ep`` divides ``dp_shard * cp * tp``.

    HP503 if a degree is not a positive integer, HP502 if ``ep`` does not divide.

    Example::

        >>> topology = Topology(tp=2, dp_shard=4, ep=4)
        >>> topology.world, topology.efsdp
        (8, 2)
        >>> topology.view("expert").group(5, "ep")
        (4, 5, 6, 7)
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    sequence_parallel: bool = True
    loss_parallel: bool = True
    shared_memory: bool = True

    def __attrs_post_init__(self) -> None:
        for axis in _SETTABLE:
            _check_degree(axis, getattr(self, axis))
        block = self.dp_shard * self.cp * self.tp
        if block % self.ep:
            raise PlanError(
                "HP502",
                f"dp_shard * cp * tp = {self.dp_shard} * {self.cp} * {self.tp} = {block} is not divisible by ep = {self.ep}",
                expected="ep to divide dp_shard * cp * tp",
                where=f"mesh: {self}",
                fix=f"choose ep among {_divisors(block)}, or make dp_shard a multiple of {_least(self.ep, self.cp * self.tp)}",
            )

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Return the smallest topology of the axes in ``"tp=2,fsdp=2"``; ``fsdp`` is dp_shard, ``dp`` is dp_replicate.

        HP503 for an unknown axis, an axis named twice, a degree that is not a positive integer, or no axis at all.
        """
        degrees: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, degree = _read_item(item, text=text)
            axis = SHORT_FORMS.get(name, name)
            if axis not in _SETTABLE:
                _refuse_axis(name, (*_SETTABLE, *SHORT_FORMS))
            if axis in degrees:
                raise PlanError("HP503", f"axis {axis} is named twice", expected="each axis once", where=repr(text))
            degrees[axis] = degree
        if not degrees:
            raise PlanError("HP503", f"{text!r} names no axis", expected="AXIS=NUMBER, such as tp=2; one process is tp=1")
        flags: dict[str, Any] = degrees  # mypy: **dict[str, int] could be a flag
        return cls.for_world(None, **flags)

    @classmethod
    def for_world(
        cls,
        world: int | None,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pp: int = 1,
        dp_shard: int = -1,
        dp_replicate: int = 1,
        sequence_parallel: bool = True,
        loss_parallel: bool = True,
        shared_memory: bool = True,
    ) -> Topology:
        """Return the topology of exactly ``world`` ranks; ``dp_shard=-1`` takes what the other degrees leave.

        Without a world, of as few ranks as the degrees allow: ``dp_shard=-1`` is what ep needs beyond ``cp * tp``. HP501 if the
        degrees do not multiply to ``world``; HP502 and HP503 as the constructor.

        Example::

            >>> Topology.for_world(None, ep=4, tp=2).dp_shard
            2
        """
        others = {"pp": pp, "dp_replicate": dp_replicate, "cp": cp, "tp": tp}
        for axis, degree in {**others, "ep": ep}.items():
            _check_degree(axis, degree)
        filled = dp_shard
        if dp_shard == -1:
            filled = _least(ep, cp * tp) if world is None else _fill(world, others)
        found = cls(
            tp=tp,
            cp=cp,
            ep=ep,
            pp=pp,
            dp_shard=filled,
            dp_replicate=dp_replicate,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            shared_memory=shared_memory,
        )
        if world is not None:
            found.check_world(world)
        return found

    def check_world(self, world: int) -> None:
        """Raise HP501 unless the topology has exactly ``world`` ranks."""
        if self.world == world:
            return
        sizes = " * ".join(str(self.degree(axis)) for axis in DEGREES)
        raise PlanError(
            "HP501",
            f"{' * '.join(DEGREES)} = {sizes} = {self.world}, but the job has {world} {_processes(world)}",
            expected=f"degrees that multiply to {world}",
            where=f"mesh: {self}",
            fix=f"start {self.world} {_processes(self.world)}, or set dp_shard to -1",
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

    @property
    def data(self) -> int:
        """Number of different batches read at the same time: ``dp_replicate * dp_shard``."""
        return self.dp_replicate * self.dp_shard

    def degree(self, axis: str) -> int:
        """Return the degree of any axis of any view, and of ``data``; HP503 for another name."""
        if axis not in (*_SETTABLE, *_DERIVED):
            _refuse_axis(axis, (*_SETTABLE, *_DERIVED))
        return int(getattr(self, axis))

    def view(self, name: str) -> LogicalDeviceMesh:
        """Return the ``activation``, ``dense`` or ``expert`` view; HP503 for another name."""
        if name not in VIEWS:
            raise PlanError(
                "HP503", f"there is no mesh view {name!r}{suggest(name, VIEWS)}", expected=f"one of {', '.join(VIEWS)}"
            )
        return LogicalDeviceMesh(VIEWS[name], tuple(self.degree(axis) for axis in VIEWS[name]), self)

    def __str__(self) -> str:
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp", "ep"))


def _check_degree(axis: str, degree: object) -> None:
    if type(degree) is not int or degree < 1:
        raise PlanError("HP503", f"mesh.{axis} is {degree!r}", expected="a positive integer")


def _read_item(item: str, *, text: str) -> tuple[str, int]:
    """Return the name and the degree of one ``"tp=2"`` of ``text``."""
    match = _PAIR.fullmatch(item)
    if match is not None and len(match[2]) < 10:
        return match[1], int(match[2])
    pairs = [f"{name}={degree}" for name, degree in _PAIR.findall(item)]
    fix = f"separate axes by commas: {','.join(pairs)}" if len(pairs) > 1 else ""
    what = f"{item!r} is not an axis and its degree"
    raise PlanError("HP503", what, expected="AXIS=NUMBER, such as tp=2", where=repr(text) if text != item else "", fix=fix)


def _refuse_axis(axis: str, known: tuple[str, ...]) -> NoReturn:
    meant = MEANT.get(axis, "")
    what = f"there is no mesh axis {axis!r}{'' if meant else suggest(axis, known)}"
    raise PlanError("HP503", what, expected=f"one of {', '.join(known)}", fix=meant)


def _fill(world: int, others: dict[str, int]) -> int:
    """Return the dp_shard that makes the degrees multiply to ``world``."""
    if type(world) is not int or world < 1:
        raise PlanError("HP501", f"the number of processes is {world!r}", expected="a positive integer")
    product = math.prod(others.values())
    if world % product:
        text = f"{' * '.join(others)} = {' * '.join(map(str, others.values()))} = {product}"
        raise PlanError(
            "HP501",
            f"{world} {_processes(world)} cannot be divided by {text}",
            expected=f"a multiple of {product}",
            fix="start another number of processes, or change a degree",
        )
    return world // product


def _least(ep: int, others: int) -> int:
    """Return the least dp_shard with which ep divides ``dp_shard * others``."""
    return ep // math.gcd(ep, others)


def _divisors(number: int) -> str:
    return ", ".join(str(candidate) for candidate in range(1, number + 1) if number % candidate == 0)


def _processes(count: int) -> str:
    return "process" if count == 1 else "processes"
