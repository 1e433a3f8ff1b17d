"""The model's configuration, key by key: what is refused, with the line it is written at, and what published files may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_core.errors import PlanError
from hp_core.models.build import build
from hp_core.models.configuration import configure
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import load_recipe, recipe_from_dict
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


def recipe(**config: Any) -> Recipe:
    model = {"adapter": "qwen3_moe", "config": {**CONFIG, **config}}
    return recipe_from_dict({"model": model}, plugins=load_plugins())


def refusal(made: Recipe) -> str:
    with pytest.raises(PlanError) as error:
        build(made)
    assert "\n" not in error.value.line
    return str(error.value)


BAD = [
    ("num_hidden_layers", "two", "Field 'num_hidden_layers' expected int, got str (value: 'two')"),
    ("vocab_size", 6.5, "Field 'vocab_size' expected int, got float (value: 6.5)"),
    ("hidden_act", "no_such", "KeyError: "),
    ("head_dim", 7, "RoPE requires an even rotary dimension, but got `head_dim`=7"),
]


@pytest.mark.parametrize(("key", "value", "told"), BAD)
def test_what_hugging_face_refuses_is_one_line_with_the_key(key: str, value: Any, told: str) -> None:
    text = refusal(recipe(**{key: value}))
    assert text.startswith(f"HP542: the model cannot be built: {told}")
    assert text.endswith(f"recipe: model.config.{key}. fix: correct model.config")


def test_what_is_wrong_inside_a_key_names_what_is_there() -> None:
    text = refusal(recipe(rope_parameters={"rope_type": "no_such", "rope_theta": 1.0}))
    assert text == "HP542: the model cannot be built: KeyError: 'no_such'. recipe: model.config. fix: correct model.config"


SPELLING = [("num_expert", "num_experts"), ("hiden_size", "hidden_size"), ("num_hidden_layer", "num_hidden_layers")]


@pytest.mark.parametrize(("key", "meant"), SPELLING)
def test_a_misspelt_key_is_not_silently_kept(key: str, meant: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != meant}
    model = {"adapter": "qwen3_moe", "config": {**config, key: 4}}
    assert refusal(recipe_from_dict({"model": model}, plugins=load_plugins())) == (
        f"HP542: the configuration of qwen3_moe has no key {key!r}; did you mean {meant!r}? recipe: model.config.{key}. "
        "fix: correct it or leave it out: nothing reads it"
    )


UNKNOWN = "fix: correct it or leave it out: nothing reads it"
CHOSEN = "expected keys that describe the model, since attention, experts and code are chosen by the recipe"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"width": 7}, f"HP542: the configuration of qwen3_moe has no key 'width'. recipe: model.config.width. {UNKNOWN}"),
    (
        {"max_window_layers": 7},
        "HP542: the configuration of qwen3_moe has no key 'max_window_layers'. recipe: model.config.max_window_layers. "
        f"{UNKNOWN}",
    ),
    *(
        (
            {key: "eager"},
            f"HP542: the configuration sets {key!r}; {CHOSEN}. recipe: model.config.{key}. fix: leave it out",
        )
        for key in ("_attn_implementation", "_experts_implementation", "attn_implementation", "auto_map", "_anything")
    ),
    (
        {"return_dict": False},
        "HP542: return_dict is False; expected True: it says how the model is called, not what it is. "
        "recipe: model.config.return_dict. fix: leave it out",
    ),
    (
        {"chunk_size_feed_forward": 4},
        "HP542: chunk_size_feed_forward is 4; expected 0: it says how the model is called, not what it is. "
        "recipe: model.config.chunk_size_feed_forward. fix: leave it out",
    ),
    (
        {"num_local_experts": 8},
        "HP542: num_experts is 4 and num_local_experts is 8, but they are two names of one value; expected one of them. "
        "recipe: model.config.num_experts. fix: leave num_experts or num_local_experts out",
    ),
    (
        {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 6.0}},
        "HP542: rope_theta is 5.0 and rope_parameters.rope_theta is 6.0, but they are two names of one value; "
        "expected one of them. recipe: model.config.rope_theta. fix: leave rope_theta or rope_parameters.rope_theta out",
    ),
    ({"rope_theta": 0}, "HP542: rope_theta is 0; expected above 0. recipe: model.config.rope_theta. fix: correct rope_theta"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
        "HP542: rope_theta is -1.0; expected above 0. recipe: model.config.rope_parameters.rope_theta. fix: correct rope_theta",
    ),
    (
        {"num_hidden_layers": 10**6},
        "HP542: num_hidden_layers is 1000000; expected at most 10,000. recipe: model.config.num_hidden_layers. "
        "fix: correct num_hidden_layers",
    ),
    (
        {"num_experts": 2**40},
        "HP542: num_experts is 1099511627776; expected at most 16,777,216. recipe: model.config.num_experts. "
        "fix: correct num_experts",
    ),
    (
        {"rms_norm_eps": float("inf")},
        "HP542: rms_norm_eps is inf; expected a finite number. recipe: model.config.rms_norm_eps. fix: correct rms_norm_eps",
    ),
    (
        {"router_aux_loss_coef": -0.5},
        "HP542: router_aux_loss_coef is -0.5; expected 0 or more. recipe: model.config.router_aux_loss_coef. "
        "fix: correct router_aux_loss_coef",
    ),
    (
        {"pad_token_id": -2},
        "HP542: pad_token_id is -2; expected 0 or more. recipe: model.config.pad_token_id. fix: correct pad_token_id",
    ),
    (
        {"model_type": "acme"},
        "HP524: model_type is 'acme'; expected qwen3_moe. recipe: model.config.model_type. "
        "fix: choose the adapter of that model, or leave model_type out",
    ),
    (
        {"architectures": ["AcmeForCausalLM"]},
        "HP524: architectures is ['AcmeForCausalLM']; expected a list of Qwen3MoeForCausalLM. "
        "recipe: model.config.architectures. fix: choose the adapter of that model, or leave architectures out",
    ),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        "HP524: quantization_config is set, and the model would be built without it; expected a configuration of weights that "
        "are not quantised. recipe: model.config.quantization_config. fix: leave it out and use weights that are not quantised",
    ),
    (
        {"num_experts_per_tok": 5},
        "HP524: num_experts_per_tok is 5; expected at most num_experts (4). recipe: model.config.num_experts_per_tok",
    ),
    (
        {"rms_norm_eps": 0.0},
        "HP524: rms_norm_eps is 0.0; expected above 0. recipe: model.config.rms_norm_eps",
    ),
    (
        {"head_dim": "8"},
        "HP542: head_dim is '8'; expected an integer. recipe: model.config.head_dim. fix: correct head_dim",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_no_model_can_be_is_refused_before_building(config: dict[str, Any], message: str) -> None:
    assert refusal(recipe(**config)) == message


NUMBERS = sorted(
    {*CONFIG, "max_position_embeddings", "decoder_sparse_step", "rms_norm_eps", "initializer_range", "router_aux_loss_coef"}
    | {"attention_dropout", "rope_theta"}
)


@pytest.mark.parametrize("value", [-1, -1.0, 2**40, float("inf"), "8", True, [4]])
@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_of_the_configuration_is_checked(key: str, value: Any) -> None:
    text = refusal(recipe(**{key: value}))
    assert text[:5] in ("HP524", "HP542"), text
    assert f"recipe: model.config.{key}" in text, text


SAVED = {  # what save_pretrained writes beside the sizes
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "transformers_version": "5.24.0",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "output_router_logits": False,
    "bos_token_id": 1,
    "pad_token_id": -1,
    "num_local_experts": 4,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "return_dict": True,
    "_name_or_path": "somewhere",
}


@pytest.mark.parametrize("key", SAVED)
def test_what_hugging_face_writes_itself_is_accepted_where_it_agrees(key: str) -> None:
    configure(recipe().adapter, recipe(**{key: SAVED[key]}))


def written(folder: Path, *, text: str, **config: Any) -> Path:
    """Write a recipe whose model is ``text``, beside a config.json of somebody else's."""
    sizes = {key: value for key, value in CONFIG.items() if key != "hidden_size"}
    (folder / "config.json").write_text(json.dumps({**sizes, **config}), encoding="utf-8")
    path = folder / "recipe.yaml"
    path.write_text(f"model:\n  adapter: qwen3_moe\n  {text}\n", encoding="utf-8")
    return path


