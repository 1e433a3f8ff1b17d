"""One module or one parameter of a plan in full, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator

from hp_core.contracts import BoundaryPlan, BuildPlan, ModuleShardingSpec, ParameterPlan, Partial, Replicate, Shard
from hp_core.contracts.placement import describe, placement_of
from hp_core.errors import PlanError, suggest
from hp_core.planner.collectives import describe_move, edges, is_varying
from hp_core.planner.describe import nearest
from hp_core.planner.units import fsdp_cut, shards, unit_of


def explain(plan: BuildPlan, fqn: str) -> list[str]:
    """Return lines about the boundary, the parameter (under any of its names) or the group of modules called ``fqn``.

    HP525 if the plan has nothing of that name.
    """
    for boundary in plan.boundaries:
        if boundary.fqn == fqn:
            return _boundary(plan, boundary)
    for parameter in plan.parameters:
        if fqn in (parameter.fqn, *parameter.aliases):
            return _parameter(plan, parameter)
    return _inside(plan, fqn) or _around(plan, fqn)


def why_varying(spec: ModuleShardingSpec) -> str:
    """Return the first layout that makes the body varying on tp, or that there is none."""
    arguments = {name: spec.in_dst.get(name, layout) for name, layout in spec.in_src.items()}
    for what, layouts in (("parameter", spec.params), ("input", arguments), ("output", spec.out_src)):
        for name, layout in layouts.items():
            if not isinstance(placement_of(layout, "tp"), Replicate):
                return f"{what} {name} is {placement_of(layout, 'tp')} on tp"
    return "no parameter, input or output of its body is Shard or Partial on tp"


def _why(plan: BuildPlan, boundary: BoundaryPlan) -> str:
    """Return why a body is varying or not; the recipe's own boundaries are as the bodies around them are."""
    cut = is_varying(boundary.spec, topology=plan.topology)
    if cut == boundary.varying:
        return why_varying(boundary.spec)
    around = nearest(boundary.fqn.rpartition(".")[0], {other.fqn: other for other in plan.boundaries if other != boundary})
    if boundary.varying and around is None:
        return "a parameter of a boundary inside it is cut on tp"
    return f"the body of {around or 'the root'} around it is"


def _boundary(plan: BuildPlan, boundary: BoundaryPlan) -> list[str]:
    body = "varying" if boundary.varying else "invariant"
    reason = "tp is 1" if plan.topology.tp == 1 else _why(plan, boundary)
    lines = [
        f"{boundary.fqn or '(root)'} is a boundary of class {boundary.cls}",
        f"  declared by: {boundary.declared_by}",
        f"  body on tp: {body}, because {reason}",
    ]
    lines += [f"  replaced: {r.source} by {r.declared_by}" for r in plan.replacements if r.fqn == boundary.fqn]
    lines += [f"  computed in: {boundary.compute}"] if boundary.compute else []
    lines += [
        f"  changed: {c.field}: {c.before} -> {c.after} by {c.rule}, {c.declared_by}"
        for c in plan.changes
        if c.fqn == boundary.fqn
    ]
    lines += _binding(plan, boundary)
    lines += _ports(boundary)
    for parameter in plan.parameters:
        if parameter.owner == boundary.fqn:
            placement, gradient = describe(parameter.layout) + _cut(plan, parameter), describe(parameter.gradient)
            lines.append(f"  parameter {parameter.fqn}: {placement}, gradient {gradient}")
    return [*lines, f"  FSDP unit: {_unit(plan, boundary.fqn + '.')}"]


def _ports(boundary: BoundaryPlan) -> Iterator[str]:
    moves = {(move.port, move.when): move for move in boundary.collectives}
    for port, when, before, after in edges(boundary.spec):
        kind = "input" if when == "enter" else "output"
        text = f"  {kind} {port}: {describe(before)} -> {describe(after)}"
        move = moves.get((port, when))
        if move is None:
            yield f"{text}, no collective"
        else:
            sent = f"{move.forward_bytes:,} bytes forward, {move.backward_bytes:,} backward"
            size = f", {sent}, of {move.elements:,} elements" if move.elements else ""
            yield f"{text}, {describe_move(move)} on {move.axis}{size}"


