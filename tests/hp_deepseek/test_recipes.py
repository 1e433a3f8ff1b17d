"""The recipes that ship: published sizes, meshes that fit, and nothing that this version refuses."""

from pathlib import Path

import pytest

from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import load_recipe, recipe_from_dict

FOLDER = Path(__file__).parents[2] / "hp_deepseek/recipes"


@pytest.fixture(scope="module")
def plugins():
    return load_plugins()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_loads_and_its_resolved_form_is_equal(path, plugins):
    recipe = load_recipe(path, plugins=plugins)
    assert recipe.adapter.name == "deepseek_v3"
    assert recipe_from_dict(recipe.to_dict(), plugins=plugins) == recipe


def test_the_published_size_has_a_mesh_for_its_processes(plugins):
    recipe = load_recipe(FOLDER / "deepseek-v3.yaml", plugins=plugins)
    topology = recipe.topology(2048)
    assert (topology.tp, topology.dp_shard, recipe.compute) == (8, 256, "bfloat16")
    assert recipe.sections["train"].global_batch_size % (topology.data * recipe.tokens[0]) == 0


def test_the_tiny_model_has_a_dense_layer_mixtures_and_groups_and_reads_bytes(plugins):
    recipe = load_recipe(FOLDER / "tiny.yaml", plugins=plugins)
    config = recipe.model.config
    assert config["num_hidden_layers"] - config["first_k_dense_replace"] == 3
    assert config["n_group"] > config["topk_group"] > 1
    assert (config["vocab_size"], recipe.sections["data"].tokenizer) == (256, "bytes")