def test_a_published_file_may_hold_what_this_model_does_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, text="config: config.json", hidden_size=32, auto_map={"AutoConfig": "a.B"}, max_window_layers=2)
    made = load_recipe(path, plugins=load_plugins())
    assert configure(made.adapter, made).hidden_size == 32


@pytest.mark.parametrize(("text", "line"), [("config: config.json", "config.json"), ("checkpoint: .", "config.json")])
def test_a_published_file_is_named_with_the_line_that_names_it(tmp_path: Path, text: str, line: str) -> None:
    path = written(tmp_path, text=text, hiden_size=32)
    assert refusal(load_recipe(path, plugins=load_plugins())) == (
        "HP542: the configuration of qwen3_moe has no key 'hiden_size'; did you mean 'hidden_size'? "
        f"{path}:3, {line}: hiden_size. fix: correct it or leave it out: nothing reads it"
    )


def test_a_key_is_told_by_its_line_or_by_the_option_that_set_it(tmp_path: Path) -> None:
    keys = ", ".join(f"{key}: {value}" for key, value in CONFIG.items())
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model:\n  adapter: qwen3_moe\n  config:\n    {{{keys},\n     rope_theta: 0}}\n", encoding="utf-8")
    plugins = load_plugins()
    assert f" {path}:5. " in refusal(load_recipe(path, plugins=plugins))
    sets = ["model.config.rope_theta=-2"]
    assert " --set model.config.rope_theta=-2. " in refusal(load_recipe(path, plugins=plugins, sets=sets))
