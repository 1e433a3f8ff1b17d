"""What a body can compute, and so what an override may ask of it. Pure.

The code inside a boundary is plain single-device code: it computes whatever it is given, right or not. So a declaration says
which combinations of ``params``, ``in_dst`` and ``out_src`` mean the same function, and an override picks one of them:

- *declared*: what the layout provider says;
- *whole*: nothing is cut, every rank computes everything; not where heads are counted per rank or a view slices a parameter;
- *each token*: whole parameters, every port cut on its tokens; only where the layout says ``each_token``.

What arrives (``in_src``) and what leaves (``out_dst``) may change where the flow compares it with a neighbour.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs

from hp_core.contracts import FlowRule, Layout, ModuleShardingSpec, Placement, Replicate, Shard
from hp_core.contracts.placement import AXES, describe, placement_of
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.collectives import edges, is_varying, leaves
from hp_core.planner.describe import Described, nearest
from hp_core.planner.flow import OUTPUT
from hp_core.planner.flow import edges as flow_edges
from hp_core.planner.overrides import Overridden
from hp_core.recipe.values import placement_text

FIELDS = ("params", "in_dst", "out_src")
_TOKENS = ("S", "T")
Body = Mapping[str, Mapping[str, Layout]]  # field -> name -> layout on every axis
Difference = tuple[str, str, str]  # field, name, layout as a recipe writes it


def legal_bodies(spec: ModuleShardingSpec, *, bound: bool = False) -> tuple[Body, ...]:
    """Return the combinations of layouts that the body of ``spec`` can compute, the declared one first, each once.

    ``bound``: it communicates over cp or ep itself, and is left as declared.
    """
    declared = body_of(spec)
    found = [declared]
    if not spec.local_attrs and not spec.views and not bound:
        found.append(_on_tp(declared, {}))
        if spec.each_token and spec.in_src.keys() | spec.out_src.keys() <= spec.ports.keys():
            found.append(_on_tp(declared, {name: _tokens(spec, name) for name in (*spec.in_src, *spec.out_src)}))
    return tuple(body for place, body in enumerate(found) if body not in found[:place])


def body_of(spec: ModuleShardingSpec) -> Body:
    """Return what the body of ``spec`` works on: its parameters, arguments as it needs and outputs as it makes them."""
    arguments = {name: spec.in_dst.get(name, layout) for name, layout in spec.in_src.items()}
    fields = {"params": spec.params, "in_dst": arguments, "out_src": spec.out_src}
    return {field: {name: _full(layout) for name, layout in layouts.items()} for field, layouts in fields.items()}


def check_overridden(overridden: Overridden, *, flow: Sequence[FlowRule], topology: Topology) -> None:
    """Raise HP530 for an override that asks of a body what it cannot compute, of a port what no neighbour is compared with,
    or of a boundary of its own more than to own parameters.
    """
    if not overridden.added and all(map(operator.is_, overridden.described, overridden.derived)):
        return
    final = {item.info.fqn: item for item in overridden.described}
    specs = whole_specs(overridden)
    compared = _compared(flow, final)
    for item in overridden.derived:
        fqn, spec = item.info.fqn, specs[item.info.fqn]
        if spec != item.spec:
            where = _written(fqn, overridden)
            _check_body(fqn, legal_bodies(item.spec, bound=_is_bound(item, topology)), body_of(spec), where=where)
            _check_ports(fqn, item.spec, spec, compared=compared, where=where)
    varying = varying_bodies(overridden, topology=topology)
    for fqn in sorted(overridden.added):
        _check_added(final[fqn], varying[fqn], outer=nearest(fqn, specs))


def varying_bodies(overridden: Overridden, *, topology: Topology) -> dict[str, bool]:
    """Return for every boundary whether its body is varying on tp.

    A boundary of the recipe's own is part of the body around it: what moved into it still counts there, and it is varying as
    that one is.
    """
    specs = whole_specs(overridden)
    found = {fqn: is_varying(spec, topology=topology) for fqn, spec in specs.items()}
    outer = {fqn: nearest(fqn, specs) for fqn in overridden.added}
    return found | {fqn: around is not None and found[around] for fqn, around in outer.items()}


def whole_specs(overridden: Overridden) -> dict[str, ModuleShardingSpec]:
    """Return the layouts of the derived boundaries after all overrides, with the parameters that moved into added ones."""
    final = {item.info.fqn: item.spec for item in overridden.described}
    if not overridden.added:
        return final
    moved = {
        _join(fqn, path): layout
        for fqn, spec in final.items()
        if fqn in overridden.added
        for path, layout in spec.params.items()
    }
    found = {}
    for item in overridden.derived:
        fqn, spec = item.info.fqn, final[item.info.fqn]
        back = {path: moved[_join(fqn, path)] for path in item.spec.params if _join(fqn, path) in moved}
        found[fqn] = attrs.evolve(spec, params={**spec.params, **back}) if back else spec
    return found


def _is_bound(item: Described, topology: Topology) -> bool:
    kind = item.parallel.binding_kind if item.parallel is not None else "none"
    return kind in ("cp", "ep") and topology.degree(kind) > 1


def _check_body(fqn: str, legal: Sequence[Body], asked: Body, *, where: str) -> None:
    wrong = [_differences(asked, body) for body in legal]
    if not all(wrong):
        return
    nearest_one = min(wrong, key=len)
    given = _differences(legal[0], asked)
    raise PlanError(
        "HP530",
        f"{fqn or 'the root'} cannot compute with {_told(given)}",
        expected=" or ".join(_shown(body) for body in legal),
        where=where,
        fix=f"leave that out, or set {_told(nearest_one)}",
    )


def _check_ports(
    fqn: str, before: ModuleShardingSpec, after: ModuleShardingSpec, *, compared: Collection[str], where: str
) -> None:
    for port, one, other in _crossing(before, after):
        if _full(one) != _full(other) and f"{fqn}:{port}" not in compared:
            raise PlanError(
                "HP530",
                f"{fqn}:{port} would cross the boundary as {describe(other)}, which no declared neighbour is compared with",
                expected=f"{describe(one)}, as declared",
                where=where,
                fix="leave that port as it is",
            )


def _crossing(before: ModuleShardingSpec, after: ModuleShardingSpec) -> Iterator[tuple[str, Layout, Layout]]:
    """Yield (port, layout, layout) of what arrives and leaves in both specs."""
    yield from ((name, before.in_src[name], layout) for name, layout in after.in_src.items() if name in before.in_src)
    yield from ((name, leaves(before, name), leaves(after, name)) for name in after.out_src if name in before.out_src)


def _check_added(item: Described, varying: bool, *, outer: str | None) -> None:
    fqn = item.info.fqn or "the root"
    inside = "nothing around it is cut" if outer is None else f"the body of {outer} is {'varying' if varying else 'invariant'}"
    for port, _, before, after in edges(item.spec):
        if _full(before) != _full(after):
            raise PlanError(
                "HP530",
                f"{fqn} is a boundary of the recipe's own and would move {port} from {describe(before)} to {describe(after)}",
                expected=f"one layout on both sides: {inside}, and collectives are made at its edge",
                where=item.declared_by,
                fix="give the same layout as src and dst",
            )
        if not varying and outer is not None and placement_of(before, "tp") != Replicate():
            raise PlanError(
                "HP530",
                f"{fqn} is a boundary of the recipe's own and declares {port} as {describe(before)}",
                expected=f"replicate: {inside}, so every rank holds all of it",
                where=item.declared_by,
            )


def _compared(flow: Sequence[FlowRule], fqns: Mapping[str, object]) -> set[str]:
    """Return the ports that the flow compares with a neighbour: those that only reach the model's output are not."""
    found: set[str] = set()
    for rule in flow:
        if rule.consumer != OUTPUT:
            for edge in flow_edges(rule, fqns):
                found |= {edge.producer, edge.consumer}
    return found


