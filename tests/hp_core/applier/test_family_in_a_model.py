"""A component that was built by itself, in a model: found by the plan, which must agree, and trained like Hugging Face."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

from hp_core.applier.apply import apply
from hp_core.applier.family import build_family
from hp_core.contracts import Replicate
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.models.build import build
from hp_core.models.inventory import take_inventory
from hp_core.planner.plan import plan as make_plan
from hp_core.recipe.overrides import Override
from hp_core.state.full import full_gradients
from hp_core.state.slices import assemble
from hp_core.testing.promote import promote
from hp_core.testing.ranks import run_ranks


def _neighbour(name: str) -> ModuleType:
    """Import a helper that lies beside this file, once; test folders are no packages."""
    full = f"hp_tests_applier_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


refusal = _neighbour("mlps").refusal


EXPERTS, ATTENTION = "model.layers.1.mlp.experts", "model.layers.1.self_attn"
GQA = {
    "match": "model.layers.*.self_attn",
    "replace": {"kind": "module", "implementation": "gqa_attention", "source_type": "Qwen3MoeAttention"},
}


@pytest.mark.distributed
def test_a_component_in_a_model_is_found_by_its_plan_and_trains_like_hugging_face() -> None:
    pytest.importorskip("hp_qwen3_moe")
    assert run_ranks(2, within_a_model) == [[], []]


def within_a_model() -> list[str]:
    """Put experts that were built by themselves into a model on meta; return what differs from Hugging Face, or is not told."""
    cells = _neighbour("cells")
    with promote():
        recipe = cells.Cell(mesh={"tp": 2}, recipe={"overrides": [GQA]}).load()
        mesh = MeshContext.create(recipe.topology(world=2))
        model, inventory = _with_built_experts(recipe, mesh)
        found = make_plan(inventory, recipe, mesh.topology)
        wrong = [] if found.built == (ATTENTION, EXPERTS) else [f"built: {found.built}"]
        before = assemble(model.get_parameter(f"{EXPERTS}.down_proj"))
        apply(model, found, mesh)
        same = torch.equal(before, assemble(model.get_parameter(f"{EXPERTS}.down_proj")))
        wrong += [] if same else ["the weights of the component were touched"]
        cells.set_weights(model, found)
        cells.step(model, mesh)
    return wrong + _gradients_differ(full_gradients(model, found), cells) + _disagreements(inventory, recipe, mesh)


def _with_built_experts(recipe: Any, mesh: MeshContext) -> Any:
    built = build(recipe, mesh=mesh)
    experts = build_family(
        "grouped_experts", config=built.model.config, mesh=mesh, module_fqn=EXPERTS, plugins=recipe.declarations
    )
    attention = build_family(
        "gqa_attention",
        arguments={"qk_norm": True},
        config=built.model.config,
        mesh=mesh,
        module_fqn=ATTENTION,
        plugins=recipe.declarations,
    )
    built.model.get_submodule("model.layers.1.mlp").experts = experts
    built.model.get_submodule("model.layers.1").self_attn = attention
    return built.model, take_inventory(built.model, replacements=built.inventory.replacements)


def _gradients_differ(gradients: Any, cells: ModuleType) -> list[str]:
    expected = cells.reference({}).gradients
    return [
        name
        for name, wanted in expected.items()
        if (gradients[name] - wanted).abs().max() > 1e-9 * max(1.0, float(wanted.abs().max()))
    ]


def _disagreements(inventory: Any, recipe: Any, mesh: MeshContext) -> list[str]:
    """A plan that wants the component otherwise is refused: by an override, by frozen weights, on another mesh."""
    where = "family grouped_experts (hp-components 0.1.0)"
    fix = "fix: build it the way the model's plan has it, or leave building to the plan"
    override = Override(match=EXPERTS, params={"down_proj": {"cp": Replicate()}})
    cases = [
        (
            attrs.evolve(recipe, overrides=(*recipe.overrides, override)),
            mesh.topology,
            f"HP561: {EXPERTS} was built by itself with params.down_proj tp=Shard(2); expected tp=Shard(2) cp=Replicate, as "
            f"planned. {where}, changed by recipe: overrides. {fix}",
        ),
        (
            attrs.evolve(recipe, freeze=("*.experts.down_proj",)),
            mesh.topology,
            f"HP561: {EXPERTS}.down_proj was built by itself with trainable True; expected False, as planned. {where}. {fix}",
        ),
        (
            recipe,
            Topology(tp=2, dp_shard=2),
            f"HP561: {ATTENTION} was built by itself for the mesh {mesh.topology}; expected {Topology(tp=2, dp_shard=2)}, as "
            f"planned. {where.replace('grouped_experts', 'gqa_attention')}. {fix}",
        ),
    ]
    found = [(refusal(functools.partial(make_plan, inventory, changed, topology)), text) for changed, topology, text in cases]
    return [text for text, wanted in found if text != wanted]
