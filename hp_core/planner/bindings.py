"""Modules that communicate by themselves: does the declaration fit the class, its layout, its neighbours and the mesh?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hp_core.contracts import LayoutContext, ParallelModuleSpec, Shard, indivisible
from hp_core.contracts.validate_parallel import validate_member, validate_native
from hp_core.errors import PlanError
from hp_core.planner.describe import Described, ancestors
from hp_core.planner.places import refuse
from hp_core.plugins.lazy import problems


def check_bindings(described: Sequence[Described], *, context: LayoutContext) -> None:
    """Raise unless every module that communicates keeps its contract and none is nested in another of its kind.

    HP402, HP403: the declaration itself; HP522: the class refuses its layout; HP581: experts that are not cut by whole
    experts over ep, nested owners; HP502: experts that ep does not divide.
    """
    owners = {item.info.fqn: item.parallel for item in described if item.parallel is not None}
    for item in described:
        if item.parallel is not None:
            check_binding(item, item.parallel, context=context)
            _check_nesting(item, item.parallel, owners)


def check_binding(item: Described, spec: ParallelModuleSpec, *, context: LayoutContext) -> None:
    """Raise what :func:`check_bindings` raises for one module by itself."""
    if item.info.parallel is not None:
        validate_member(spec, methods=item.info.methods, where=item.info.class_name)
    else:
        validate_native(spec, methods=item.info.methods, where=item.info.class_name)
    if spec.binding_kind == "ep":
        _check_experts(item, spec, context=context)
    for problem in problems(spec.validate, item.info, item.spec, context):
        refuse(problem, "HP522", where=item.info.fqn or item.declared_by)


def _check_experts(item: Described, spec: ParallelModuleSpec, *, context: LayoutContext) -> None:
    topology = context.topology
    if topology.ep == 1:
        return
    experts, name = int(spec.options["num_experts"]), item.info.fqn or item.info.class_name
    if experts % topology.ep:
        refuse(indivisible(f"the number of experts of {name}", experts, axis="ep", degree=topology.ep), "HP502", where="")
    cut = {path: layout["ep"] for path, layout in item.spec.params.items() if "ep" in layout}
    if not cut:
        text = f"{name} communicates over ep ({topology.ep}), but none of its parameters is cut over ep"
        raise PlanError("HP581", text, expected="Shard(0) on ep for those that hold experts", where=item.declared_by)
    for path, placement in cut.items():
        size = _experts_of(item, path)
        if placement != Shard(0) or size != experts:
            text = f"{name}: {path} is {placement} on ep and dim 0 is {size}"
            raise PlanError("HP581", text, expected=f"Shard(0) of {experts} experts", where=item.declared_by)


def _experts_of(item: Described, path: str) -> int | None:
    """Return dim 0 of a parameter that the module holds itself; None for one below it or without dims."""
    tensor = item.info.parameters.get(path)
    return tensor.shape[0] if tensor is not None and tensor.shape else None


def _check_nesting(item: Described, spec: ParallelModuleSpec, owners: Mapping[str, ParallelModuleSpec]) -> None:
    for outer in ancestors(item.info.fqn):
        around = owners.get(outer)
        if around is None or "none" in (spec.binding_kind, around.binding_kind):
            continue
        if spec.binding_kind == around.binding_kind or "mesh" in (spec.binding_kind, around.binding_kind):
            raise PlanError(
                "HP581",
                f"{item.info.fqn} (kind {spec.binding_kind}) lies in {outer or 'the root'} (kind {around.binding_kind}), and "
                "both communicate",
                expected="one owner; only cp and ep may lie in each other",
                where=item.declared_by,
            )
