"""Which protocol carries each axis whose communication is a plugin's, and whether this model, mesh and device can use it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import attrs

from hp_core.contracts import ModelAdapter, ParallelModuleSpec, Protocol, ProtocolPlan, Traffic
from hp_core.contracts.plan import ProtocolTraffic
from hp_core.errors import PlanError
from hp_core.mesh.sequence import sequence_parts
from hp_core.mesh.topology import Topology
from hp_core.planner.describe import Described, ancestors, in_any
from hp_core.planner.places import placed, refuse
from hp_core.plugins.lazy import call, problems
from hp_core.plugins.plugins import Plugins
from hp_core.recipe.schema import Protocols, Recipe
from hp_core.recipe.values import show

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}  # device -> the backend that its collectives run on
_KINDS = ("cp", "ep")
_CP = "protocols.cp"
_LOCAL = {"cp": "attention", "ep": "routed experts"}  # what must communicate over the axis


def plan_protocols(
    described: Sequence[Described], *, recipe: Recipe, topology: Topology, config: Mapping[str, Any]
) -> tuple[ProtocolPlan, ...]:
    """Return the protocols of the axes of degree > 1, cp before ep.

    HP101: no plugin provides it; HP580: the adapter, the device, the mask, the sub-axes or the model do not allow it, or a
    module that computes across the axis does not communicate; HP502: a size does not divide.
    """
    found = []
    for kind in _KINDS:
        if topology.degree(kind) > 1:
            choice, where = getattr(recipe.protocols, kind), recipe.where(f"protocols.{kind}")
            protocol = recipe.declarations.protocol(kind, choice.name, where=where)
            _check_use(protocol, recipe=recipe, config=config)
            planned = _plan(protocol, choice, topology=topology, where=where)
            if kind == "cp":
                parts = sequence_parts(cp=topology.cp, layout=planned.sequence_layout, inner=_inner(planned))
                _check_sequence(recipe.tokens[1], parts, topology=topology, where=recipe.where("train.sequence_length"))
            _check_problems(protocol, planned, config=config, topology=topology, where=where)
            _check_modules(described, protocol, adapter=recipe.adapter, topology=topology)
            found.append(planned)
    return tuple(found)


def plan_traffic(
    protocols: Sequence[ProtocolPlan],
    described: Sequence[Described],
    *,
    recipe: Recipe,
    topology: Topology,
    config: Mapping[str, Any],
) -> tuple[ProtocolTraffic, ...]:
    """Return what a rank sends by each protocol for a micro-batch, as the protocol itself tells."""
    found = []
    for planned in protocols:
        told = recipe.declarations.protocol(planned.kind, planned.name).traffic
        options = {**planned.options, "sub_axes": planned.sub_axes, "sequence_layout": planned.sequence_layout}
        bound = [item for item in described if item.parallel is not None and item.parallel.binding_kind == planned.kind]
        traffic = call(told, options, config, topology, recipe.tokens, gives=Traffic) if told else None
        found.append(ProtocolTraffic(kind=planned.kind, name=planned.name, modules=len(bound), traffic=traffic))
    return tuple(found)


def plan_component_protocols(
    spec: ParallelModuleSpec | None,
    *,
    choices: Protocols,
    declarations: Plugins | None,
    config: Mapping[str, Any],
    topology: Topology,
    where: str,
) -> tuple[ProtocolPlan, ...]:
    """Return the protocol that a component by itself speaks; none where it needs none on this mesh.

    HP101, HP580: as for a model; HP560: there are no plugins that could provide it.
    """
    kind = "none" if spec is None else spec.binding_kind
    if spec is None or kind not in _KINDS or topology.degree(kind) == 1:
        return ()
    choice = getattr(choices, kind)
    if declarations is None:
        text = f"the protocol {kind}:{choice.name} is to be looked up, but no plugins are given"
        raise PlanError("HP560", text, expected="plugins", where=where)
    protocol = declarations.protocol(kind, choice.name, where=where)
    _check_version(protocol, spec, "the component", where=where)
    with placed(lambda _: where, topology):
        planned = _plan(protocol, choice, topology=topology, where=where)
        _check_problems(protocol, planned, config=config, topology=topology, where=where)
    return (planned,)


def _plan(protocol: Protocol, choice: Any, *, topology: Topology, where: str) -> ProtocolPlan:
    planned = ProtocolPlan(
        kind=protocol.kind, name=protocol.name, version=protocol.version, implementation=protocol.implementation
    )
    if protocol.kind == "ep":
        return planned
    sub_axes = _sub_axes(protocol, choice.inner, topology=topology, where=where)
    if choice.outer is not None and not sub_axes:
        fix = f"leave {_CP}.outer out"
        _refuse(protocol, f"has no outer axis, but {_CP}.outer is set", expected="null", where=f"{_CP}.outer", fix=fix)
    layout = choice.sequence_layout or protocol.sequence_layout or "contiguous"
    legal = tuple(filter(None, (protocol.sequence_layout or "contiguous", *protocol.other_layouts)))
    if layout not in legal:
        fix, where = f"leave {_CP}.sequence_layout out", f"{_CP}.sequence_layout"
        _refuse(protocol, f"cannot work on a {layout} sequence", expected=" or ".join(legal), where=where, fix=fix)
    options = {"outer": choice.outer or "ring"} if sub_axes else {}
    return attrs.evolve(planned, options=options, sequence_layout=layout, sub_axes=sub_axes)


def _inner(planned: ProtocolPlan) -> int:
    return list(planned.sub_axes.values())[-1] if planned.sub_axes else 1


def _sub_axes(protocol: Protocol, inner: int | None, *, topology: Topology, where: str) -> dict[str, int]:
    if not protocol.sub_axes:
        if inner is not None:
            fix = f"leave {_CP}.inner out"
            _refuse(protocol, f"has one axis, but {_CP}.inner is set", expected="null", where=f"{_CP}.inner", fix=fix)
        return {}
    legal = [size for size in range(1, topology.cp + 1) if topology.cp % size == 0]
    if inner not in legal:
        text = f"cuts cp ({topology.cp}) into {' and '.join(protocol.sub_axes)}, and {_CP}.inner is {show(inner)}"
        fix = f"protocols: {{cp: {{name: {protocol.name}, inner: {legal[len(legal) // 2]}}}}}"
        _refuse(protocol, text, expected=f"one of {', '.join(map(str, legal))}", where=f"{_CP}.inner", fix=fix)
    assert inner is not None
    return dict(zip(protocol.sub_axes, (topology.cp // inner, inner), strict=True))


def _check_sequence(sequence: int, parts: int, *, topology: Topology, where: str) -> None:
    tp = topology.tp if topology.sequence_parallel else 1
    pieces = parts if (sequence // topology.cp) % tp == 0 else parts * tp
    if sequence % pieces:
        raise PlanError(
            "HP502",
            f"sequence_length ({sequence}) must be divisible by {pieces}, the pieces that cp and tp cut it into",
            where=f"{where}, mesh: {topology}",
            fix=f"use a multiple of {pieces}",
        )


def _check_use(protocol: Protocol, *, recipe: Recipe, config: Mapping[str, Any]) -> None:
    adapter, where = recipe.adapter, recipe.where(f"protocols.{protocol.kind}")
    name = f"{protocol.kind}:{protocol.name}"
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in adapter.protocols):
        usable = ", ".join(pattern for pattern in adapter.protocols if pattern.startswith(protocol.kind))
        _refuse(protocol, f"cannot be used by adapter {adapter.name}", expected=usable or f"{protocol.kind} = 1", where=where)
    backend = BACKENDS.get(recipe.device, recipe.device)
    if protocol.backends and backend not in protocol.backends:
        fix = _instead([other for other in _others(protocol, recipe) if not other.backends or backend in other.backends])
        text = f"does not work on {backend} ({recipe.device})"
        _refuse(protocol, text, expected=", ".join(protocol.backends), where=where, fix=fix)
    for mask, key in _masks(recipe, config) if protocol.kind == "cp" else ():
        if mask not in protocol.masks:
            text = f"cannot do {mask} attention, which {key} asks for"
            can = f"a protocol that can; it can do {', '.join(protocol.masks)}"
            able = [other for other in _others(protocol, recipe) if mask in other.masks]
            _refuse(protocol, text, expected=can, where=where, fix=_instead(able))


def _others(protocol: Protocol, recipe: Recipe) -> list[Protocol]:
    found = [provided.declaration for _, provided in sorted(recipe.declarations.protocols.items())]
    return [other for other in found if other.kind == protocol.kind and other != protocol]


def _instead(others: Sequence[Protocol]) -> str:
    """Return the fix that names other protocols."""
    return f"set protocols.{others[0].kind} to {' or '.join(other.name for other in others)}" if others else ""


def _masks(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (mask, recipe key) of what the model and the sections of plugins ask of attention."""
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        yield "sliding", "model.config.sliding_window"
    for section in recipe.sections.values():
        yield from section.masks() if hasattr(section, "masks") else ()


