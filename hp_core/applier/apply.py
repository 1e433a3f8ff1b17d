"""apply(): a plan becomes a live, sharded, filled model. Nothing is decided here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hp_core.applier.boundary import compile_boundary, install_boundary
from hp_core.applier.initialise import initialise
from hp_core.applier.loss import install_labels
from hp_core.applier.materialise import fill_buffers, materialise
from hp_core.applier.recompute import install_recompute
from hp_core.applier.shard import check_parameters, divide_attributes, install_views, shard_parameters
from hp_core.applier.units import wrap_units
from hp_core.contracts.parallel import ParallelBinding
from hp_core.contracts.plan import BoundaryPlan, BuildPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_core.models.inventory import argument_names, original_class
from hp_core.models.state import update
from hp_core.state.huggingface import load_hf


def apply(model: nn.Module, plan: BuildPlan, mesh: MeshContext, *, weights: str | Path | None = None) -> nn.Module:
    """Return ``model``, which ``plan`` was made for and which is on meta, live on ``mesh``. All ranks call this.

    Parameters are cut and materialised on the mesh's device, boundaries communicate, layers are recomputed and wrapped by
    FSDP2 as planned. ``weights``: folder of a Hugging Face checkpoint; without it the adapter's initialisation is used,
    which gives the same weights on every mesh. HP525, HP551: model, plan and mesh do not belong together.

    Example::

        built = build(recipe)
        model = apply(built.model, built.plan, MeshContext.create(recipe.topology()))
        loss = model(input_ids, position_ids=positions, hp_labels=labels).logits.sum() / valid_tokens
    """
    if mesh.topology != plan.topology:
        raise PlanError("HP551", f"the mesh is {mesh.topology}", expected=f"the plan's: {plan.topology}")
    check_parameters(model, plan)
    parallelise(model, plan, mesh)
    materialise(model, plan, device=mesh.device)
    if weights is None:
        initialise(model, plan)
    else:
        load_hf(model, plan, mesh, path=weights)
    fill_buffers(model, plan, loaded=weights is not None)
    return model


def parallelise(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Do everything but fill memory: attributes, parameters, views, boundaries, bindings, recompute, FSDP2 units.

    The order matters: FSDP2 comes last, because its hooks must lie outside every forward that is wrapped here.
    """
    for boundary in plan.boundaries:
        divide_attributes(model.get_submodule(boundary.fqn), boundary, tp=mesh.axis("tp").size)
    shard_parameters(model, plan, mesh)
    install_views(model, plan, mesh)
    for boundary in plan.boundaries:
        _install_boundary(model, boundary, mesh)
    _bind(model, plan, mesh)
    for entry in plan.recompute:
        install_recompute(model, entry)
    update(model, "", loss=plan.loss)
    install_labels(model, loss=plan.loss)
    wrap_units(model, plan, mesh)


def _install_boundary(model: nn.Module, plan: BoundaryPlan, mesh: MeshContext) -> None:
    module = model.get_submodule(plan.fqn)
    arguments = argument_names(original_class(type(module)).forward)
    compute = cast(torch.dtype, getattr(torch, plan.compute)) if plan.compute else None
    boundary = compile_boundary(plan, arguments=arguments, mesh=mesh, compute=compute)
    if boundary is not None:
        update(module, plan.fqn, boundary=boundary)
        install_boundary(module)


def _bind(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Prepare all bindings, then hand them out: no module is bound if one cannot be."""
    prepared: list[tuple[str, Any, ParallelBinding]] = []
    for boundary in plan.boundaries:
        spec = boundary.parallel
        if spec is None or spec.binding_kind == "none":
            continue
        module: Any = model.get_submodule(boundary.fqn)
        if spec.binding_kind != "mesh" or not hasattr(module, "bind_parallel"):
            raise PlanError(
                "HP551",
                f"{boundary.fqn} ({boundary.cls}) asks for a binding of kind {spec.binding_kind!r}",
                expected="kind 'mesh' and a method bind_parallel(binding)",
            )
        prepared.append((boundary.fqn, module, ParallelBinding(mesh=mesh)))
    for fqn, module, binding in prepared:
        module.bind_parallel(binding)
        update(module, fqn, binding=binding)
