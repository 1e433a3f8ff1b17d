"""--trust: code named by its path is refused, unless its package is trusted by the command line."""

import pytest

from hp_core.errors import HPError
from hp_core.recipe.load import load_recipe, recipe_from_dict
from hp_core.recipe.trust import check_trust

PATH = "hp_fake_schemas:Train"
ENTRY = f"overrides: [{{match: a, replace: {{kind: module, implementation: '{PATH}', source_type: X, with: {{eps: [1]}}}}}}]"
HEAD = "model: {adapter: demo, config: {hidden_size: 64}}\n"


def refusal(action) -> str:
    with pytest.raises(HPError) as caught:
        action()
    return str(caught.value)


def test_a_path_is_refused_by_default(load):
    assert refusal(lambda: load(ENTRY)) == (
        f"HP514: overrides.0.replace.implementation is '{PATH}'; expected the name of a registered family, since a recipe "
        "cannot name code to import. recipe.yaml:2. fix: if the code is yours, add --trust hp_fake_schemas to the command line"
    )


def test_a_path_in_a_trusted_package_is_accepted_and_recorded(load, tmp_path, plugins):
    (tmp_path / "recipe.yaml").write_text(HEAD + ENTRY)
    recipe = load_recipe(tmp_path / "recipe.yaml", plugins=plugins, trust=["json", "hp_fake_schemas", "json"])
    assert recipe.trusted == ("json", "hp_fake_schemas")
    assert recipe.declarations.family(PATH).baseline == PATH
    assert recipe.declarations.owner("family", PATH).version == "(trusted)"
    assert recipe.overrides[0].replace.arguments == {"eps": [1]}


def test_trust_is_not_written_into_the_recipe(plugins):
    recipe = recipe_from_dict({"model": {"adapter": "demo", "config": {"a": 1}}}, plugins=plugins, trust=["json"])
    assert "trusted" not in recipe.to_dict()
    assert "unknown key 'trusted'" in refusal(
        lambda: recipe_from_dict({"model": {"adapter": "demo", "config": {}}, "trusted": ["json"]}, plugins=plugins)
    )


def test_a_package_whose_name_only_begins_alike_is_not_trusted(load, plugins, tmp_path):
    (tmp_path / "recipe.yaml").write_text(HEAD + ENTRY)
    text = refusal(lambda: load_recipe(tmp_path / "recipe.yaml", plugins=plugins, trust=["hp_core"]))
    assert "cannot name code to import" in text


def test_a_trusted_path_must_be_a_reference(plugins):
    replace = {"kind": "module", "implementation": "json.dumps", "source_type": "X"}
    data = {"model": {"adapter": "demo", "config": {}}, "overrides": [{"match": "a", "replace": replace}]}
    assert refusal(lambda: recipe_from_dict(data, plugins=plugins, trust=["json"])) == (
        "HP514: overrides.0.replace.implementation is 'json.dumps'; expected package.module:Attribute. "
        "recipe: overrides.0.replace.implementation"
    )


def test_what_is_trusted_is_an_installed_package():
    assert refusal(lambda: check_trust(["a-b"])) == (
        "HP518: --trust 'a-b' is not a package; expected PACKAGE, such as acme_kernels"
    )
    assert refusal(lambda: check_trust(["no_such_package"])) == (
        "HP510: --trust names 'no_such_package', which cannot be imported; expected an installed package"
    )
