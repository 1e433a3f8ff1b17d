"""Loading a recipe: what a good one becomes, and the exact text for every kind of mistake."""

from pathlib import Path

import pytest

from hp_core.errors import HPError
from hp_core.plugins.load import plugins_from
from hp_core.recipe.load import load_recipe, recipe_from_dict
from hp_core.recipe.schema import Mesh, Precision, Recompute

MODEL = {"adapter": "demo", "config": {"hidden_size": 64}}


def test_a_minimal_recipe_has_all_defaults(load):
    recipe = load("")
    assert (recipe.mesh, recipe.precision, recipe.recompute) == (Mesh(), Precision(), Recompute())
    assert recipe.model.config == {"hidden_size": 64}
    assert (recipe.sections, recipe.device, recipe.compile, recipe.kernels) == ({}, "cpu", "off", "auto")


def test_words_that_yaml_1_1_takes_for_booleans_are_words(load):
    recipe = load("compile: off\nrecompute: {mode: off}\nprecision: {cpu_matmul: off}")
    assert (recipe.compile, recipe.recompute.mode, recipe.precision.cpu_matmul) == ("off", "off", "off")


@pytest.mark.parametrize("text", ["1e-3", "0.001", "'1e-3'", "1.0e-3", "+.1E-2"])
def test_a_number_may_be_written_with_an_exponent(load, text):
    assert load(f"train: {{steps: 1, optimizer: {{lr: {text}}}}}").sections["train"].optimizer.lr == 1e-3


def test_an_integer_is_a_number_too(load):
    betas = load("train: {steps: 1, optimizer: {betas: [0, 1]}}").sections["train"].optimizer.betas
    assert betas == (0.0, 1.0)
    assert all(type(beta) is float for beta in betas)


def test_short_dtype_names_become_full_ones(load):
    recipe = load("precision: {compute: bf16, reduce: fp32}")
    assert (recipe.precision.compute, recipe.precision.reduce) == ("bfloat16", "float32")


def test_a_path_of_a_section_starts_at_the_recipe_s_folder(load, tmp_path):
    assert load("train: {steps: 1, path: data/a.txt}").sections["train"].path == tmp_path / "data/a.txt"


def test_a_section_that_the_recipe_does_not_name_is_not_made_up(load):
    assert "train" not in load("").sections


def test_the_adapter_is_found_by_its_other_names(load):
    assert load("", head="model: {adapter: DemoForCausalLM, config: {}}\n").adapter.name == "demo"


def test_a_disabled_plugin_provides_nothing(load):
    with pytest.raises(HPError) as caught:
        load("plugins: {disabled: [fake]}")
    assert str(caught.value) == (
        "HP101: no working plugin provides the adapter 'demo'; plugin 'fake' (fake 0) is blocked: "
        "disabled by plugins.disabled. recipe.yaml:1. fix: take fake out of plugins.disabled"
    )


