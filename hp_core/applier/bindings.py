"""Handing out bindings: all are prepared before the first module gets one, and the groups are the job's own."""

from __future__ import annotations

from typing import Any

from torch import nn

from hp_core.contracts.parallel import ParallelBinding, ParallelModuleSpec
from hp_core.contracts.plan import BoundaryPlan, BuildPlan, ProtocolPlan
from hp_core.contracts.protocol import CPContext, EPContext
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_core.models.state import state_of, update
from hp_core.plugins.lazy import load

_CONTEXTS = {"cp": CPContext, "ep": EPContext}


def check_bindings(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Raise HP551 unless every module that is to be bound can be, and none is already. Nothing is changed."""
    for boundary in communicating(plan):
        module = model.get_submodule(boundary.fqn)
        state = state_of(module)
        if state is not None and state.binding is not None:
            raise PlanError("HP551", f"{boundary.fqn} ({boundary.cls}) is bound already", expected="one owner of its binding")
        _check_protocol(boundary, plan, mesh)


def bind(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Prepare a binding for every module that communicates, then hand them out. All ranks call this.

    Modules with equal options share a context. A class of the model itself has no ``bind_parallel``: its functions read
    ``module.hp.binding``.
    """
    contexts: dict[str, Any] = {}
    prepared = [(boundary, _prepare(boundary, plan, mesh, contexts)) for boundary in communicating(plan)]
    for boundary, binding in prepared:
        module: Any = model.get_submodule(boundary.fqn)
        update(module, boundary.fqn, binding=binding)
        if hasattr(module, "bind_parallel"):
            module.bind_parallel(binding)


def validate_materialized(model: nn.Module, plan: BuildPlan) -> None:
    """Let every bound module check itself now that its weights are there; HP551 for the first problem."""
    for boundary in communicating(plan):
        spec = _spec(boundary)
        module = model.get_submodule(boundary.fqn)
        state = state_of(module)
        if spec.validate_materialized is None or state is None:
            continue
        for problem in load(spec.validate_materialized)(module, state.binding):
            raise PlanError(
                problem.code or "HP551",
                problem.what,
                expected=problem.expected,
                where=problem.where or boundary.fqn,
                fix=problem.fix,
            )


def communicating(plan: BuildPlan) -> list[BoundaryPlan]:
    """Return the boundaries that get a binding, in order; those that were bound before are not among them."""
    return [
        boundary
        for boundary in plan.boundaries
        if boundary.parallel is not None and boundary.parallel.binding_kind != "none" and boundary.fqn not in plan.built
    ]


def _spec(boundary: BoundaryPlan) -> ParallelModuleSpec:
    assert boundary.parallel is not None
    return boundary.parallel


def _check_protocol(boundary: BoundaryPlan, plan: BuildPlan, mesh: MeshContext) -> None:
    kind = _spec(boundary).binding_kind
    if kind in _CONTEXTS and mesh.axis(kind).size > 1 and plan.protocol(kind) is None:
        raise PlanError(
            "HP551",
            f"{boundary.fqn} ({boundary.cls}) is to be bound over {kind} ({mesh.axis(kind).size})",
            expected=f"a protocol over {kind} in the plan",
        )


def _prepare(boundary: BoundaryPlan, plan: BuildPlan, mesh: MeshContext, contexts: dict[str, Any]) -> ParallelBinding:
    spec = _spec(boundary)
    protocol = plan.protocol(spec.binding_kind)
    if protocol is None:
        return ParallelBinding(mesh=mesh)
    options = {**protocol.options, "sub_axes": protocol.sub_axes, "sequence_layout": protocol.sequence_layout, **spec.options}
    key = repr((protocol.kind, sorted(options.items(), key=lambda item: item[0])))
    if key not in contexts:
        contexts[key] = _context(protocol, mesh, options)
    return ParallelBinding(mesh=mesh, **{protocol.kind: contexts[key]})


def _context(protocol: ProtocolPlan, mesh: MeshContext, options: dict[str, Any]) -> Any:
    context = load(protocol.implementation)(mesh, options)
    expected = _CONTEXTS[protocol.kind]
    if not isinstance(context, expected):
        raise PlanError(
            "HP551",
            f"protocol {protocol.kind}:{protocol.name} gives a {type(context).__name__}",
            expected=f"an instance of {expected.__name__}",
            where=protocol.implementation,
        )
    return context
