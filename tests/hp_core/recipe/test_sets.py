"""``--set``: values from the command line are typed and told like those of the file."""

import pytest

from hp_core.errors import HPError


def test_a_value_is_put_in_and_later_ones_win(load):
    recipe = load("mesh: {tp: 1, sequence_parallel: true}", ["mesh.tp=4", "mesh.tp=2", "mesh.sequence_parallel=false"])
    assert (recipe.mesh.tp, recipe.mesh.sequence_parallel) == (2, False)


def test_sections_that_the_file_does_not_have_are_made(load):
    recipe = load("", ["train.steps=5", "train.optimizer.lr=1e-3", "train.optimizer.betas=[0.5, 0.6]", "compile=off"])
    assert recipe.sections["train"].optimizer.betas == (0.5, 0.6)


def test_null_takes_a_value_back(load, tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 32}')
    recipe = load("", ["model.config=null", "model.checkpoint=."])
    assert (recipe.model.checkpoint, recipe.model.config) == (str(tmp_path), {"hidden_size": 32})


def test_members_of_a_configuration_and_of_a_list_can_be_set(load):
    recipe = load("freeze: [a, b]", ["model.config.hidden_size=8", "freeze.1=c"])
    assert (recipe.model.config, recipe.freeze) == ({"hidden_size": 8}, ("a", "c"))


def test_a_value_given_on_the_command_line_says_so(load):
    recipe = load("mesh: {tp: 1}", ["mesh.tp=2"])
    assert (recipe.where("mesh.tp"), recipe.where("mesh.cp")) == ("--set mesh.tp=2", "recipe.yaml:2")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("mesh.tp=two", "HP513: mesh.tp is 'two' (a string); expected an integer. --set mesh.tp=two"),
        ("mesh.tpp=2", "HP512: unknown key 'mesh.tpp'; did you mean 'tp'? --set mesh.tpp=2"),
        ("mesh.tp=0", "HP503: mesh.tp is 0; expected a positive integer. --set mesh.tp=0"),
        ("mesh.tp", "HP518: 'mesh.tp' is not a key and its value; expected --set KEY=VALUE, such as --set mesh.tp=2"),
        ("=2", "HP518: '=2' is not a key and its value; expected --set KEY=VALUE, such as --set mesh.tp=2"),
        ("mesh..tp=2", "HP518: 'mesh..tp=2' is not a key and its value; expected --set KEY=VALUE, such as --set mesh.tp=2"),
        ("device.kind=cpu", "HP518: device is 'cpu', which has no key 'kind'. --set device.kind=cpu"),
        ("freeze.5=a", "HP518: freeze has 1 member, none called '5'. --set freeze.5=a"),
        ("mesh.tp=[1", "HP511: not valid YAML: expected ',' or ']', but got '<stream end>'. --set mesh.tp=[1"),
        (
            "mesh.tp=99999999999999999999",
            "HP514: mesh.tp is '99999999999999999999'; expected an integer of at most 64 bits. "
            "--set mesh.tp=99999999999999999999",
        ),
        ("mesh=", "HP513: mesh is null; expected a mapping. --set mesh=. fix: write {} or leave the key out"),
        (
            "mesh={tp: 2, tp: 3}",
            "HP517: the key 'mesh.tp' occurs twice, first at --set mesh={tp: 2, tp: 3}. "
            "--set mesh={tp: 2, tp: 3}. fix: remove one of them",
        ),
    ],
)
def test_a_mistake_names_the_argument(load, argument, message):
    with pytest.raises(HPError) as caught:
        load("device: cpu\nfreeze: [a]", [argument])
    assert str(caught.value) == message


def test_an_argument_with_line_breaks_stays_on_one_line(load):
    with pytest.raises(HPError) as caught:
        load("", ["mesh.tp='a\nb'"])
    assert "\n" not in caught.value.line