MISTAKES = {
    "meshh: {}": "HP512: unknown key 'meshh'; did you mean 'mesh'? recipe.yaml:2",
    "trein: {}": "HP512: unknown key 'trein'; did you mean 'train'? recipe.yaml:2",
    "zzz: {}": (
        "HP512: unknown key 'zzz'; expected one of compile, device, freeze, fsdp, kernels, loss, mesh, model, odd, overrides, "
        "plugins, precision, protocols, recompute, textual, train. recipe.yaml:2"
    ),
    "mesh:\n  dp_shards: 2": "HP512: unknown key 'mesh.dp_shards'; did you mean 'dp_shard'? recipe.yaml:3",
    "mesh:\n  1: 2": (
        "HP512: unknown key 'mesh.1'; expected one of cp, dp_replicate, dp_shard, ep, loss_parallel, pp, sequence_parallel, "
        "shared_memory, tp. recipe.yaml:3"
    ),
    "train: {steps: 1, optimizer: {learning_rate: 1}}": (
        "HP512: unknown key 'train.optimizer.learning_rate'; expected one of betas, lr, name. recipe.yaml:2"
    ),
    "mesh: {tp: two}": "HP513: mesh.tp is 'two' (a string); expected an integer. recipe.yaml:2",
    "mesh: {tp: true}": "HP513: mesh.tp is true (a boolean); expected an integer. recipe.yaml:2",
    "mesh: {tp: '2'}": "HP513: mesh.tp is '2' (a string); expected an integer. recipe.yaml:2. fix: write 2 without quotes",
    "mesh: {tp: 2.0}": "HP513: mesh.tp is 2.0 (a number); expected an integer. recipe.yaml:2. fix: write 2",
    "mesh: {tp: 1_0}": "HP513: mesh.tp is '1_0' (a string); expected an integer. recipe.yaml:2. fix: write 10",
    "mesh: {tp: null}": "HP513: mesh.tp is null; expected an integer. recipe.yaml:2",
    "mesh: {tp: [2]}": "HP513: mesh.tp is [2]; expected an integer. recipe.yaml:2",
    "mesh: {sequence_parallel: yes}": (
        "HP513: mesh.sequence_parallel is 'yes' (a string); expected true or false. recipe.yaml:2. fix: write true"
    ),
    "mesh:": "HP513: mesh is null; expected a mapping. recipe.yaml:2. fix: write {} or leave the key out",
    "mesh: [1]": "HP513: mesh is [1]; expected a mapping. recipe.yaml:2",
    "freeze: a.*": "HP513: freeze is 'a.*' (a string); expected a list of strings. recipe.yaml:2. fix: write ['a.*']",
    "freeze: [a, 1]": "HP513: freeze.1 is 1 (an integer); expected a string. recipe.yaml:2. fix: write it in quotes: '1'",
    "freeze: ['']": "HP514: freeze.0 is ''; expected a pattern that is not empty. recipe.yaml:2",
    "recompute: {mode: ful}": (
        "HP514: recompute.mode is 'ful'; expected one of off, full, selective. recipe.yaml:2. fix: did you mean 'full'?"
    ),
    "compile: no": "HP514: compile is 'no'; expected one of off, pieces, model. recipe.yaml:2",
    "compile: false": "HP513: compile is false (a boolean); expected one of off, pieces, model. recipe.yaml:2. fix: write off",
    "kernels: best": "HP514: kernels is 'best'; expected auto or a mapping. recipe.yaml:2",
    "recompute: {layers: [0]}": (
        "HP514: recompute.layers is [0]; expected null while mode is off. recipe.yaml:2. fix: set recompute.mode"
    ),
    "recompute:\n  mode: full\n  layers: [-1]": (
        "HP514: recompute.layers is [-1]; expected layer indices from 0 and patterns, at least one. recipe.yaml:4"
    ),
    "mesh:\n  sequence_parallel: true\n  tp: 0": "HP503: mesh.tp is 0; expected a positive integer. recipe.yaml:4",
    "mesh: {dp_shard: -2}": ("HP503: mesh.dp_shard is -2; expected a positive integer, or -1 to fill the mesh. recipe.yaml:2"),
    "loss: {chunk: 0}": "HP514: loss.chunk is 0; expected 1 or more. recipe.yaml:2",
    "loss: {router_z: .inf}": "HP514: loss.router_z is inf; expected a finite number. recipe.yaml:2",
    "train: {}": "HP516: train.steps is missing; expected an integer. recipe.yaml:2. fix: add train.steps",
    "train: {steps: 1, optimizer: {lr: -1}}": "HP514: train.optimizer.lr must be > 0: -1.0. recipe.yaml:2",
    "train: {steps: 1, optimizer: {betas: [1]}}": (
        "HP514: train.optimizer.betas has 1 member; expected a list of 2 numbers. recipe.yaml:2"
    ),
    "train:\n  micro_batch_size: 1\n  steps: 13": "HP514: train.steps must not be 13. recipe.yaml:4",
    "train:\n  micro_batch_size: 1\n  steps: 14": "HP514: train: an unlucky combination. recipe.yaml:2",
    "train: {steps: 15}": (
        "HP402: the class of the recipe section 'train' (hp_fake_schemas:Train) fails: KeyError: \"a fault of the plugin's\"; "
        "expected HPError or ValueError for an illegal value. recipe.yaml:2"
    ),
    "train: {steps: 1, micro_batch_size: 0}": "HP514: train.micro_batch_size is 0; expected 1 or more. recipe.yaml:2",
    "train: {steps: 1, path: ''}": "HP514: train.path is ''; expected a path. recipe.yaml:2",
    "odd: {}": (
        "HP402: field 'value' of Odd has the type <class 'complex'>; expected bool, int, float, str, Path, Literal, attrs "
        "classes, and unions, tuples and str mappings of them"
    ),
    "textual: {}": ("HP402: the recipe section 'textual' is declared as 'hp_fake_schemas:text'; expected an attrs class"),
    "plugins: {disabled: [fakes]}": (
        "HP102: plugins.disabled names 'fakes', but no plugin of that name is installed; did you mean 'fake'? recipe.yaml:2"
    ),
    "mesh: {tp: 99999999999999999999}": (
        "HP514: mesh.tp is '99999999999999999999'; expected an integer of at most 64 bits. recipe.yaml:2"
    ),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_told_with_key_line_and_fix(load, text):
    with pytest.raises(HPError) as caught:
        load(text)
    assert str(caught.value) == MISTAKES[text]


HEADS = {
    "": "HP516: the recipe is empty; expected a mapping with at least model. recipe.yaml:1",
    "{}": "HP516: the recipe is empty; expected a mapping with at least model. recipe.yaml:1",
    "[]": "HP513: the recipe is an empty list; expected a mapping. recipe.yaml:1",
    "mesh: {}": "HP516: model is missing; expected a mapping. recipe.yaml:1. fix: add model",
    "model: {config: {}}": "HP516: model.adapter is missing; expected a string. recipe.yaml:1. fix: add model.adapter",
    "\nmodel: {adapter: dem, config: {}}": (
        "HP101: no installed plugin provides the adapter 'dem'; did you mean 'demo'? recipe.yaml:2"
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_recipe_without_a_model_is_refused(load, head):
    with pytest.raises(HPError) as caught:
        load("", head=head)
    assert str(caught.value) == HEADS[head]


def test_a_file_that_is_not_there_is_named(plugins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HPError) as caught:
        load_recipe("none.yaml", plugins=plugins)
    assert str(caught.value) == "HP510: the recipe 'none.yaml' cannot be read: No such file or directory; expected a YAML file"


def test_a_file_that_is_no_text_is_named(plugins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HPError) as caught:
        load_recipe("r.yaml", plugins=plugins)
    assert str(caught.value) == "HP511: 'r.yaml' is not UTF-8 text; expected a YAML file"


def test_a_dict_gives_the_same_recipe_as_a_file(load, plugins):
    data = {"model": MODEL, "mesh": {"tp": 2}, "train": {"steps": 3, "optimizer": {"betas": (0.9, 0.99)}}}
    recipe = recipe_from_dict(data, plugins=plugins)
    assert recipe == load("mesh: {tp: 2}\ntrain: {steps: 3, optimizer: {betas: [0.9, 0.99]}}")


def test_a_mistake_in_a_dict_is_told_with_its_key(plugins):
    with pytest.raises(HPError) as caught:
        recipe_from_dict({"model": MODEL, "mesh": {"tp": "two"}}, plugins=plugins)
    assert str(caught.value) == "HP513: mesh.tp is 'two' (a string); expected an integer. recipe: mesh.tp"


def test_a_section_of_a_known_plugin_that_is_missing_names_its_pip_line():
    with pytest.raises(HPError) as caught:
        recipe_from_dict({"model": MODEL, "train": {}}, plugins=plugins_from())
    assert str(caught.value) == (
        "HP104: the recipe section 'train' belongs to hp-trainer, which is not installed. recipe: train. "
        "fix: pip install hp-trainer"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("loss: {aux: 0.01}", "loss.aux is 0.01 (a number); expected a mapping. recipe.yaml:2. fix: write {coefficient: 0.01}"),
        ("recompute: full", "recompute is 'full' (a string); expected a mapping. recipe.yaml:2. fix: write {mode: 'full'}"),
    ],
)
def test_a_value_in_place_of_its_section_is_told_its_key(load, text, told):
    with pytest.raises(HPError) as caught:
        load(text)
    assert str(caught.value) == f"HP513: {told}"


@pytest.mark.parametrize("kind", ["cp", "ep"])
def test_a_protocol_is_looked_up_although_its_axis_has_degree_one(load, kind):
    with pytest.raises(HPError) as caught:
        load(f"protocols: {{{kind}: rng}}")
    assert f"no installed plugin provides the protocol '{kind}:rng'" in str(caught.value)
    assert "recipe.yaml:2" in str(caught.value)
