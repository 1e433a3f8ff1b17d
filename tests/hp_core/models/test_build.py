"""build(): a recipe becomes a model on meta. Qwen3-MoE stands for any Hugging Face model."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from hp_core.contracts.adapter import ModelAdapter
from hp_core.errors import PlanError
from hp_core.models.build import Built, build, check_requirements
from hp_core.models.observers import Event, PlanReady, ReplacementApplied, ReplacementsDeclared, ReplacementUnmatched
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict
from hp_core.recipe.schema import Recipe

pytest.importorskip("hp_qwen3_moe")

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def recipe(config: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    model = {"adapter": "qwen3_moe", "config": {**CONFIG, **(config or {})}, "dtype": sections.pop("dtype", "float32")}
    return recipe_from_dict({"model": model, **sections}, plugins=load_plugins())


@pytest.fixture(scope="module")
def built() -> Built:
    return build(recipe(dtype="bfloat16", mesh={"tp": 2}, loss={"chunk": 128}))


def test_the_model_is_on_meta_in_the_recipes_dtype(built: Built) -> None:
    assert {parameter.device.type for parameter in built.model.parameters()} == {"meta"}
    assert {str(parameter.dtype) for parameter in built.model.parameters()} == {"torch.bfloat16"}


def test_it_uses_hp_attention_and_no_cache(built: Built) -> None:
    assert built.model.config._attn_implementation == "hp"
    assert built.model.config.use_cache is False


def test_the_adapters_replacements_are_installed_and_planned(built: Built) -> None:
    assert type(built.model.model.layers[1].mlp.experts).__name__ == "GroupedExperts"
    assert [item.fqn for item in built.plan.replacements] == [
        "model.embed_tokens",
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
        "lm_head",
    ]
    assert built.inventory.module("lm_head").family == "linear_cross_entropy"


def test_the_loss_component_takes_the_recipes_chunk(built: Built) -> None:
    assert built.model.lm_head.chunk == 128


def test_the_plan_is_for_the_recipes_topology(built: Built) -> None:
    assert built.plan.topology.tp == 2


def test_a_logical_mesh_decides_the_topology() -> None:
    made = recipe()
    topology = made.topology(world=4)
    assert build(made, mesh=topology.view("dense")).plan.topology == topology


def test_tied_weights_stay_tied() -> None:
    made = build(recipe({"tie_word_embeddings": True}))
    assert made.model.lm_head.weight is made.model.model.embed_tokens.weight
    assert made.inventory.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_observers_are_told_in_order() -> None:
    events: list[Event] = []
    made = build(recipe(), observers=[events.append])
    assert [type(event) for event in events] == [ReplacementsDeclared, *[ReplacementApplied] * 4, PlanReady]
    assert events[0].replacements == made.plan.replacements  # type: ignore[union-attr]
    assert events[-1].plan is made.plan  # type: ignore[union-attr]


def test_a_recipe_can_replace_what_the_adapter_replaces() -> None:
    override = {
        "match": "lm_head",
        "replace": {
            "kind": "module",
            "implementation": "linear_cross_entropy",
            "source_type": "Linear",
            "with": {"chunk": 7},
        },
    }
    made = build(recipe(overrides=[override]))
    assert made.model.lm_head.chunk == 7
    assert made.plan.replacements[-1].declared_by == "recipe: overrides.0"


def test_an_override_that_hits_nothing_is_announced_and_refused() -> None:
    override = {
        "match": "lm_haed",
        "replace": {"kind": "module", "implementation": "linear_cross_entropy", "source_type": "Linear"},
    }
    events: list[Event] = []
    with pytest.raises(PlanError) as error:
        build(recipe(overrides=[override]), observers=[events.append])
    assert str(error.value) == (
        "HP540: the replacement pattern 'lm_haed' matches no module; did you mean 'lm_head'? recipe: overrides.0"
    )
    assert events == [ReplacementUnmatched(pattern="lm_haed", declared_by="recipe: overrides.0")]


def adapter(**requires: str) -> ModelAdapter:
    made = recipe().adapter
    return attrs.evolve(made, requires=requires)


def test_a_requirement_that_is_met_is_silent() -> None:
    check_requirements(adapter(torch=">=2.0"))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_core.models.build.version", lambda name: "4.57.1")
    with pytest.raises(PlanError) as error:
        check_requirements(adapter(transformers=">=5.20,<6"))
    assert str(error.value) == (
        "HP524: adapter qwen3_moe meets transformers 4.57.1; expected transformers>=5.20,<6. "
        "adapter qwen3_moe. fix: pip install 'transformers>=5.20,<6'"
    )


def test_a_missing_distribution_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        check_requirements(adapter(hp_no_such=">=1"))
    assert str(error.value) == (
        "HP524: hp_no_such is not installed; expected hp_no_such>=1. adapter qwen3_moe. fix: pip install 'hp_no_such>=1'"
    )


@pytest.mark.parametrize("config", [{"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}, {"num_experts": 0}])
def test_a_replacement_of_what_the_adapter_counts_none_of_is_left_out(config: dict[str, Any]) -> None:
    assert [item.fqn for item in build(recipe(config)).plan.replacements] == ["model.embed_tokens", "lm_head"]
