"""A plan as tables for a reader. Pure: the command prints what this returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from hp_core.contracts import (
    BoundaryPlan,
    BuildPlan,
    CollectivePlan,
    ModelAdapter,
    ParameterPlan,
    ProtocolPlan,
    Traffic,
    UnitPlan,
)
from hp_core.contracts.placement import describe
from hp_core.planner.collectives import describe_move
from hp_core.planner.figures import Figures, figures
from hp_core.planner.fold import fold
from hp_core.planner.units import fsdp_cut, unit_of

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@attrs.frozen(kw_only=True)
class Table:
    """A titled table; every row has as many cells as the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def headline(plan: BuildPlan, *, adapter: ModelAdapter) -> tuple[str, ...]:
    """Return the lines above the tables: model, mesh, sizes, work, plugins."""
    numbers, topology = figures(plan, adapter=adapter), plan.topology
    flags = f"sequence parallel {_on(topology.sequence_parallel)}, loss parallel {_on(topology.loss_parallel)}"
    flags += f", shared memory {_on(topology.shared_memory)}" if plan.device == "cpu" and topology.world > 1 else ""
    work = "" if numbers.flops_per_token is None else f", {_flops(numbers.flops_per_token)} per token to train"
    return (
        f"{plan.adapter}: {plan.model_class.rpartition(':')[2]}, {plan.model_dtype} on {plan.device}",
        f"mesh: {topology}; {topology.world} ranks, {flags}",
        *_protocols(plan),
        *_routers(plan),
        f"parameters: {numbers.total:,}, of which {numbers.active:,} are active for a token{work}",
        f"micro-batch: {plan.batch} x {plan.sequence} tokens for each of {topology.data} data-parallel parts",
        _wrapping(plan),
        f"plugins: {', '.join(plan.plugins)}",
    )


def _protocols(plan: BuildPlan) -> tuple[str, ...]:
    def told(protocol: ProtocolPlan) -> str:
        sizes = " ".join(f"{axis}={size}" for axis, size in protocol.sub_axes.items())
        details = ", ".join(filter(None, (protocol.sequence_layout, sizes)))
        return f"{protocol.kind} by {protocol.name}{details and f' ({details})'}"

    return (f"protocols: {', '.join(map(told, plan.protocols))}",) if plan.protocols else ()


def _routers(plan: BuildPlan) -> tuple[str, ...]:
    asked = plan.routers
    if asked is None:
        return ()
    found = [f"{asked.aux} balance loss x {asked.aux_coefficient:g}"] if asked.aux else []
    found += [f"z loss x {asked.z_coefficient:g}"] if asked.z_coefficient else []
    found += [f"correction biases moved by {asked.bias_update_rate:g} a step"] if asked.bias_update_rate else []
    return (f"routers: {len(asked.routers)} by {asked.scoring} scores; {', '.join(found)}",)


def tables(plan: BuildPlan, *, adapter: ModelAdapter) -> tuple[Table, ...]:
    """Return all tables of ``hp plan``: what a plan is made of, then what it costs."""
    numbers = figures(plan, adapter=adapter)
    found = (
        boundaries(plan),
        parameters(plan),
        collectives(plan),
        units(plan),
        replacements(plan),
        kernels(plan),
        changes(plan),
        protocols(plan),
        memory(numbers),
        traffic(numbers),
    )
    return tuple(table for table in found if table.rows)


def boundaries(plan: BuildPlan) -> Table:
    """One row for every kind of boundary: what it is, whether its body is varying on tp, who declared it."""
    rows = fold((_or_root(b.fqn), (b.cls.rpartition(":")[2], _varying(b), b.declared_by)) for b in plan.boundaries)
    return _table("boundaries", ("MODULE", "CLASS", "BODY ON TP", "DECLARED BY"), rows)


