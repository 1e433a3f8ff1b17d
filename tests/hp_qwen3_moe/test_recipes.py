"""The recipes that ship: published sizes, meshes that fit, and nothing that this version refuses."""

from pathlib import Path

import pytest

from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import load_recipe, recipe_from_dict

FOLDER = Path(__file__).parents[2] / "hp_qwen3_moe/recipes"
PUBLISHED = {  # file -> (world, dp_shard there, parameters in all)
    "qwen3-30b-a3b.yaml": (64, 16, 30_532_122_624),
    "qwen3-235b-a22b.yaml": (512, 128, 235_093_634_560),
}


@pytest.fixture(scope="module")
def plugins():
    return load_plugins()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_loads_and_its_resolved_form_is_equal(path, plugins):
    recipe = load_recipe(path, plugins=plugins)
    assert recipe.adapter.name == "qwen3_moe"
    assert recipe_from_dict(recipe.to_dict(), plugins=plugins) == recipe


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_has_the_published_number_of_parameters(name, plugins):
    config = load_recipe(FOLDER / name, plugins=plugins).model.config
    assert parameters(config) == PUBLISHED[name][2]
    assert (config["max_position_embeddings"], config["rope_theta"], config["norm_topk_prob"]) == (40960, 1e6, True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_has_a_mesh_for_its_processes(name, plugins):
    world, dp_shard, _ = PUBLISHED[name]
    recipe = load_recipe(FOLDER / name, plugins=plugins)
    topology = recipe.topology(world)
    assert (topology.tp, topology.dp_shard, recipe.compute) == (4, dp_shard, "bfloat16")
    assert recipe.sections["train"].global_batch_size % (topology.data * recipe.tokens[0]) == 0


def test_the_tiny_model_is_small_and_reads_bytes(plugins):
    recipe = load_recipe(FOLDER / "tiny.yaml", plugins=plugins)
    assert 1_000_000 < parameters(recipe.model.config) < 4_000_000
    assert (recipe.model.config["vocab_size"], recipe.sections["data"].tokenizer) == (256, "bytes")


def parameters(config) -> int:
    """Return the number of parameters of a model whose every layer is sparse, with query and key norms."""
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    attention = hidden * query * 2 + hidden * key * 2 + 2 * head
    experts = config["num_experts"] * (3 * hidden * config["moe_intermediate_size"] + hidden)
    layer = attention + experts + 2 * hidden
    return config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden + hidden
