"""What a plan costs: parameters, memory and bytes sent, per rank. Estimates from sizes alone, nothing is measured.

Memory counts the rank with the most: FSDP cuts dim 0 and the first rank gets the ceiling. The optimizer is AdamW: two moments
in the parameter's dtype. Bytes are what one rank sends for one micro-batch, forward and backward, with the ring algorithms of
:mod:`hp_core.planner.collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from hp_core.contracts import BuildPlan, ModelAdapter, ParameterPlan, Partial, Shard, UnitPlan
from hp_core.contracts.placement import placement_of
from hp_core.mesh.topology import Topology
from hp_core.planner.collectives import is_integer, itemsize
from hp_core.planner.describe import in_any
from hp_core.planner.parameters import at_least_fp32
from hp_core.planner.units import unit_of
from hp_core.plugins.lazy import call


@attrs.frozen(kw_only=True)
class Figures:
    """Parameter counts, training FLOPs per token (None if the adapter gives none), bytes held and bytes sent per rank.

    ``total`` and ``active`` count what a checkpoint holds: parameters, and saved buffers of floating dtypes.
    """

    total: int
    active: int
    flops_per_token: float | None
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    boundary_bytes: int
    completion_bytes: int
    fsdp_bytes: int


def figures(plan: BuildPlan, *, adapter: ModelAdapter) -> Figures:
    """Return the figures of ``plan``, which ``adapter`` made possible."""
    trainable = [parameter for parameter in plan.parameters if parameter.trainable]
    gradients = sum(held_bytes(parameter, topology=plan.topology) for parameter in trainable)
    saved = sum(math.prod(b.shape) for b in plan.buffers if b.persistent and not is_integer(b.dtype))
    return Figures(
        total=saved + sum(math.prod(parameter.shape) for parameter in plan.parameters),
        active=saved + active_parameters(plan.parameters, experts=adapter.experts, config=plan.config),
        flops_per_token=call(adapter.flops, plan.config, plan.sequence) if adapter.flops else None,
        parameter_bytes=sum(held_bytes(parameter, topology=plan.topology) for parameter in plan.parameters),
        gradient_bytes=gradients,
        optimizer_bytes=2 * gradients,
        boundary_bytes=sum(collective.bytes for boundary in plan.boundaries for collective in boundary.collectives),
        completion_bytes=sum(completion_bytes(parameter, topology=plan.topology) for parameter in trainable),
        fsdp_bytes=fsdp_bytes(plan),
    )


def active_parameters(parameters: Iterable[ParameterPlan], *, experts: Iterable[str], config: Mapping[str, Any]) -> int:
    """Return how many parameters one token uses: of routed experts (dim 0) ``num_experts_per_tok``, of the rest all."""
    experts = tuple(experts)
    return sum(
        math.prod(parameter.shape) * int(config["num_experts_per_tok"]) // parameter.shape[0]
        if in_any(parameter.fqn.rpartition(".")[0], experts)
        else math.prod(parameter.shape)
        for parameter in parameters
    )


def local_shape(parameter: ParameterPlan, *, topology: Topology) -> tuple[int, ...]:
    """Return the shape on one tp rank, before FSDP cuts it."""
    shape = list(parameter.shape)
    placement = placement_of(parameter.layout, "tp")
    if isinstance(placement, Shard):
        shape[placement.dim] //= topology.tp
    return tuple(shape)


def held_bytes(parameter: ParameterPlan, *, topology: Topology) -> int:
    """Return the bytes of the parameter on the rank that holds most of it."""
    shape = local_shape(parameter, topology=topology)
    rows = -(-shape[0] // topology.fsdp) if shape else 1
    return rows * math.prod(shape[1:]) * itemsize(parameter.dtype)


def completion_bytes(parameter: ParameterPlan, *, topology: Topology) -> int:
    """Return what a rank sends to complete a Partial gradient over tp, at least in fp32."""
    if not isinstance(placement_of(parameter.gradient, "tp"), Partial):
        return 0
    size = math.prod(parameter.shape) * itemsize(at_least_fp32(parameter.dtype))
    return 2 * size * (topology.tp - 1) // topology.tp


def fsdp_bytes(plan: BuildPlan) -> int:
    """Return what FSDP sends for one micro-batch: gathers in the compute dtype, reduces in the reduce dtype, HSDP's sums."""
    units = {unit.fqn: unit for unit in plan.units}
    return sum(
        _unit_bytes(parameter, units[unit_of(parameter.fqn, units)], topology=plan.topology) for parameter in plan.parameters
    )


def _unit_bytes(parameter: ParameterPlan, unit: UnitPlan, *, topology: Topology) -> int:
    shards, copies = topology.fsdp, topology.dp_replicate
    elements = math.prod(local_shape(parameter, topology=topology))
    held = parameter.dtype if is_integer(parameter.dtype) else unit.compute
    gathers = elements * itemsize(held) * (2 if unit.reshard_after_forward else 1) * (shards - 1) // shards
    if not parameter.trainable:
        return gathers
    reduced = elements * itemsize(unit.reduce)
    return gathers + reduced * (shards - 1) // shards + 2 * reduced // shards * (copies - 1) // copies
