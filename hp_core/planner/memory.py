"""What one rank holds in memory for a plan. Estimates from sizes alone, nothing is measured.

Parameters, gradients and moments are exact, for the rank with the most: FSDP cuts unevenly and the first rank gets the ceiling.
What FSDP gathers is its peak. Activations are a lower estimate of what the forward keeps for the backward: what enters each
boundary and what its matrices make, in the dtype that it computes in; what element-wise functions keep beside that, buffers of
kernels and the allocator are not counted (a small model on a CPU kept 1.05 to 1.6 times as much).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from hp_core.contracts import BoundaryPlan, BuildPlan, ParameterPlan, Port, Shard, UnitPlan
from hp_core.contracts.placement import Layout, placement_of
from hp_core.mesh.topology import Topology
from hp_core.planner.collectives import is_integer, itemsize, port_shape
from hp_core.planner.describe import in_any, nearest
from hp_core.planner.units import shards, unit_of

_SYMBOLS = ("B", "S", "T")


def local_shape(parameter: ParameterPlan, *, topology: Topology) -> tuple[int, ...]:
    """Return the shape on one tp and ep rank, before FSDP cuts it."""
    shape = list(parameter.shape)
    for axis in ("tp", "ep"):
        placement = placement_of(parameter.layout, axis)
        if isinstance(placement, Shard):
            shape[placement.dim] //= topology.degree(axis)
    return tuple(shape)


def held_bytes(parameter: ParameterPlan, unit: UnitPlan, *, topology: Topology) -> int:
    """Return the bytes of the parameter, which is in ``unit``, on the rank that holds most of it."""
    shape = list(local_shape(parameter, topology=topology))
    if unit.wraps and shape:
        shape[unit.shard_dim] = -(-shape[unit.shard_dim] // shards(unit, topology=topology))
    return math.prod(shape) * itemsize(parameter.dtype)


def gathered_bytes(plan: BuildPlan) -> int:
    """Return the most that FSDP has gathered at one time, beside the parts that a rank holds; 0 where it wraps nothing.

    Units that are kept, two neighbours of those that are freed (one in use, the next on its way), and the gradient of the
    largest in the dtype that it is reduced in.
    """
    homes = {unit.fqn: unit for unit in plan.units}
    elements = dict.fromkeys(homes, 0)
    for parameter in plan.parameters:
        home = homes[unit_of(parameter.fqn, homes)]
        if home.wraps and not is_integer(parameter.dtype):
            elements[home.fqn] += math.prod(local_shape(parameter, topology=plan.topology))
    whole = {fqn: elements[fqn] * itemsize(unit.compute) for fqn, unit in homes.items()}
    kept = sum(whole[fqn] for fqn, unit in homes.items() if not unit.reshard_after_forward)
    freed = [whole[fqn] for fqn, unit in homes.items() if unit.reshard_after_forward]
    passing = max((one + other for one, other in itertools.pairwise(freed)), default=sum(freed))
    return kept + passing + max(elements[fqn] * itemsize(unit.reduce) for fqn, unit in homes.items())


def activation_bytes(plan: BuildPlan, *, experts: Iterable[str]) -> int:
    """Return about how much one micro-batch's forward keeps for the backward on one rank.

    A boundary keeps what enters it, and the inner side of each of its matrices (what leaves the first, what enters the last)
    for the tokens that the body sees; routed experts (``experts``) see each token ``num_experts_per_tok`` times. The loss keeps
    no logits. A recomputed layer keeps what enters it (``full``), or what its matrices made too (``selective``), and one such
    layer is whole again while its backward runs.
    """
    experts, layers = tuple(experts), {entry.fqn: entry.mode for entry in plan.recompute}
    homes = {unit.fqn: unit for unit in plan.units}
    owned: dict[str, list[ParameterPlan]] = {}
    for parameter in plan.parameters:
        owned.setdefault(parameter.owner, []).append(parameter)
    kept, whole = 0, dict.fromkeys(layers, 0)
    for boundary in plan.boundaries:
        dtype = boundary.compute or homes[nearest(boundary.fqn, homes) or ""].compute
        entering, tokens, width = _entering(boundary, dtype, plan=plan)
        times = int(plan.config.get("num_experts_per_tok", 1)) if in_any(boundary.fqn, experts) else 1
        features = (
            0
            if boundary.fqn == plan.loss
            else sum(_inner_features(p, width, topology=plan.topology) for p in owned.get(boundary.fqn, ()))
        )
        matrices = times * tokens * features * itemsize(dtype)
        layer = nearest(boundary.fqn, layers)
        if layer is None:
            kept += entering + matrices
        else:
            whole[layer] += entering + matrices
            kept += matrices if layers[layer] == "selective" else 0
    return kept + sum(_residual(plan) for _ in layers) + max(whole.values(), default=0)


def _entering(boundary: BoundaryPlan, dtype: str, *, plan: BuildPlan) -> tuple[int, int, int]:
    """Return the bytes of the floating arguments as the body needs them, how many tokens it sees, and how wide each is."""
    spec, size, tokens, width = boundary.spec, 0, 0, 0
    for name, layout in spec.in_src.items():
        port = spec.ports.get(name)
        if port is None or is_integer(port.dtype):
            continue
        shape = _local(port, spec.in_dst.get(name, layout), plan=plan)
        size += math.prod(shape) * itemsize(dtype if port.dtype == "compute" else port.dtype)
        tokens = max(tokens, math.prod(n for n, symbol in zip(shape, port.shape, strict=True) if symbol in _SYMBOLS))
        width = max(width, shape[-1])
    return size, tokens, width


def _local(port: Port, layout: Layout, *, plan: BuildPlan) -> tuple[int, ...]:
    shape = list(port_shape(port, batch=plan.batch, sequence=plan.sequence))
    for axis in layout:
        placement = placement_of(layout, axis)
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // plan.topology.degree(axis))
    return tuple(shape)


def _inner_features(parameter: ParameterPlan, width: int, *, topology: Topology) -> int:
    """Return the features on the inner side of a matrix [.., out, in], or [E, .., out, in], for one token of ``width``."""
    shape = local_shape(parameter, topology=topology)
    if len(shape) < 2:
        return 0
    leaving = math.prod(shape[1:-1]) if len(shape) > 2 else shape[0]
    return leaving if shape[-1] == width else shape[-1]


def _residual(plan: BuildPlan) -> int:
    """Return the bytes of what enters a layer: the residual stream."""
    width = int(plan.config.get("hidden_size", 0))
    parts = plan.topology.cp * (plan.topology.tp if plan.topology.sequence_parallel else 1)
    return plan.batch * plan.sequence * width * itemsize(plan.units[-1].compute) // parts
