"""apply(): a plan becomes a live, sharded, filled model. Nothing is decided here."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import nn

from hp_core.applier.bindings import bind, check_bindings, validate_materialized
from hp_core.applier.boundary import compile_boundary, install_boundary
from hp_core.applier.cpu_matmul import choose_cpu_matmul
from hp_core.applier.initialise import initialise
from hp_core.applier.kernels import check_kernels, install_kernels
from hp_core.applier.loss import check_loss, install_labels
from hp_core.applier.materialise import fill_buffers, materialise
from hp_core.applier.recompute import install_recompute
from hp_core.applier.routers import install_routers
from hp_core.applier.schemes import check_schemes, run_schemes
from hp_core.applier.shard import check_attributes, check_parameters, divide_attributes, install_views, shard_parameters
from hp_core.applier.units import wrap_units
from hp_core.applier.wide_linear import widen_linears
from hp_core.contracts.family import FamilyContext
from hp_core.contracts.plan import BoundaryPlan, BuildPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_core.models.family import validate_family_context
from hp_core.models.inventory import argument_names, original_class
from hp_core.models.state import state_of, update
from hp_core.state.huggingface import load_hf


def apply(model: nn.Module, plan: BuildPlan, mesh: MeshContext, *, weights: str | Path | None = None) -> nn.Module:
    """Return ``model``, which ``plan`` was made for and which is on meta, live on ``mesh``. All ranks call this.

    Parameters are cut and materialised on the mesh's device, boundaries communicate, layers are recomputed and wrapped by
    FSDP2 as planned. ``weights``: folder of a Hugging Face checkpoint; without it the adapter's initialisation is used,
    which gives the same weights on every mesh. HP522, HP525, HP551: model, plan and mesh do not belong together; HP571: a
    planned kernel is missing here; nothing is changed then.

    With the plan's ``cpu_matmul: auto``, this process may multiply fp32 matrices by oneDNN from now on, and the model's linear
    layers bfloat16 in fp32 (:func:`hp_core.applier.cpu_matmul.choose_cpu_matmul`).

    Example::

        built = build(recipe)
        model = apply(built.model, built.plan, MeshContext.create(recipe.topology()))
        loss = model(input_ids, position_ids=positions, hp_labels=labels).logits.sum() / valid_tokens
    """
    check(model, plan, mesh)
    matmul = choose_cpu_matmul(plan, mesh)
    update(model, "", cpu_matmul=matmul)
    if matmul.bfloat16 == "float32":
        widen_linears(model)
    parallelise(model, plan, mesh)
    materialise(model, plan, device=mesh.device)
    if weights is None:
        initialise(model, plan)
    else:
        load_hf(model, plan, mesh, path=weights)
    fill_buffers(model, plan, loaded=weights is not None)
    validate_materialized(model, plan)
    return model


def check(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Raise unless model, plan, mesh and this machine fit; the model is untouched. HP403, HP522, HP525, HP533, HP551, HP571."""
    if mesh.topology != plan.topology:
        show = repr if str(mesh.topology) == str(plan.topology) else str  # flags are only in the long form
        raise PlanError("HP551", f"the mesh is {show(mesh.topology)}", expected=f"the plan's: {show(plan.topology)}")
    check_parameters(model, plan)
    check_kernels(plan)
    check_schemes(plan)
    if mesh.device.type not in (plan.device, "meta"):
        what = f"the mesh is on {mesh.device.type}, and the plan, with its kernels, for {plan.device}"
        raise PlanError("HP551", what, expected=f"MeshContext.create(..., device={plan.device!r})")
    check_loss(model, loss=plan.loss)
    validate_family_context(model, FamilyContext.of(mesh.topology))
    for boundary in plan.boundaries:
        module = model.get_submodule(boundary.fqn)
        if boundary.fqn in plan.built:
            _check_same_job(module, boundary, mesh)
            continue
        check_attributes(module, boundary, tp=mesh.axis("tp").size)
    check_bindings(model, plan, mesh)


def parallelise(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Do everything but fill memory: attributes, parameters, views, boundaries, bindings, recompute, FSDP2 units.

    The order matters: FSDP2 comes last, because its hooks must lie outside every forward that is wrapped here.
    """
    connect(model, plan, mesh)
    for entry in plan.recompute:
        install_recompute(model, entry)
    install_routers(model, plan, mesh)
    update(model, "", loss=plan.loss)
    install_labels(model)
    wrap_units(model, plan, mesh)


def connect(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Cut attributes and parameters, install views, kernels, schemes and boundaries, bind: all that a lone component needs."""
    boundaries = [boundary for boundary in plan.boundaries if boundary.fqn not in plan.built]
    for boundary in boundaries:
        divide_attributes(model.get_submodule(boundary.fqn), boundary, tp=mesh.axis("tp").size)
    shard_parameters(model, plan, mesh)
    install_views(model, plan, mesh)
    install_kernels(model, plan)
    run_schemes(model, plan)
    for boundary in boundaries:
        _install_boundary(model, boundary, mesh)
    bind(model, plan, mesh)


def _install_boundary(model: nn.Module, plan: BoundaryPlan, mesh: MeshContext) -> None:
    module = model.get_submodule(plan.fqn)
    arguments = argument_names(original_class(type(module)).forward)
    compute = cast(torch.dtype, getattr(torch, plan.compute)) if plan.compute else None
    boundary = compile_boundary(plan, arguments=arguments, mesh=mesh, compute=compute)
    if boundary is not None:
        update(module, plan.fqn, boundary=boundary)
        install_boundary(module)


def _check_same_job(module: nn.Module, plan: BoundaryPlan, mesh: MeshContext) -> None:
    """A component that was built before borrows its groups from the mesh it was built on: only that job can use it."""
    state = state_of(module)
    if state is None or state.mesh is not mesh:
        raise PlanError(
            "HP551",
            f"{plan.fqn} ({plan.cls}) was built on another mesh",
            expected="the mesh of the job that it is applied to",
            fix="pass the same MeshContext to build_family and to apply",
        )
