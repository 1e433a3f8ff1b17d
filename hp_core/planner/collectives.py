"""The collectives of a boundary: what its declared differences mean, with exact adjoints and bytes.

Bytes are what one rank sends, for a tensor of ``bytes`` whole on ``n`` ranks, by the ring algorithms (which are also the
lower bound): all-gather and reduce-scatter ``(n - 1) / n * bytes``, all-reduce twice that, split and identity nothing.
A tensor cut over cp counts with its local part; what has no gradient has no backward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Literal, NoReturn

from hp_core.contracts import CollectivePlan, ModuleShardingSpec, Partial, Placement, Port, Replicate, Shard
from hp_core.contracts.placement import Layout, describe, placement_of
from hp_core.contracts.plan import CollectiveKind
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology

ITEMSIZE = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "bool": 1}
_ROUNDS: dict[CollectiveKind, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "split": 0, "identity": 0}
_Move = tuple[CollectiveKind, CollectiveKind, int | None]


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``, named as torch does without ``torch.``."""
    return ITEMSIZE[dtype]


def is_varying(spec: ModuleShardingSpec, *, topology: Topology) -> bool:
    """Return whether tp ranks compute different parts: a parameter, ``in_dst`` or ``out_src`` is Shard or Partial on tp.

    An argument without ``in_dst`` is needed as it arrives.
    """
    arguments = (spec.in_dst.get(name, layout) for name, layout in spec.in_src.items())
    inside = (*spec.params.values(), *arguments, *spec.out_src.values())
    return topology.tp > 1 and any(not isinstance(placement_of(layout, "tp"), Replicate) for layout in inside)


def port_shape(port: Port, *, batch: int, sequence: int) -> tuple[int, ...]:
    """Return the port's global shape with ``B``, ``S`` and ``T`` filled in."""
    sizes = {"B": batch, "S": sequence, "T": batch * sequence}
    return tuple(sizes[size] if isinstance(size, str) else size for size in port.shape)


def compile_boundary(
    fqn: str,
    spec: ModuleShardingSpec,
    *,
    topology: Topology,
    batch: int,
    sequence: int,
    compute: str,
    varying: bool | None = None,
    constant: Collection[str] = (),
    where: str = "",
) -> tuple[CollectivePlan, ...]:
    """Return the collectives on tp, entry before exit, in the order of the declaration, which is written at ``where``.

    ``varying``: whether the body is, where ``spec`` alone does not say so. ``constant``: ports (``FQN:name``) that no gradient
    passes, beside the integer ones. HP522 for a difference that has no collective, one
    on cp or ep, and an output that leaves as Partial.
    """
    varying = is_varying(spec, topology=topology) if varying is None else varying
    found = []
    for port, when, src, dst in edges(spec):
        move = _move(f"{fqn}:{port}", when=when, src=src, dst=dst, varying=varying, where=where)
        if move is None or topology.tp == 1:
            continue
        declared = spec.ports.get(port)
        differentiable = f"{fqn}:{port}" not in constant and not (declared and is_integer(declared.dtype))
        if move[0] == "identity" and not differentiable:
            continue  # there is no gradient to complete
        elements, size = _size(declared, src, topology=topology, batch=batch, sequence=sequence, compute=compute)
        sent = [_ROUNDS[kind] * size * (topology.tp - 1) // topology.tp for kind in move[:2]]
        found.append(
            CollectivePlan(
                port=port,
                when=when,
                axis="tp",
                forward=move[0],
                backward=move[1] if differentiable else None,
                dim=move[2],
                elements=elements,
                forward_bytes=sent[0],
                backward_bytes=sent[1] if differentiable else 0,
            )
        )
    return tuple(found)


def is_integer(dtype: str) -> bool:
    """Return whether values of ``dtype`` have no gradient."""
    return dtype.startswith(("int", "uint", "bool"))


def leaves(spec: ModuleShardingSpec, port: str) -> Layout:
    """Return the layout in which an output port's consumer gets it."""
    return (spec.out_dst or {}).get(port, spec.out_src[port])


def edges(spec: ModuleShardingSpec) -> Iterator[tuple[str, Literal["enter", "exit"], Layout, Layout]]:
    """Yield (port, when, layout before, layout after) of every declared port, inputs first."""
    if not spec.is_boundary:
        return
    for port, src in spec.in_src.items():
        yield port, "enter", src, spec.in_dst.get(port, src)
    for port, src in spec.out_src.items():
        yield port, "exit", src, leaves(spec, port)


def _move(name: str, *, when: str, src: Layout, dst: Layout, varying: bool, where: str) -> _Move | None:
    """Return (forward, backward, dim) of the tp difference, or None if nothing happens."""
    for axis in ("cp", "ep"):
        if placement_of(src, axis) != placement_of(dst, axis):
            _refuse(name, src, dst, f"a boundary keeps the layout on {axis}", where=where)
    before, after = placement_of(src, "tp"), placement_of(dst, "tp")
    move = _enter(before, after, varying) if when == "enter" else _exit(before, after)
    if isinstance(move, str):
        _refuse(name, src, dst, "there is no collective for this difference on tp", where=where)
    return move


def _enter(before: Placement, after: Placement, varying: bool) -> _Move | str | None:
    match before, after:
        case Replicate(), Replicate():
            return ("identity", "all_reduce", None) if varying else None
        case Shard(dim), Replicate():
            return "all_gather", "reduce_scatter" if varying else "split", dim
        case Replicate(), Shard(dim):
            return "split", "all_gather", dim
        case Shard(one), Shard(other) if one == other:
            return None
    return "illegal"


def _exit(before: Placement, after: Placement) -> _Move | str | None:
    match before, after:
        case Partial(), Replicate():
            return "all_reduce", "identity", None
        case Partial(), Shard(dim):
            return "reduce_scatter", "all_gather", dim
        case Shard(dim), Replicate():
            return "all_gather", "split", dim
        case (Replicate(), Replicate()):
            return None
        case Shard(one), Shard(other) if one == other:
            return None
    return "illegal"


def _refuse(name: str, src: Layout, dst: Layout, why: str, *, where: str) -> NoReturn:
    raise PlanError("HP522", f"{name} goes from {describe(src)} to {describe(dst)}; {why}", where=where)


def _size(port: Port | None, src: Layout, *, topology: Topology, batch: int, sequence: int, compute: str) -> tuple[int, int]:
    """Return the port's global element count and the bytes that the ranks of one tp group hold together."""
    if port is None:
        return 0, 0
    elements = math.prod(port_shape(port, batch=batch, sequence=sequence))
    parts = topology.cp if isinstance(placement_of(src, "cp"), Shard) else 1
    return elements, elements * itemsize(compute if port.dtype == "compute" else port.dtype) // parts


def describe_move(collective: CollectivePlan) -> str:
    """Return ``"all_gather(1) / reduce_scatter"``: forward with its dim, and backward (``-``: there is none)."""
    dim = "" if collective.dim is None else f"({collective.dim})"
    return f"{collective.forward}{dim} / {collective.backward or '-'}"