def parameters(plan: BuildPlan) -> Table:
    """One row for every kind of parameter: shape, dtype, placement, its gradient as the body makes it, and its unit.

    The placement is the model-parallel one and then FSDP's cut of what that leaves on a rank.
    """
    homes = {unit.fqn: unit for unit in plan.units}
    rows = fold(
        (
            p.fqn,
            (
                " x ".join(map(str, p.shape)),
                p.dtype,
                " ".join(filter(None, (describe(p.layout), fsdp_cut(plan, homes[unit_of(p.fqn, homes)])))),
                describe(p.gradient) if p.trainable else "frozen",
                _remarks(p),
                _unit_kind(p, unit_of(p.fqn, homes)),
            ),
        )
        for p in plan.parameters
    )
    return _table("parameters", ("PARAMETER", "SHAPE", "DTYPE", "PLACEMENT", "GRADIENT", "REMARKS", "FSDP UNIT"), rows)


def collectives(plan: BuildPlan) -> Table:
    """One row for every kind of collective, with the bytes that one rank sends in the forward and in the backward, and the sum
    of both over all its like. A port whose shape is not declared shows ``-``.
    """
    rows = [
        (name, count, (*cells[:2], *_sent(cells[2:], count)))
        for name, count, cells in fold(
            (f"{b.fqn}:{c.port}", (c.when, f"{c.axis} {describe_move(c)}", *_known(c)))
            for b in plan.boundaries
            for c in b.collectives
        )
    ]
    header = ("PORT", "WHEN", "FORWARD / BACKWARD", "FORWARD BYTES", "BACKWARD BYTES", "BYTES OF ALL")
    return _table("collectives per micro-batch and rank", header, rows)


def _known(collective: CollectivePlan) -> tuple[str, ...]:
    return (str(collective.forward_bytes), str(collective.backward_bytes)) if collective.elements else ("", "")


def _sent(cells: Sequence[str], count: int) -> tuple[str, ...]:
    if not all(cells):
        return ("-", "-", "-")
    forward, backward = map(int, cells)
    return f"{forward:,}", f"{backward:,}", f"{(forward + backward) * count:,}"


def units(plan: BuildPlan) -> Table:
    """One row for every kind of FSDP unit and what it does."""
    recomputed = {entry.fqn: entry.mode for entry in plan.recompute}
    rows = fold(
        (
            _or_root(unit.fqn),
            (
                unit.view,
                f"{unit.compute} / {unit.reduce}",
                _gathered(unit),
                recomputed.get(unit.fqn, "-"),
            ),
        )
        for unit in plan.units
    )
    return _table("FSDP units, inner first", ("MODULE", "MESH", "COMPUTE / REDUCE", "GATHERED PARAMETERS", "RECOMPUTE"), rows)


def _gathered(unit: UnitPlan) -> str:
    if not unit.wraps:
        return "not wrapped"
    return "freed after forward" if unit.reshard_after_forward else "kept until backward"


def replacements(plan: BuildPlan) -> Table:
    """One row for every kind of replaced module."""
    rows = fold(
        (
            r.fqn,
            (
                f"{r.source.rpartition(':')[2]} -> {r.constructor.rpartition(':')[2]}",
                ", ".join(f"{name}={value}" for name, value in {**r.arguments, **r.selectors}.items()) or "-",
                r.declared_by,
            ),
        )
        for r in plan.replacements
    )
    return _table("replacements", ("MODULE", "CLASS", "ARGUMENTS", "DECLARED BY"), rows)


def kernels(plan: BuildPlan) -> Table:
    """One row for every operator of every kind of component: the kernel that computes it, and why."""
    rows = fold((_or_root(kernel.fqn), (kernel.op, kernel.name, kernel.reason)) for kernel in plan.kernels)
    return _table("kernels", ("MODULE", "OPERATOR", "KERNEL", "WHY"), rows)


def changes(plan: BuildPlan) -> Table:
    """One row for every kind of change that an override, or the recipe's scheme, made."""
    rows = fold(
        (_or_root(change.fqn), (change.field, f"{change.before} -> {change.after}", change.rule, change.declared_by))
        for change in plan.changes
    )
    return _table("changed by the recipe", ("MODULE", "WHAT", "CHANGE", "RULE", "WRITTEN AT"), rows)


def protocols(plan: BuildPlan) -> Table:
    """One row for the protocol of each axis: what a rank sends for one layer, in elements of the compute dtype."""
    rows = tuple(
        (
            f"{entry.kind} by {entry.name}",
            str(entry.modules),
            *(("-", "-", "the protocol does not say") if entry.traffic is None else _told(entry.traffic)),
        )
        for entry in plan.traffic
    )
    header = ("PROTOCOL", "LAYERS", "FORWARD ELEMENTS", "BACKWARD ELEMENTS", "REMARKS")
    return Table(title="sent by protocols, each micro-batch, rank and layer", header=header, rows=rows)


