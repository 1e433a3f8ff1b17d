"""Plans of DeepSeek-V3: from a stored inventory without torch, at the published size, and against the running model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.models.build import build
from hp_core.planner.figures import figures
from hp_core.planner.flow import edges
from hp_core.planner.plan import plan
from hp_core.planner.serialise import inventory_from_json, plan_digest
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import load_recipe, recipe_from_dict
from hp_core.testing.flow import trace_flow
from hp_core.testing.patience import HANG_S
from hp_deepseek.adapter import ADAPTER

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
STORED = inventory_from_json((DATA / "deepseek_v3_inventory.json").read_text())
FIGURES = json.loads((DATA / "model_figures.json").read_text())["DeepSeek-V3"]
PLUGINS = load_plugins()
TOPOLOGIES = [Topology(), Topology(tp=2), Topology(tp=2, sequence_parallel=False), Topology(tp=4, dp_shard=2), Topology(tp=8)]

WITHOUT_TORCH = """
import sys, importlib.abc, pathlib

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is imported while planning")

sys.meta_path.insert(0, Refuse())
from hp_core.mesh.topology import Topology
from hp_core.planner.plan import plan
from hp_core.planner.serialise import inventory_from_json, plan_digest
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict

inventory = inventory_from_json(pathlib.Path(sys.argv[1]).read_text())
recipe = recipe_from_dict({"model": {"adapter": "deepseek_v3", "config": {}}}, plugins=load_plugins())
print(plan_digest(plan(inventory, recipe, Topology(tp=2))))
"""


def recipe_of(**config):
    return recipe_from_dict({"model": {"adapter": "deepseek_v3", "config": config}}, plugins=PLUGINS)


def planned(topology, inventory=STORED):
    return plan(inventory, recipe_of(), topology)


@pytest.fixture(scope="module")
def built():
    names = ("architectures", "dtype", "model_type", "rope_parameters", "transformers_version", "_name_or_path")
    config = {name: value for name, value in STORED.config.items() if name not in names}
    return build(recipe_of(**config))


def test_a_plan_needs_no_torch():
    command = [sys.executable, "-c", WITHOUT_TORCH, str(DATA / "deepseek_v3_inventory.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == plan_digest(planned(Topology(tp=2)))


def test_the_stored_inventory_is_what_the_model_contains(built):
    def content(inventory):
        return inventory.modules, inventory.aliases, [(item.fqn, item.source, item.family) for item in inventory.replacements]

    assert content(built.inventory) == content(STORED), "run tests/data/take_inventory.py"


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_parameter_is_owned_once_and_gradients_follow_the_convention(topology):
    found = planned(topology)
    names = [name for p in found.parameters for name in (p.fqn, *p.aliases)]
    assert sorted(names) == sorted(STORED.parameters_below(""))
    varying = {boundary.fqn: boundary.varying for boundary in found.boundaries}
    for parameter in found.parameters:
        cut = str(parameter.layout["tp"]).startswith("Shard")
        partial = "Partial" if varying[parameter.owner] else "Replicate"
        assert str(parameter.gradient["tp"]) == (str(parameter.layout["tp"]) if cut else partial)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_latents_are_replicated_parameters_with_partial_gradients(sequence_parallel):
    found = planned(Topology(tp=2, sequence_parallel=sequence_parallel))
    latents = ("q_a_proj.weight", "q_a_layernorm.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight")
    layouts = {p.fqn: (str(p.layout["tp"]), str(p.gradient["tp"])) for p in found.parameters if p.fqn.endswith(latents)}
    assert len(layouts) == 4 * len(latents)
    assert set(layouts.values()) == {("Replicate", "Partial")}


def test_a_mixture_s_boundaries_are_router_experts_and_shared_experts_never_the_block():
    inside = [b.fqn for b in planned(Topology(tp=2)).boundaries if b.fqn.startswith("model.layers.1.mlp")]
    assert sorted(inside) == [f"model.layers.1.mlp.{name}" for name in ("experts", "gate", "shared_experts")]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_the_router_and_its_correction_bias_stay_in_fp32(dtype):
    data = {"model": {"adapter": "deepseek_v3", "config": {}, "dtype": dtype}}
    found = plan(STORED, recipe_from_dict(data, plugins=PLUGINS), Topology(tp=2))
    biases = {buffer.fqn: (buffer.dtype, buffer.persistent) for buffer in found.buffers if "rotary" not in buffer.fqn}
    assert biases == {f"model.layers.{index}.mlp.gate.e_score_correction_bias": ("float32", True) for index in (1, 2, 3)}
    gates = {p.dtype for p in found.parameters if ".gate." in p.fqn}
    assert gates == {"float32"}


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(PlanError) as error:
        planned(Topology(tp=16))
    assert str(error.value) == (
        "HP502: num_attention_heads (8) must be divisible by tp (16). recipe, mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=16 "
        "ep=1. fix: set mesh.tp to 8"
    )


def test_the_published_size_is_planned_in_half_a_second_of_one_core():
    recipe = load_recipe(ROOT / "hp_deepseek/recipes/deepseek-v3.yaml", plugins=PLUGINS)
    inventory = build(recipe, mesh=Topology().view("activation")).inventory
    topology = recipe.topology(2048)
    started = time.process_time()
    found = plan(inventory, recipe, topology)
    assert time.process_time() - started < 0.5
    numbers = figures(found, adapter=ADAPTER)
    assert numbers.total == FIGURES["parameters_total"]
    assert numbers.active == FIGURES["parameters_active_per_token"]
    assert round((numbers.flops_per_token or 0) / 1e9, 2) == FIGURES["train_gflops_per_token_seq4096"]
    assert {name: recipe.model.config[name] for name in FIGURES["config"]} == FIGURES["config"]


def test_the_declared_flow_is_what_the_running_model_does(built):
    specs = {boundary.fqn: boundary.spec for boundary in built.plan.boundaries}
    declared = {(edge.producer, edge.consumer) for rule in ADAPTER.flow for edge in edges(rule, specs)}
    used = set()
    for producer, consumer in trace_flow(built.model, built.inventory, specs):
        through = {(producer, "@residual"), ("@residual", consumer)}
        direct = {(producer, consumer)}
        assert direct <= declared or through <= declared, (producer, consumer)
        used |= direct if direct <= declared else through
    assert {edge for edge in declared - used if edge[1] != "@output"} == set()