def _parameter(plan: BuildPlan, parameter: ParameterPlan) -> list[str]:
    boundary = next((b for b in plan.boundaries if b.fqn == parameter.owner), None)
    declared = boundary.declared_by if boundary else "isolated_subtrees of the adapter"
    lines = [
        f"{parameter.fqn} is a parameter of shape {' x '.join(map(str, parameter.shape))}, {parameter.dtype}",
        f"  declared by: {parameter.owner or '(root)'}: {declared}",
        f"  placement: {describe(parameter.layout)}{_cut(plan, parameter)}",
        f"  gradient: {describe(parameter.gradient)}, because {_why_gradient(plan, parameter, boundary)}",
        f"  trainable: {'yes' if parameter.trainable else 'no'}",
    ]
    lines += [f"  tied to: {alias}" for alias in parameter.aliases]
    lines += [f"  view: {parameter.view}"] if parameter.view else []
    lines += [f"  transform from Hugging Face: {transform}" for transform in parameter.transforms]
    lines += [f"  init: {parameter.init.kind}, entry {parameter.init.match!r}"] if parameter.init else []
    return [*lines, f"  FSDP unit: {_unit(plan, parameter.fqn)}"]


def _binding(plan: BuildPlan, boundary: BoundaryPlan) -> list[str]:
    if boundary.parallel is None:
        return []
    kind = boundary.parallel.binding_kind
    protocol = plan.protocol(kind)
    return [f"  binding: {boundary.parallel.protocol}, {kind}{f' by {protocol.name}' if protocol else ''}"]


def _why_gradient(plan: BuildPlan, parameter: ParameterPlan, boundary: BoundaryPlan | None) -> str:
    if isinstance(parameter.gradient.get("ep"), Shard):
        return "its experts see all tokens of the ep group that chose them"
    match placement_of(parameter.gradient, "tp"):
        case Shard():
            return "a sharded parameter has a sharded gradient"
        case Partial():
            assert boundary is not None
            return f"it is replicated in a varying body ({_why(plan, boundary)}); the view completes it once"
    return "tp is 1" if plan.topology.tp == 1 else "it is replicated in an invariant body: complete on every rank"


def _cut(plan: BuildPlan, parameter: ParameterPlan) -> str:
    """Return what FSDP does with what the layout leaves on a rank."""
    homes = {unit.fqn: unit for unit in plan.units}
    unit = homes[unit_of(parameter.fqn, homes)]
    cut, parts = fsdp_cut(plan, unit), shards(unit, topology=plan.topology)
    return f" {cut}: FSDP cuts what is there over {parts} ranks" if cut else ""


def _unit(plan: BuildPlan, fqn: str) -> str:
    homes = {unit.fqn: unit for unit in plan.units}
    unit = homes[unit_of(fqn, homes)]
    return (unit.fqn or "(root)") + ("" if unit.wraps else ", not wrapped")


def _inside(plan: BuildPlan, fqn: str) -> list[str]:
    found = [b.fqn for b in plan.boundaries if fqn == "" or b.fqn.startswith(f"{fqn}.")]
    return [f"{fqn or '(root)'} is no boundary; it contains these:", *(f"  {name}" for name in found)] if found else []


def _around(plan: BuildPlan, fqn: str) -> list[str]:
    owned = [p for p in plan.parameters if p.fqn.startswith(f"{fqn}.")]
    if owned:
        lines = [f"{fqn} lies in the boundary {owned[0].owner or '(root)'}:"]
        for parameter in owned:
            lines += [f"  {line}" for line in _parameter(plan, parameter)]
        return lines
    names = [name for p in plan.parameters for name in (p.fqn, *p.aliases)] + [b.fqn for b in plan.boundaries]
    raise PlanError("HP525", f"the plan has no module or parameter {fqn!r}{suggest(fqn, names)}")