def _told(traffic: Traffic) -> tuple[str, str, str]:
    beside = f"and {traffic.forward_bytes:,} and {traffic.backward_bytes:,} bytes beside them" if traffic.forward_bytes else ""
    return f"{traffic.forward:,}", f"{traffic.backward:,}", "; ".join(filter(None, (traffic.assumed, beside))) or "-"


def memory(numbers: Figures) -> Table:
    """Bytes held by one rank, and their sum."""
    rows = (
        ("parameters", "always", _bytes(numbers.parameter_bytes)),
        ("gradients", "until the optimizer's step", _bytes(numbers.gradient_bytes)),
        ("AdamW moments", "always", _bytes(numbers.optimizer_bytes)),
        ("gathered FSDP units", "at most", _bytes(numbers.gathered_bytes)),
        ("activations of one micro-batch", "at least", _bytes(numbers.activation_bytes)),
        ("total", "at its peak, about", _bytes(numbers.memory_bytes)),
    )
    return Table(title="memory of one rank", header=("WHAT", "WHEN", "BYTES"), rows=rows)


def traffic(numbers: Figures) -> Table:
    """Bytes sent by one rank for one micro-batch, forward and backward, and their sums."""
    sent = (
        ("at boundaries", numbers.boundary_forward_bytes, numbers.boundary_backward_bytes),
        ("to complete gradients over tp", 0, numbers.completion_bytes),
        ("by FSDP", numbers.fsdp_forward_bytes, numbers.fsdp_backward_bytes),
        *((f"over {axis}, by its protocol", *both) for axis, both in numbers.protocol_bytes.items()),
    )
    total = ("total", sum(row[1] for row in sent), sum(row[2] for row in sent))
    rows = tuple((what, _bytes(one), _bytes(other), _bytes(one + other)) for what, one, other in (*sent, total))
    return Table(title="sent by one rank, each micro-batch", header=("WHAT", "FORWARD", "BACKWARD", "BYTES"), rows=rows)


def _table(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, int, tuple[str, ...]]]) -> Table:
    return Table(title=title, header=header, rows=tuple((name, *cells) for name, _, cells in rows))


def _wrapping(plan: BuildPlan) -> str:
    """Return what FSDP does: how many units over how many ranks, or that it has nothing to do."""
    if not plan.wraps:
        return "FSDP: wraps nothing, since one rank holds every parameter, in the dtype that it is computed in"
    topology = plan.topology
    copies = f", {topology.dp_replicate} copies (dp_replicate)" if topology.dp_replicate > 1 else ""
    cut = f"cut over {topology.fsdp} ranks (dp_shard * cp)" if topology.fsdp > 1 else "whole on one rank"
    left = sum(not unit.wraps for unit in plan.units)
    beside = f"; {left} of experts, whole on one rank, are not wrapped" if left else ""
    return f"FSDP: wraps {len(plan.units) - left} units, {cut}{copies}{beside}"


def _or_root(fqn: str) -> str:
    return fqn or "(root)"


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _varying(boundary: BoundaryPlan) -> str:
    return ("varying" if boundary.varying else "invariant") + (f", in {boundary.compute}" if boundary.compute else "")


def _unit_kind(parameter: ParameterPlan, unit: str) -> str:
    """Name the unit so that rows of repeated layers stay equal: by how far above the parameter it is."""
    if not unit:
        return "root"
    return "own" if parameter.fqn.rpartition(".")[0] == unit else "layer"


def _remarks(parameter: ParameterPlan) -> str:
    found = [f"= {alias}" for alias in parameter.aliases]
    found += [str(parameter.view)] if parameter.view else []
    found += [str(transform) for transform in parameter.transforms]
    return ", ".join(found) or "-"


def _flops(count: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1e9, "GFLOP"), (1e6, "MFLOP")) if count >= s), (1e3, "kFLOP"))
    return f"{count / scale:.2f} {unit}"


def _bytes(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count:,}" if power == 0 else f"{count:,} ({count / 1024**power:.2f} {_UNITS[power]})"
