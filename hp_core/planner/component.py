"""Planning one component without a model, and comparing that plan with the one of a model that the component came into."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from hp_core.contracts import (
    BoundaryPlan,
    BuildPlan,
    BuiltComponent,
    Init,
    Inventory,
    LayoutContext,
    ModelAdapter,
    ModuleFamily,
    ModuleShardingSpec,
    ParameterPlan,
    ProtocolPlan,
    ResolvedFamily,
)
from hp_core.contracts.placement import describe
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner import checks
from hp_core.planner.bindings import check_binding
from hp_core.planner.collectives import compile_boundary, is_varying
from hp_core.planner.describe import Described
from hp_core.planner.ownership import assign_owners
from hp_core.planner.parameters import ParameterRules, plan_buffers, plan_parameters
from hp_core.planner.places import placed
from hp_core.planner.schemes import Dtypes
from hp_core.plugins.lazy import call, load
from hp_core.plugins.places import defined

_TOKENS = (1, 4096)  # a recipe's default; only byte counts use it


def plan_component(
    inventory: Inventory,
    family: ModuleFamily,
    *,
    resolved: ResolvedFamily,
    topology: Topology,
    declared_by: str,
    seed: int,
    keep: bool,
    protocols: Sequence[ProtocolPlan] = (),
) -> BuildPlan:
    """Return the plan of a component that is the root of ``inventory``: one boundary ``""``, its parameters and buffers.

    ``protocols``: those that it speaks on this mesh (:func:`hp_core.planner.protocols.plan_component_protocols`).
    ``keep``: its weights are there already, else ``family.init`` must cover every parameter and buffer (HP526). HP560: the
    family has no layout provider, or refuses its arguments or the mesh; HP502, HP521, HP522: as for a model.
    """
    if family.sharding is None:
        raise PlanError("HP560", f"family {family.name!r} has no layout provider", expected="one, to be put on a mesh")
    context = LayoutContext(topology=topology, config=inventory.config, inventory=inventory)
    with placed(lambda _: "", topology):  # there is no recipe
        item = _described(inventory, family, context=context, declared_by=declared_by)
        checks.check_spec(item, inventory=inventory, topology=topology)
        checks.check_family(family, arguments=resolved.arguments, topology=topology, where=declared_by)
        if item.parallel is not None:
            check_binding(item, item.parallel, context=context)
        boundary = _boundary(item, topology=topology)
        parameters = _parameters(inventory, item, boundary=boundary, topology=topology)
    buffers = plan_buffers(inventory, adapter=_pseudo_adapter(family))
    return _filled(
        family,
        keep=keep,
        plan=BuildPlan(
            adapter=family.name,
            model_class=inventory.model_class,
            topology=topology,
            model_dtype=parameters[0].dtype if parameters else "float32",
            device="cpu",
            batch=_TOKENS[0],
            sequence=_TOKENS[1],
            config=inventory.config,
            boundaries=[boundary],
            parameters=parameters,
            buffers=buffers,
            protocols=protocols,
            options={"seed": seed},
        ),
    )


def plan_filling(inventory: Inventory, family: ModuleFamily, *, seed: int) -> BuildPlan:
    """Return how the tensors of a component on no mesh are filled; HP526 if ``family.init`` leaves one out."""
    tensors = inventory.parameters_below("")
    parameters = [
        ParameterPlan(fqn=name, owner="", shape=tensor.shape, dtype=tensor.dtype, transforms=family.transforms.get(name, ()))
        for name, tensor in tensors.items()
        if name not in inventory.aliases
    ]
    plan = BuildPlan(
        adapter=family.name,
        model_class=inventory.model_class,
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=_TOKENS[0],
        sequence=_TOKENS[1],
        config=inventory.config,
        parameters=parameters,
        buffers=plan_buffers(inventory, adapter=_pseudo_adapter(family)),
        options={"seed": seed},
    )
    return _filled(family, keep=False, plan=plan)


def _pseudo_adapter(family: ModuleFamily) -> ModelAdapter:
    """Return what the rules for parameters read of an adapter; how they are filled is the family's business."""
    anything = (Init(match="*", kind="constant"),)
    return ModelAdapter(name=family.name, model_class=family.baseline, config_class=family.baseline, init=anything)


def _filled(family: ModuleFamily, *, keep: bool, plan: BuildPlan) -> BuildPlan:
    """Return the plan with the family's ways to fill every tensor, or with none where the weights are there already."""
    parameters = [attrs.evolve(p, init=None if keep else _init(p.fqn, family, "parameter")) for p in plan.parameters]
    buffers = [attrs.evolve(b, init=None if keep else _init(b.fqn, family, "buffer")) for b in plan.buffers]
    return attrs.evolve(plan, parameters=parameters, buffers=buffers)


def _init(fqn: str, family: ModuleFamily, what: str) -> Init:
    found = next((init for init in family.init if fnmatch.fnmatchcase(fqn, init.match)), None)
    if found is None:
        raise PlanError(
            "HP526", f"nothing initialises the {what} {fqn}", expected="an entry in init", where=f"family {family.name}"
        )
    return found


