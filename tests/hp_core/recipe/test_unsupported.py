"""What nothing implements yet is refused with its key, its line and why; nothing is accepted and ignored."""

import pytest

from hp_core.errors import HPError
from hp_core.recipe.unsupported import REFUSED

VALUES = {  # key -> (YAML of a value that is refused, how the error shows it)
    "model.dtype": None,  # its own test below: the section is in every recipe
    "mesh.pp": ("2", "2"),
    "precision.compute": ("fp16", "'float16'"),
    "fsdp.offload": ("true", "true"),
    "compile": ("model", "'model'"),
}


@pytest.mark.parametrize("refusal", [refusal for refusal in REFUSED if VALUES[refusal.key]], ids=lambda refusal: refusal.key)
def test_a_value_that_nothing_implements_is_refused(load, refusal):
    value, shown = VALUES[refusal.key]
    path = refusal.key.replace("*", "0")
    text = "overrides: [{match: a, freeze: [x]}]"
    with pytest.raises(HPError) as caught:
        load(text, [f"{path}={value}"])
    assert caught.value.code == "HP515"
    assert caught.value.what == f"{path} is {shown}, but {refusal.why}"
    assert caught.value.where == f"--set {path}={value}"


def test_a_refusal_reads_as_one_sentence(load):
    with pytest.raises(HPError) as caught:
        load("mesh:\n  pp: 2")
    assert str(caught.value) == (
        "HP515: mesh.pp is 2, but pipeline parallelism is not implemented in this version; expected 1. recipe.yaml:3"
    )


def test_float16_parameters_are_refused(load):
    with pytest.raises(HPError) as caught:
        load("", head="model: {adapter: demo, config: {}, dtype: fp16}\n")
    assert str(caught.value) == (
        "HP515: model.dtype is 'float16', but training in float16 needs loss scaling, which is not implemented in this "
        "version; expected float32 or bfloat16 or float64. recipe.yaml:1"
    )


def test_a_section_of_a_plugin_says_itself_what_it_does_not_do(load):
    with pytest.raises(HPError) as caught:
        load("train:\n  steps: 1\n  resume: true")
    assert str(caught.value) == "HP515: train.resume is true, but runs are not resumed. recipe.yaml:4"


def test_every_refused_key_has_a_value_here():
    assert {refusal.key for refusal in REFUSED} == set(VALUES)


def test_defaults_are_never_refused(load):
    load("overrides: [{match: a, freeze: [x]}]")