def _differences(asked: Body, body: Body) -> list[Difference]:
    """Return (field, name, what to write) where ``body`` differs from ``asked``; names in one of them only do not count."""
    return [
        (field, name, _written_as(body[field][name], layout))
        for field in FIELDS
        for name, layout in asked[field].items()
        if name in body[field] and layout != body[field][name]
    ]


def _written_as(layout: Layout, other: Layout) -> str:
    """Return the placements that ``other`` lacks, as a recipe writes them: ``{tp: shard(0)}``."""
    parts = [f"{axis}: {placement_text(layout[axis])}" for axis in AXES if layout[axis] != other[axis]]
    return f"{{{', '.join(parts)}}}"


def _written(fqn: str, overridden: Overridden) -> str:
    """Return where the last override of a boundary, or of one inside it, is written."""
    prefix = f"{fqn}." if fqn else ""
    places = [change.declared_by for change in overridden.changes if change.fqn == fqn or change.fqn.startswith(prefix)]
    return places[-1]


def _told(differences: Sequence[Difference]) -> str:
    """Return the differences as a recipe writes them: ``params: {weight: {tp: shard(0)}}``."""
    fields = {field: [f"{name}: {layout}" for other, name, layout in differences if other == field] for field in FIELDS}
    return ", ".join(f"{field}: {{{', '.join(parts)}}}" for field, parts in fields.items() if parts)


def _shown(body: Body) -> str:
    """Return a body in short: one placement for a whole field where its names agree."""
    parts = []
    for field in FIELDS:
        found = {name: placement_text(placement_of(layout, "tp")) for name, layout in body[field].items()}
        if len(set(found.values())) == 1:
            parts.append(f"{field} {next(iter(found.values()))}")
        elif found:
            parts.append(f"{field} {{{', '.join(f'{name}: {text}' for name, text in found.items())}}}")
    return f"({', '.join(parts)})"


def _on_tp(body: Body, ports: Mapping[str, Placement]) -> Body:
    """Return the body with whole parameters and every port as ``ports`` says on tp, Replicate where it says nothing."""
    return {
        field: {
            name: {**layout, "tp": Replicate() if field == "params" else ports.get(name, Replicate())}
            for name, layout in layouts.items()
        }
        for field, layouts in body.items()
    }


def _tokens(spec: ModuleShardingSpec, name: str) -> Placement:
    """Return the cut of a port on its tokens; a port without any is whole."""
    shape = spec.ports[name].shape
    return next((Shard(dim) for dim, size in enumerate(shape) if size in _TOKENS), Replicate())


def _full(layout: Layout) -> dict[str, Placement]:
    return {axis: placement_of(layout, axis) for axis in AXES}


def _join(fqn: str, path: str) -> str:
    return f"{fqn}.{path}" if fqn else path