def _described(inventory: Inventory, family: ModuleFamily, *, context: LayoutContext, declared_by: str) -> Described:
    info = inventory.module("")
    spec, source = call(str(family.sharding), info, context, gives=ModuleShardingSpec), defined(load(str(family.sharding)))
    return Described(
        info=info,
        spec=spec,
        declared_by=declared_by,
        family=family,
        role=family.role,
        parallel=info.parallel,
        source=source,
    )


def _boundary(item: Described, *, topology: Topology) -> BoundaryPlan:
    batch, sequence = _TOKENS
    return BoundaryPlan(
        fqn="",
        cls=item.info.cls,
        spec=item.spec,
        declared_by=item.declared_by,
        varying=is_varying(item.spec, topology=topology),
        collectives=compile_boundary("", item.spec, topology=topology, batch=batch, sequence=sequence, compute="float32"),
        family=item.info.family,
        parallel=item.parallel,
    )


def _parameters(inventory: Inventory, item: Described, *, boundary: BoundaryPlan, topology: Topology) -> list[ParameterPlan]:
    assert item.family is not None
    rules = ParameterRules(
        adapter=_pseudo_adapter(item.family),
        topology=topology,
        dtype="float32",
        freeze=(),
        where="",
        varying={"": boundary.varying},
        dtypes=Dtypes(default="float32", compute={"": "float32"}),
    )
    owned = assign_owners(inventory, [item], isolated=())
    planned = plan_parameters(inventory, owned, [item], rules=rules)
    return [attrs.evolve(entry, dtype=owned[entry.fqn].tensor.dtype) for entry in planned]


def check_built(plan: BuildPlan, fqn: str, built: BuiltComponent) -> None:
    """Raise HP561 unless ``plan`` wants of the component at ``fqn`` what it was built to be."""
    boundary = next(item for item in plan.boundaries if item.fqn == fqn)
    _agree(fqn, "for the mesh", built.topology, plan.topology, boundary)
    _agree_specs(fqn, built.boundary, boundary)
    for spoken in built.protocols:
        _agree(fqn, "to speak", _spoken(spoken), _spoken(plan.protocol(spoken.kind)), boundary)
    prefix = f"{fqn}." if fqn else ""
    wanted = {entry.fqn: entry for entry in plan.parameters}
    for entry in built.parameters:
        name = prefix + entry.fqn
        if name in wanted:  # another name of a tied parameter is planned by its first
            _agree_parameters(name, entry, wanted[name], boundary)


def _agree_specs(fqn: str, built: BoundaryPlan, wanted: BoundaryPlan) -> None:
    for field in ("params", "in_src", "in_dst", "out_src", "out_dst"):
        one, other = getattr(built.spec, field) or {}, getattr(wanted.spec, field) or {}
        for key in dict.fromkeys((*one, *other)):
            _agree(fqn, f"with {field}.{key}", _shown(one, key), _shown(other, key), wanted)
    for field in ("out_names", "is_boundary", "local_attrs", "views"):
        _agree(fqn, f"with {field}", getattr(built.spec, field), getattr(wanted.spec, field), wanted)
    _agree(fqn, "to compute in", built.compute or "the dtype that arrives", wanted.compute or "the dtype that arrives", wanted)


def _agree_parameters(name: str, built: ParameterPlan, wanted: ParameterPlan, boundary: BoundaryPlan) -> None:
    for field in ("shape", "dtype", "trainable"):
        _agree(name, f"with {field}", getattr(built, field), getattr(wanted, field), boundary)
    _agree(name, "with the gradient", describe(built.gradient), describe(wanted.gradient), boundary)


def _spoken(protocol: ProtocolPlan | None) -> str:
    if protocol is None:
        return "nothing"
    details = {"sequence_layout": protocol.sequence_layout, **protocol.sub_axes, **protocol.options}
    told = " ".join(f"{key}={value}" for key, value in details.items() if value is not None)
    return f"{protocol.kind}:{protocol.name}{told and f' ({told})'}"


def _shown(layouts: Mapping[str, Any], key: str) -> str:
    return describe(layouts[key]) if key in layouts else "nothing"


def _agree(name: str, what: str, one: object, other: object, boundary: BoundaryPlan) -> None:
    if one != other:
        raise PlanError(
            "HP561",
            f"{name or 'the component'} was built by itself {what} {one}",
            expected=f"{other}, as planned",
            where=boundary.declared_by,
            fix="build it the way the model's plan has it, or leave building to the plan",
        )


def built_component(plan: BuildPlan) -> BuiltComponent:
    """Return what a component's own plan made of it."""
    parameters: Sequence[ParameterPlan] = plan.parameters
    return BuiltComponent(topology=plan.topology, boundary=plan.boundaries[0], parameters=parameters, protocols=plan.protocols)
