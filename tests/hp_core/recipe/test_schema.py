"""The recipe as a value: topology, places, derived settings, and a round trip through YAML."""

import json
import subprocess
import sys

import pytest

from hp_core.errors import HPError
from hp_core.mesh.topology import Topology
from hp_core.recipe.load import load_recipe, recipe_from_dict
from hp_core.recipe.schema import Mesh
from hp_core.recipe.values import IllegalValueError

FULL = """
mesh: {tp: 2, dp_replicate: 2, sequence_parallel: false}
precision: {compute: bf16}
recompute: {mode: selective, layers: [0, 'model.layers.1*']}
protocols: {cp: allgather, ep: {name: dedup}}
freeze: ['*.bias', 'true', '1e-3', '0x10', 'null', "a\\nb", 'ünï', '12']
overrides:
  - match: [a, b]
    replace: {kind: module, implementation: norm, source_type: N, with: {eps: 1e-8, gemm: grouped}}
  - {match: c, freeze: [w]}
train: {steps: 3, path: data/x, optimizer: {lr: 1e-9}}
"""


def test_the_topology_fills_the_processes_that_are_left(load):
    recipe = load("mesh: {tp: 2, dp_replicate: 2}")
    assert recipe.topology(8) == Topology(tp=2, dp_replicate=2, dp_shard=2)
    assert recipe.topology() == Topology(tp=2, dp_replicate=2)


def test_without_a_number_of_processes_the_mesh_is_as_small_as_its_degrees_allow(load):
    assert load("mesh: {ep: 2}").topology() == Topology(dp_shard=2, ep=2)
    assert load("mesh: {ep: 4, tp: 2}").topology() == Topology(dp_shard=2, tp=2, ep=4)
    assert load("mesh: {ep: 2, tp: 2}").topology() == Topology(tp=2, ep=2)


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("sp", "sequence parallelism is part of tp: set tp, and mesh.sequence_parallel switches it (on by default)"),
        ("fsdp", "write dp_shard"),
        ("dp", "write dp_replicate"),
    ],
)
def test_the_field_s_words_for_what_the_mesh_calls_otherwise_are_answered(load, key, fix):
    with pytest.raises(HPError) as caught:
        load(f"mesh: {{{key}: 2}}")
    assert str(caught.value) == (
        f"HP512: unknown key 'mesh.{key}'; expected one of cp, dp_replicate, dp_shard, ep, loss_parallel, pp, "
        f"sequence_parallel, shared_memory, tp. recipe.yaml:2. fix: {fix}"
    )


def test_flags_of_the_mesh_reach_the_topology(load):
    topology = load("mesh: {sequence_parallel: false, loss_parallel: false, dp_shard: 2}").topology()
    assert topology == Topology(dp_shard=2, sequence_parallel=False, loss_parallel=False)


def test_a_mesh_that_does_not_fit_the_processes_names_the_line(load):
    with pytest.raises(HPError) as caught:
        load("mesh: {tp: 2, dp_shard: 2}").topology(6)
    assert str(caught.value) == (
        "HP501: pp * dp_replicate * dp_shard * cp * tp = 1 * 1 * 2 * 1 * 2 = 4, but the job has 6 processes; expected degrees "
        "that multiply to 6. recipe.yaml:2, mesh: dp_replicate=1 dp_shard=2 pp=1 cp=1 tp=2 ep=1. "
        "fix: start 4 processes, or set dp_shard to -1"
    )


def test_a_mesh_that_cannot_be_filled_names_the_line(load):
    with pytest.raises(HPError, match=r"HP501.*recipe\.yaml:2"):
        load("mesh: {tp: 4}").topology(6)


def test_a_degree_built_in_code_is_checked_too():
    with pytest.raises(IllegalValueError, match="tp is true; expected a positive integer"):
        Mesh(tp=True)


def test_tokens_and_seed_come_from_the_trainer_s_section(load):
    recipe = load("train: {steps: 1, micro_batch_size: 3, sequence_length: 64, seed: 7}")
    assert (recipe.tokens, recipe.seed) == ((3, 64), 7)
    assert (load("").tokens, load("").seed) == ((1, 4096), 0)


def test_compute_is_the_dtype_of_the_parameters_unless_set(load):
    assert (load("").compute, load("precision: {compute: bf16}").compute) == ("float32", "bfloat16")


def test_the_resolved_recipe_loads_again_to_an_equal_one(load, plugins, tmp_path):
    recipe = load(FULL)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/resolved.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path / "other/resolved.yaml", plugins=plugins) == recipe
    assert recipe_from_dict(recipe.to_dict(), plugins=plugins) == recipe
    assert recipe_from_dict(json.loads(json.dumps(recipe.to_dict())), plugins=plugins) == recipe


def test_the_resolved_recipe_writes_every_default_out(load):
    data = load("train: {steps: 3}").to_dict()
    assert data["protocols"]["ep"] == {"name": "dedup"}
    assert data["train"]["optimizer"] == {"name": "adamw", "lr": 0.001, "betas": [0.9, 0.95]}


def test_layouts_are_written_as_they_are_read(load):
    from hp_core.contracts import Shard
    from hp_core.recipe.overrides import Override
    from hp_core.recipe.unstructure import plain

    assert plain(Override(match="a", params={"w": {"tp": Shard(1)}}))["params"] == {"w": {"tp": "shard(1)"}}


def test_a_different_value_is_a_different_recipe(load):
    assert load("mesh: {tp: 2}") != load("mesh: {tp: 1}")


def test_loading_imports_neither_torch_nor_transformers():
    code = "import hp_core.recipe.load, sys; assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
