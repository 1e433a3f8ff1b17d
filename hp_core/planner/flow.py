"""The edges between boundaries: what leaves a producer must be what its consumer declared. Silent wrongness lives here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs

from hp_core.contracts import FlowRule, Layout, ModuleShardingSpec, Placement, Replicate, Shard
from hp_core.contracts.placement import AXES, describe, placement_of
from hp_core.errors import PlanError, suggest
from hp_core.planner.collectives import leaves

RESIDUAL, INPUT, OUTPUT = "@residual", "@input", "@output"
_VIEWS = {"flatten_tokens": (1, 0), "unflatten_tokens": (0, 1)}


@attrs.frozen
class Edge:
    """One value: the port it leaves (``FQN:output`` or a pseudo port) and the port it arrives at."""

    producer: str
    consumer: str
    view: str | None


def check_flow(
    specs: Mapping[str, ModuleShardingSpec],
    flow: Sequence[FlowRule],
    *,
    residual: Layout,
    adapter: str,
    added: Collection[str] = (),
    changed: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Check every edge of ``flow`` between the boundaries ``specs`` and return notes for a reader.

    Boundaries in ``added`` are a recipe's own, which the adapter cannot know: their ports need no entry. ``changed`` says where
    a boundary's layout was changed. HP523: producer and consumer disagree; a declared port is named by no entry; an entry names
    a port nobody declares.
    """
    if not flow:
        return (f"adapter {adapter} declares no flow: neighbouring boundaries are not compared",)
    pseudo = {RESIDUAL: residual, INPUT: {"cp": Shard(1)}}
    reached: set[str] = set()
    for rule in flow:
        for edge in edges(rule, specs):
            reached |= {edge.producer, edge.consumer}
            where = _where(edge, adapter=adapter, changed=changed)
            _check_edge(edge, specs=specs, pseudo=pseudo, where=where, fix=_fix(edge, changed))
    idle = {port for rule in flow for port in (rule.producer, rule.consumer) if not any(True for _ in _ports(port, specs))}
    _check_reached({fqn: spec for fqn, spec in specs.items() if fqn not in added}, reached, idle=idle, adapter=adapter)
    return tuple(f"{fqn} is a boundary of the recipe's own: its ports are not compared with their neighbours" for fqn in added)


def constant_ports(
    specs: Mapping[str, ModuleShardingSpec], flow: Sequence[FlowRule], *, owners: Collection[str]
) -> frozenset[str]:
    """Return the ports (``FQN:name``) that no gradient passes: what is computed from the model's inputs without parameters.

    ``owners``: the boundaries with parameters at or below them. The model's inputs are integers; without a flow none is known.
    """
    producers: dict[str, set[str]] = {}
    for rule in flow:
        for edge in edges(rule, specs):
            producers.setdefault(edge.consumer, set()).add(edge.producer)
    bare = {fqn: spec for fqn, spec in specs.items() if fqn not in owners and spec.in_src}
    found, before = {INPUT}, 0
    while len(found) > before:
        before = len(found)
        found |= {port for port, sources in producers.items() if not port.startswith("@") and sources <= found}
        for fqn, spec in bare.items():
            if all(f"{fqn}:{name}" in found for name in spec.in_src):
                found |= {f"{fqn}:{name}" for name in spec.out_src}
    return frozenset(found)


def edges(rule: FlowRule, fqns: Mapping[str, object]) -> Iterator[Edge]:
    """Yield the edges of a rule: all pairs of modules in ``fqns`` that its patterns match with the same ``{i}``."""
    consumers: dict[str, list[str]] = {}
    for captured, port in _ports(rule.consumer, fqns):
        consumers.setdefault(captured, []).append(port)
    shared = "{i}" in rule.producer and "{i}" in rule.consumer
    for captured, producer in _ports(rule.producer, fqns):
        groups = [consumers.get(captured, [])] if shared else consumers.values()
        for consumer in (port for group in groups for port in group):
            yield Edge(producer, consumer, rule.view)


