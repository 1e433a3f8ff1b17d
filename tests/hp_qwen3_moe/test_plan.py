"""Plans of Qwen3-MoE: from a stored inventory without torch, at the published sizes, and against the running model."""

from __future__ import annotations

import json
import subprocess
import sys
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
from hp_core.recipe.load import recipe_from_dict
from hp_core.testing.flow import trace_flow
from hp_core.testing.patience import HANG_S
from hp_qwen3_moe.adapter import ADAPTER

DATA = Path(__file__).parents[1] / "data"
STORED = inventory_from_json((DATA / "qwen3_moe_inventory.json").read_text())
FIGURES = json.loads((DATA / "model_figures.json").read_text())
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
recipe = recipe_from_dict({"model": {"adapter": "qwen3_moe", "config": {}}}, plugins=load_plugins())
for topology in (Topology(tp=2), Topology(tp=8, dp_shard=64)):
    print(plan_digest(plan(inventory, recipe, topology)))
"""


def recipe_of(**config):
    return recipe_from_dict({"model": {"adapter": "qwen3_moe", "config": config}}, plugins=PLUGINS)


def planned(topology, inventory=STORED):
    return plan(inventory, recipe_of(), topology)


def test_a_plan_needs_no_torch():
    command = [sys.executable, "-c", WITHOUT_TORCH, str(DATA / "qwen3_moe_inventory.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [plan_digest(planned(mesh)) for mesh in (Topology(tp=2), Topology(tp=8, dp_shard=64))]


@pytest.fixture(scope="module")
def built():
    config = {name: value for name, value in STORED.config.items() if name not in ("num_local_experts", "dtype")}
    known = {**config, "num_experts": STORED.config.get("num_local_experts", STORED.config.get("num_experts"))}
    names = ("architectures", "transformers_version", "_name_or_path", "rope_parameters")
    return build(recipe_of(**{name: value for name, value in known.items() if name not in names}))


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


def test_sequence_parallelism_decides_what_varies():
    def varying(topology):
        return {boundary.fqn.rpartition(".")[2]: boundary.varying for boundary in planned(topology).boundaries}

    cut = dict.fromkeys(["embed_tokens", "self_attn", "experts", "mlp", "lm_head"], True)
    tokens = ["gate", "input_layernorm", "post_attention_layernorm", "norm"]
    assert varying(Topology(tp=2)) == {**cut, **dict.fromkeys(tokens, True), "rotary_emb": False}
    assert varying(Topology(tp=2, sequence_parallel=False)) == {**cut, **dict.fromkeys(tokens, False), "rotary_emb": False}
    assert not any(varying(Topology(dp_shard=4)).values())


def test_the_experts_complete_the_routers_gradient_by_themselves():
    moves = {
        c.port: (c.forward, c.backward)
        for boundary in planned(Topology(tp=2, sequence_parallel=False)).boundaries
        if boundary.fqn == "model.layers.0.mlp.experts"
        for c in boundary.collectives
    }
    assert moves == {
        "hidden_states": ("identity", "all_reduce"),
        "top_k_weights": ("identity", "all_reduce"),
        "output": ("all_reduce", "identity"),
    }


def test_tied_embeddings_are_one_parameter():
    (embedding,) = [p for p in planned(Topology(tp=2)).parameters if p.aliases]
    assert (embedding.fqn, embedding.aliases) == ("model.embed_tokens.weight", ("lm_head.weight",))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(PlanError) as error:
        planned(Topology(tp=16))
    assert str(error.value) == (
        "HP502: num_attention_heads (8) must be divisible by tp (16). recipe, mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=16 "
        "ep=1. fix: set mesh.tp to 8"
    )


@pytest.mark.parametrize(("name", "world"), [("Qwen3-30B-A3B", 64), ("Qwen3-235B-A22B", 512)])
def test_the_published_sizes_are_planned_on_many_ranks(name, world):
    case = FIGURES[name]
    recipe = recipe_of(**case["config"])
    found = plan(build(recipe).inventory, recipe, Topology.for_world(world, tp=8))
    numbers = figures(found, adapter=ADAPTER)
    assert numbers.total == case["parameters_total"]
    assert numbers.active == case["parameters_active_per_token"]
    assert round((numbers.flops_per_token or 0) / 1e9, 2) == case["train_gflops_per_token_seq4096"]
    assert found.topology.world == world


def test_a_mixture_of_bf16_and_fp32_is_planned_per_module():
    data = {"model": {"adapter": "qwen3_moe", "config": {}, "dtype": "bf16"}}
    found = plan(STORED, recipe_from_dict(data, plugins=PLUGINS), Topology(tp=2))
    gates = {p.fqn for p in found.parameters if p.dtype == "float32"}
    assert gates == {f"model.layers.{index}.mlp.gate.weight" for index in (0, 2, 3)}
    assert {unit.fqn for unit in found.units if unit.compute == "float32"} == {fqn.rpartition(".")[0] for fqn in gates}
    assert {b.fqn for b in found.boundaries if b.compute == "float32"} == {fqn.rpartition(".")[0] for fqn in gates}


def test_the_declared_flow_is_what_the_running_model_does(built):
    model, specs = built.model, {boundary.fqn: boundary.spec for boundary in built.plan.boundaries}
    declared = {(edge.producer, edge.consumer) for rule in ADAPTER.flow for edge in edges(rule, specs)}
    used = set()
    for producer, consumer in trace_flow(model, built.inventory, specs):
        through = {(producer, "@residual"), ("@residual", consumer)}
        direct = {(producer, consumer)}
        assert direct <= declared or through <= declared, (producer, consumer)
        used |= direct if direct <= declared else through
    assert {edge for edge in declared - used if edge[1] != "@output"} == set()
