"""build(): a recipe becomes a model on meta. Qwen3-MoE stands for any Hugging Face model."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from hp_core.contracts.adapter import ModelAdapter
from hp_core.errors import PlanError
from hp_core.models.build import Built, build, check_requirements, check_spelling
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


BAD = [
    ({"num_hidden_layers": "two"}, "StrictDataclassFieldValidationError"),
    ({"hidden_act": "no_such"}, "KeyError"),
    ({"rope_parameters": {"rope_type": "no_such", "rope_theta": 1.0}}, "KeyError"),
]


@pytest.mark.parametrize(("config", "kind"), BAD)
def test_a_configuration_that_hugging_face_refuses_is_one_line(config: dict[str, Any], kind: str) -> None:
    with pytest.raises(PlanError) as error:
        build(recipe(config))
    assert error.value.code == "HP542"
    assert error.value.message.startswith(f"the model cannot be built: {kind}: ")
    assert error.value.message.endswith("recipe: model.config. fix: correct model.config")
    assert "\n" not in error.value.line


SPELLING = [("num_expert", "num_experts"), ("hiden_size", "hidden_size"), ("num_hidden_layer", "num_hidden_layers")]


@pytest.mark.parametrize(("key", "meant"), SPELLING)
def test_a_misspelt_key_is_not_silently_kept(key: str, meant: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != meant}
    model = {"adapter": "qwen3_moe", "config": {**config, key: 4}}
    with pytest.raises(PlanError) as error:
        build(recipe_from_dict({"model": model}, plugins=load_plugins()))
    assert str(error.value) == (
        f"HP542: the configuration of qwen3_moe has no key {key!r}; did you mean {meant!r}? recipe: model.config"
    )


@pytest.mark.parametrize("key", ["rope_theta", "torch_dtype", "auto_map", "num_local_experts", "max_window_layers"])
def test_a_key_of_published_configurations_is_accepted(key: str) -> None:
    made = recipe()
    check_spelling(made.adapter, {**CONFIG, key: 4}, where="here")


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


FOREIGN = [
    (
        {"model_type": "acme"},
        "HP524: model_type is 'acme'; expected qwen3_moe. recipe: model.config.model_type. "
        "fix: choose the adapter of that model, or leave model_type out",
    ),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        "HP524: quantization_config is set, and the model would be built without it; expected a configuration of weights that "
        "are not quantised. recipe: model.config.quantization_config. fix: leave it out and use weights that are not quantised",
    ),
    (
        {"num_experts_per_tok": 5},
        "HP524: num_experts_per_tok is 5; expected at most num_experts (4). model.config.num_experts_per_tok",
    ),
]


@pytest.mark.parametrize(("config", "message"), FOREIGN)
def test_a_configuration_outside_the_adapter_is_refused_before_building(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        build(recipe(config))
    assert str(error.value) == message
