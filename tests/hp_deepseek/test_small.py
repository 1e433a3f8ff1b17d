"""The small model that is verified in place of a large one keeps its structure."""

from __future__ import annotations

import pytest

from hp_core.mesh.topology import Topology
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import load_recipe
from hp_deepseek.__main__ import recipes
from hp_deepseek.checks import check_config
from hp_deepseek.small import shrink

MESHES = [
    Topology(),
    Topology(tp=4),
    Topology(tp=4, dp_shard=2, ep=8),
    Topology(dp_shard=8, ep=8),
    Topology(dp_shard=4, tp=2, ep=4),
]


@pytest.fixture(scope="module", params=recipes())
def config(request):
    return load_recipe(recipes()[request.param], plugins=load_plugins()).model.config


@pytest.mark.parametrize("topology", MESHES, ids=str)
def test_it_is_a_legal_model_with_groups_experts_and_both_kinds_of_layers(config, topology):
    found = shrink(config, {axis: topology.degree(axis) for axis in ("tp", "cp", "ep")})
    assert check_config(found, topology) == []
    assert found["n_routed_experts"] >= max(8, 2 * topology.ep)
    assert found["n_routed_experts"] % topology.ep == 0
    assert found["n_routed_experts"] > found["num_experts_per_tok"] > 1
    assert found["n_group"] > found["topk_group"] > 1
    assert (found["num_hidden_layers"], found["first_k_dense_replace"]) == (4, 1)
    assert found["hidden_size"] == 64


@pytest.mark.parametrize(("change", "kept"), [({"q_lora_rank": None}, None), ({}, 24)])
def test_queries_keep_having_a_latent_or_none(config, change, kept):
    assert shrink({**config, **change}, {"tp": 1, "cp": 1, "ep": 1})["q_lora_rank"] == kept


@pytest.mark.parametrize(("dense", "layers", "kept"), [(0, 61, 0), (3, 61, 1), (61, 61, 4), (1, 1, 1), (0, 1, 0)])
def test_dense_layers_come_first_where_there_are_some(config, dense, layers, kept):
    changed = {**config, "first_k_dense_replace": dense, "num_hidden_layers": layers}
    assert shrink(changed, {"tp": 1, "cp": 1, "ep": 1})["first_k_dense_replace"] == kept
