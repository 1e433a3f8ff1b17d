"""What a plan costs: parameters, memory and bytes sent, per rank. Estimates from sizes alone, nothing is measured.

Memory is :mod:`hp_core.planner.memory`'s. The optimizer is AdamW: two moments in the parameter's dtype. Bytes are what one rank
sends for one micro-batch, with the ring algorithms of :mod:`hp_core.planner.collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from hp_core.contracts import BuildPlan, ModelAdapter, ParameterPlan, Partial, UnitPlan
from hp_core.contracts.placement import placement_of
from hp_core.mesh.topology import Topology
from hp_core.planner.collectives import is_integer, itemsize
from hp_core.planner.describe import in_any
from hp_core.planner.memory import activation_bytes, gathered_bytes, held_bytes, local_shape
from hp_core.planner.parameters import at_least_fp32
from hp_core.planner.units import shards, unit_of
from hp_core.plugins.lazy import call


@attrs.frozen(kw_only=True)
class Figures:
    """Parameter counts, training FLOPs per token (None if the adapter gives none), bytes held and bytes sent per rank.

    ``total`` and ``active`` count what a checkpoint holds: parameters, and saved buffers of floating dtypes.
    ``protocol_bytes``: axis -> bytes sent over it by modules that communicate by themselves, forward and backward.
    ``gathered_bytes`` and ``activation_bytes`` are there for a time, the others always; ``memory_bytes`` is their sum.
    """

    total: int
    active: int
    flops_per_token: float | None
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    activation_bytes: int
    boundary_forward_bytes: int
    boundary_backward_bytes: int
    completion_bytes: int
    fsdp_forward_bytes: int
    fsdp_backward_bytes: int
    protocol_bytes: Mapping[str, tuple[int, int]] = attrs.field(factory=dict)

    @property
    def memory_bytes(self) -> int:
        """All that one rank holds at its peak, by these estimates."""
        parts = (self.parameter_bytes, self.gradient_bytes, self.optimizer_bytes, self.gathered_bytes, self.activation_bytes)
        return sum(parts)


def figures(plan: BuildPlan, *, adapter: ModelAdapter) -> Figures:
    """Return the figures of ``plan``, which ``adapter`` made possible."""
    homes = {unit.fqn: unit for unit in plan.units}
    held = [(p, held_bytes(p, homes[unit_of(p.fqn, homes)], topology=plan.topology)) for p in plan.parameters]
    gradients = sum(size for parameter, size in held if parameter.trainable)
    collectives = [collective for boundary in plan.boundaries for collective in boundary.collectives]
    forward, backward = fsdp_bytes(plan)
    saved = sum(math.prod(b.shape) for b in plan.buffers if b.persistent and not is_integer(b.dtype))
    return Figures(
        total=saved + sum(math.prod(parameter.shape) for parameter in plan.parameters),
        active=saved + active_parameters(plan.parameters, experts=adapter.experts, config=plan.config),
        flops_per_token=call(adapter.flops, plan.config, plan.sequence, gives=(int, float)) if adapter.flops else None,
        parameter_bytes=sum(size for _, size in held),
        gradient_bytes=gradients,
        optimizer_bytes=2 * gradients,
        gathered_bytes=gathered_bytes(plan),
        activation_bytes=activation_bytes(plan, experts=adapter.experts),
        boundary_forward_bytes=sum(collective.forward_bytes for collective in collectives),
        boundary_backward_bytes=sum(collective.backward_bytes for collective in collectives),
        completion_bytes=sum(completion_bytes(p, topology=plan.topology) for p in plan.parameters if p.trainable),
        fsdp_forward_bytes=forward,
        fsdp_backward_bytes=backward,
        protocol_bytes=protocol_bytes(plan),
    )


def protocol_bytes(plan: BuildPlan) -> dict[str, tuple[int, int]]:
    """Return what a rank sends over cp and over ep, forward and backward, by axis; of all modules that communicate."""
    size = itemsize(next((unit.compute for unit in plan.units), plan.model_dtype))
    found: dict[str, tuple[int, int]] = {}
    for entry in plan.traffic:
        if entry.traffic is not None:
            forward = entry.traffic.forward * size + entry.traffic.forward_bytes
            backward = entry.traffic.backward * size + entry.traffic.backward_bytes
            found[entry.kind] = (forward * entry.modules, backward * entry.modules)
    return found


def active_parameters(parameters: Iterable[ParameterPlan], *, experts: Iterable[str], config: Mapping[str, Any]) -> int:
    """Return how many parameters one token uses: of routed experts (dim 0) ``num_experts_per_tok``, of the rest all."""
    experts = tuple(experts)
    return sum(
        math.prod(parameter.shape) * int(config["num_experts_per_tok"]) // parameter.shape[0]
        if in_any(parameter.fqn.rpartition(".")[0], experts)
        else math.prod(parameter.shape)
        for parameter in parameters
    )


def completion_bytes(parameter: ParameterPlan, *, topology: Topology) -> int:
    """Return what a rank sends to complete a Partial gradient over tp, at least in fp32."""
    if not isinstance(placement_of(parameter.gradient, "tp"), Partial):
        return 0
    size = math.prod(parameter.shape) * itemsize(at_least_fp32(parameter.dtype))
    return 2 * size * (topology.tp - 1) // topology.tp


def fsdp_bytes(plan: BuildPlan) -> tuple[int, int]:
    """Return what FSDP sends for one micro-batch, forward and backward: gathers in the compute dtype; in the backward also
    reduces in the reduce dtype, and HSDP's sums. Nothing where it wraps nothing.
    """
    units = {unit.fqn: unit for unit in plan.units}
    sent = [_unit_bytes(p, units[unit_of(p.fqn, units)], topology=plan.topology) for p in plan.parameters]
    return sum(forward for forward, _ in sent), sum(backward for _, backward in sent)


def _unit_bytes(parameter: ParameterPlan, unit: UnitPlan, *, topology: Topology) -> tuple[int, int]:
    if not unit.wraps:
        return 0, 0
    parts, copies = shards(unit, topology=topology), topology.dp_replicate
    elements = math.prod(local_shape(parameter, topology=topology))
    held = parameter.dtype if is_integer(parameter.dtype) else unit.compute
    gather = elements * itemsize(held) * (parts - 1) // parts
    again = gather if unit.reshard_after_forward else 0
    if not parameter.trainable:
        return gather, again
    reduced = elements * itemsize(unit.reduce)
    return gather, again + reduced * (parts - 1) // parts + 2 * reduced // parts * (copies - 1) // copies