def _ports(pattern: str, fqns: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (what ``{i}`` stands for, full port name) for every module that the pattern matches."""
    if pattern.startswith("@"):
        yield "", pattern
        return
    module, _, port = pattern.rpartition(":")
    compiled = re.compile(re.escape(module).replace(r"\{i\}", "(.+)").replace(r"\*", ".*"))
    for fqn in fqns:
        if hit := compiled.fullmatch(fqn):
            yield hit[1] if hit.groups() else "", f"{fqn}:{port}"


def _where(edge: Edge, *, adapter: str, changed: Mapping[str, str]) -> str:
    ends = dict.fromkeys(changed[fqn] for fqn in _modules(edge) if fqn in changed)
    return ", changed by ".join((f"adapter {adapter}", *ends))


def _fix(edge: Edge, changed: Mapping[str, str]) -> str:
    return "change the other side too, or neither" if any(fqn in changed for fqn in _modules(edge)) else ""


def _modules(edge: Edge) -> tuple[str, str]:
    return edge.producer.rpartition(":")[0], edge.consumer.rpartition(":")[0]


def _check_edge(
    edge: Edge, *, specs: Mapping[str, ModuleShardingSpec], pseudo: Mapping[str, Layout], where: str, fix: str
) -> None:
    left = _layout(edge.producer, specs=specs, pseudo=pseudo, outputs=True, where=where)
    if edge.consumer == OUTPUT:
        return
    wanted = _layout(edge.consumer, specs=specs, pseudo=pseudo, outputs=False, where=where)
    got = {axis: _view(placement_of(left, axis), edge.view) for axis in AXES}
    if any(got[axis] != placement_of(wanted, axis) for axis in AXES):
        how = f" after {edge.view}" if edge.view else ""
        raise PlanError(
            "HP523",
            f"{edge.producer} leaves as {describe(left)}{how}, but {edge.consumer} declares {describe(wanted)}",
            expected="equal layouts on both sides",
            where=where,
            fix=fix,
        )


def _layout(
    port: str, *, specs: Mapping[str, ModuleShardingSpec], pseudo: Mapping[str, Layout], outputs: bool, where: str
) -> Layout:
    if port in pseudo:
        return pseudo[port]
    fqn, _, name = port.rpartition(":")
    spec = specs[fqn]
    if name not in (spec.out_src if outputs else spec.in_src):
        kind, known = ("output", spec.out_src) if outputs else ("input", spec.in_src)
        text = f"the flow names {port}, but {fqn} declares no {kind} {name!r}{suggest(name, known)}"
        raise PlanError("HP523", text, expected=", ".join(known) or f"no {kind}s", where=where)
    return leaves(spec, name) if outputs else spec.in_src[name]


def _view(placement: Placement, view: str | None) -> Placement | None:
    """Return the placement after the view; None where the view cannot be taken of it."""
    if view is None or isinstance(placement, Replicate):
        return placement
    before, after = _VIEWS[view]
    return Shard(after) if placement == Shard(before) else None


def _check_reached(specs: Mapping[str, ModuleShardingSpec], reached: set[str], *, idle: set[str], adapter: str) -> None:
    """Raise HP523 for a declared port that no entry names; ``idle``: what entries name and no module is called."""
    where = f"adapter {adapter}"
    for fqn, spec in specs.items():
        for port in (f"{fqn}:{name}" for name in (*spec.in_src, *spec.out_src)) if spec.is_boundary else ():
            if port in reached:
                continue
            for name in sorted(idle):
                if meant := suggest(name, [port]):
                    raise PlanError("HP523", f"a flow entry names {name!r}, which this model does not have{meant}", where=where)
            expected = "an entry for every declared port (@input, @residual and @output are ports too)"
            raise PlanError("HP523", f"no flow entry names {port}", expected=expected, where=where)