def _check_problems(
    protocol: Protocol, planned: ProtocolPlan, *, config: Mapping[str, Any], topology: Topology, where: str
) -> None:
    """Ask the protocol itself what it cannot do."""
    options = {**planned.options, "sub_axes": planned.sub_axes, "sequence_layout": planned.sequence_layout}
    for problem in problems(protocol.validate, options, config, topology):
        refuse(problem, "HP580", where=where)


def _check_modules(described: Sequence[Described], protocol: Protocol, *, adapter: ModelAdapter, topology: Topology) -> None:
    """Raise unless every module that computes across tokens (cp) or holds experts (ep) speaks the protocol in its version."""
    kind = protocol.kind
    across = _across(described, kind, adapter=adapter)
    if not across:
        degree = topology.degree(kind)
        raise PlanError(
            "HP580",
            f"mesh.{kind} is {degree}, but the model has no {_LOCAL[kind]}",
            expected="1",
            where=f"mesh.{kind}",
            fix=f"leave mesh.{kind} out",
        )
    for item in across:
        spec = item.parallel
        if spec is None or spec.binding_kind not in (kind, "mesh"):
            raise PlanError(
                "HP580",
                f"{item.info.fqn} ({item.info.class_name}) does not communicate over {kind}, whose degree is "
                f"{topology.degree(kind)}",
                expected=f"a module with a parallel_spec of kind {kind!r}",
                where=item.declared_by,
                fix=f"replace it by a component that does, or set mesh.{kind} to 1",
            )
        if spec.binding_kind == kind:
            _check_version(protocol, spec, item.info.fqn, where=item.declared_by)


def _check_version(protocol: Protocol, spec: ParallelModuleSpec, name: str, *, where: str) -> None:
    if spec.version != protocol.version:
        expected = f"{spec.version}, which {name} speaks"
        _refuse(protocol, f"has version {protocol.version}", expected=expected, where=where)


def _across(described: Sequence[Described], kind: str, *, adapter: ModelAdapter) -> list[Described]:
    """Return the modules that compute across the axis; what lies inside experts is their own business."""
    if kind == "cp":
        return [item for item in described if item.role == "attention"]
    found = {item.info.fqn: item for item in described if in_any(item.info.fqn, adapter.experts)}
    return [item for fqn, item in found.items() if not any(outer in found for outer in ancestors(fqn))]


def _refuse(protocol: Protocol, what: str, *, expected: str, where: str, fix: str = "") -> NoReturn:
    raise PlanError("HP580", f"protocol {protocol.kind}:{protocol.name} {what}", expected=expected, where=where, fix=fix)
