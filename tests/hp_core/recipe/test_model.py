"""The model section: exactly one source, and the configuration read from where it is."""

import json

import pytest

from hp_core.errors import HPError


def test_a_configuration_may_be_a_file_beside_the_recipe(load, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/c.json").write_text('{"hidden_size": 32, "layers": [1, null, 0.5]}')
    recipe = load("", head="model: {adapter: demo, config: sub/c.json}\n")
    assert recipe.model.config == {"hidden_size": 32, "layers": [1, None, 0.5]}


def test_a_checkpoint_brings_its_configuration_and_an_absolute_path(load, tmp_path):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/config.json").write_text('{"hidden_size": 32}')
    recipe = load("", head="model: {adapter: demo, checkpoint: ck}\n")
    assert (recipe.model.checkpoint, recipe.model.config) == (str(tmp_path / "ck"), {"hidden_size": 32})
    assert "config" not in recipe.to_dict()["model"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("adapter: demo", "HP514: model has neither checkpoint nor config; expected exactly one of model.checkpoint and "
         "model.config. recipe.yaml:1"),
        ("adapter: demo, config: {}, checkpoint: x", "HP514: model has both checkpoint and config; expected exactly one of "
         "model.checkpoint and model.config. recipe.yaml:1"),
        ("adapter: demo, checkpoint: x", "HP510: model.checkpoint is '{tmp}/x', which is not a folder; expected a local "
         "folder with config.json and safetensors files. recipe.yaml:1"),
        ("adapter: demo, checkpoint: empty", "HP510: '{tmp}/empty/config.json' cannot be read: No such file or directory; "
         "expected a config.json. recipe.yaml:1"),
        ("adapter: demo, config: none.json", "HP510: '{tmp}/none.json' cannot be read: No such file or directory; expected a "
         "config.json. recipe.yaml:1"),
        ("adapter: demo, config: list.json", "HP510: '{tmp}/list.json' holds no JSON object; expected a config.json. "
         "recipe.yaml:1"),
        ("adapter: demo, config: bad.json", "HP510: '{tmp}/bad.json' cannot be read: Expecting value: line 1 column 7 "
         "(char 6); expected a config.json. recipe.yaml:1"),
        ("adapter: demo, config: {a: .nan}", "HP514: model.config.a is nan; expected a number. recipe.yaml:1"),
        ("adapter: demo, config: nan.json", "HP514: model.config.a is nan; expected a number. recipe.yaml:1, {tmp}/nan.json"),
        ("adapter: demo, config: 3", "HP513: model.config is 3 (an integer); expected a string or a mapping or null. "
         "recipe.yaml:1. fix: write it in quotes: '3'"),
        ("adapter: '', config: {}", "HP514: model.adapter is ''; expected something that is not empty. recipe.yaml:1"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_had_is_refused(load, tmp_path, model, message):
    (tmp_path / "empty").mkdir()
    for name, text in {"list.json": "[]", "bad.json": '{"a": }', "nan.json": '{"a": NaN}'}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(HPError) as caught:
        load("", head=f"model: {{{model}}}\n")
    assert str(caught.value) == message.replace("{tmp}", str(tmp_path))


@pytest.mark.parametrize("text", ['"a\\0b"', "x" * 5000])
def test_a_path_that_no_file_system_takes_is_refused(load, text):
    for key in ("checkpoint", "config"):
        with pytest.raises(HPError, match="HP510"):
            load("", head=f"model: {{adapter: demo, {key}: {text}}}\n")


def test_a_json_file_that_is_nested_without_end_is_refused(load, tmp_path):
    (tmp_path / "deep.json").write_text('{"a":' * 100_000)
    with pytest.raises(HPError, match="HP510"):
        load("", head="model: {adapter: demo, config: deep.json}\n")
    (tmp_path / "deep.json").write_text(json.dumps({"a": eval("[" * 40 + "]" * 40)}))
    with pytest.raises(HPError, match="HP511"):
        load("", head="model: {adapter: demo, config: deep.json}\n")
