"""Boundaries: collectives in, the original forward, collectives out. No other code replaces a forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hp_core.applier.collectives import COLLECTIVES
from hp_core.applier.derive import derive
from hp_core.contracts.plan import BoundaryPlan, CollectivePlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext

Move = Callable[[Tensor], Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Entry:
    """What happens to one argument: its name, its place in a positional call, and the moves, in order."""

    port: str
    place: int | None
    moves: tuple[Move, ...]


@attrs.frozen(kw_only=True, eq=False)
class Exit:
    """What happens to one output: its name, its place in a tuple (None: the only output), and the moves."""

    port: str
    place: int | None
    moves: tuple[Move, ...]


@attrs.frozen(kw_only=True, eq=False)
class Boundary:
    """A compiled boundary, kept as ``module.hp.boundary``.

    ``compute``: the dtype that the body's floating inputs are cast to, before the collectives where it is narrower and after
    them where it is wider, so that the narrower one travels; None leaves them. ``fixed``:
    arguments whose declared dtype is their own, such as routing weights, by name and place: they stay as they are.
    """

    fqn: str
    entries: tuple[Entry, ...] = ()
    exits: tuple[Exit, ...] = ()
    compute: torch.dtype | None = None
    fixed: frozenset[str | int] = frozenset()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as the body needs them. An argument that is absent or None is left alone. HP550."""
        moved, kwargs = self._cast_all(list(args), kwargs, narrower=True)
        for entry in self.entries:
            if entry.port in kwargs:
                kwargs[entry.port] = self._move(kwargs[entry.port], entry.moves, entry.port)
            elif entry.place is not None and entry.place < len(moved):
                moved[entry.place] = self._move(moved[entry.place], entry.moves, entry.port)
        moved, kwargs = self._cast_all(moved, kwargs, narrower=False)
        return tuple(moved), kwargs

    def leave(self, output: Any) -> Any:
        """Return the body's output as its consumers get it. HP550."""
        for step in self.exits:
            if step.place is None:
                output = self._move(output, step.moves, step.port)
            else:
                value = self._move(output[step.place], step.moves, step.port)
                output = (*output[: step.place], value, *output[step.place + 1 :])
        return output

    def _cast_all(self, args: list[Any], kwargs: dict[str, Any], *, narrower: bool) -> tuple[list[Any], dict[str, Any]]:
        dtype = self.compute
        if dtype is None:
            return args, kwargs
        args = [a if place in self.fixed else _cast(a, dtype, narrower=narrower) for place, a in enumerate(args)]
        return args, {k: a if k in self.fixed else _cast(a, dtype, narrower=narrower) for k, a in kwargs.items()}

    def _move(self, value: Any, moves: Sequence[Move], port: str) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._move(item, moves, port) for item in value)
        if not isinstance(value, Tensor):
            return value
        try:
            for move in moves:
                value = move(value)
        except PlanError as error:
            if error.where:
                raise
            raise PlanError(
                error.code, error.what, expected=error.expected, where=f"{self.fqn}:{port}", fix=error.fix
            ) from error
        return value


def compile_boundary(
    plan: BoundaryPlan, *, arguments: Sequence[str], mesh: MeshContext, compute: torch.dtype | None
) -> Boundary | None:
    """Return what a boundary does, or None if it does nothing on this mesh. ``arguments``: the forward's names in order."""
    entries = _by_port(plan.collectives, "enter", mesh)
    exits = _by_port(plan.collectives, "exit", mesh)
    if not entries and not exits and compute is None:
        return None
    places = {name: place for place, name in enumerate(arguments)}
    outputs = plan.spec.out_names
    fixed = [name for name, port in plan.spec.ports.items() if port.dtype != "compute" and name in plan.spec.in_src]
    return Boundary(
        fqn=plan.fqn,
        entries=tuple(Entry(port=port, place=places.get(port), moves=moves) for port, moves in entries.items()),
        exits=tuple(
            Exit(port=port, place=outputs.index(port) if len(outputs) > 1 else None, moves=moves)
            for port, moves in exits.items()
        ),
        compute=compute,
        fixed=frozenset({*fixed, *(places[name] for name in fixed if name in places)}),
    )


def install_boundary(module: nn.Module) -> None:
    """Run ``module``'s forward inside ``module.hp.boundary``."""
    derive(module, _bounded)


def _by_port(collectives: Sequence[CollectivePlan], when: str, mesh: MeshContext) -> dict[str, tuple[Move, ...]]:
    moves: dict[str, tuple[Move, ...]] = {}
    for collective in collectives:
        if collective.when == when and mesh.axis(collective.axis).size > 1:
            moves[collective.port] = (*moves.get(collective.port, ()), _move_of(collective, mesh))
    return moves


def _move_of(collective: CollectivePlan, mesh: MeshContext) -> Move:
    arguments: dict[str, Any] = {"axis": mesh.axis(collective.axis)}
    if collective.dim is not None:
        arguments["dim"] = collective.dim
    if collective.forward == "all_gather":
        arguments["backward"] = collective.backward or "split"  # None: no gradient comes back, whatever it would do
    return functools.partial(COLLECTIVES[collective.forward], **arguments)


def _cast(value: Any, dtype: torch.dtype, *, narrower: bool) -> Any:
    """Return a floating value in ``dtype``; ``narrower``: only if it is wider now."""
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype, narrower=narrower) for item in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value if narrower and value.element_size() <= dtype.itemsize else value.to(dtype)


def _bounded(cls: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        boundary: Boundary = self.__dict__["hp"].boundary
        args, kwargs = boundary.enter(args, kwargs)
        return boundary.leave(cls.forward(self, *args, **kwargs))

    return {"forward": forward}
