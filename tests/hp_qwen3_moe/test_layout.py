"""The layouts of Qwen3-MoE against the table of parallel placements, from a stored inventory: no model, no torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_core.contracts import FirstRank, HeadSlice, LayoutContext, Partial, Replicate, Shard
from hp_core.mesh.topology import Topology
from hp_core.planner.serialise import inventory_from_json
from hp_qwen3_moe import layout

DATA = Path(__file__).parents[1] / "data"
INVENTORY = inventory_from_json((DATA / "qwen3_moe_inventory.json").read_text())
FIGURES = json.loads((DATA / "model_figures.json").read_text())
QWEN = {name: case for name, case in FIGURES.items() if case.get("model_type") == "qwen3_moe"}
CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
}


def spec_of(name, provider, topology, **config):
    context = LayoutContext(topology=topology, config={**INVENTORY.config, **config}, inventory=INVENTORY)
    return provider(INVENTORY.module(name), context)


def attention(topology, **config):
    return spec_of("model.layers.0.self_attn", layout.attention, topology, **config)


def tp(layouts):
    return {name: found["tp"] for name, found in layouts.items()}


def test_attention_cuts_heads_and_leaves_partial_sums():
    spec = attention(Topology(tp=2))
    assert tp(spec.params) == {
        "q_proj.weight": Shard(0),
        "q_proj.bias": Shard(0),
        "k_proj.weight": Shard(0),
        "k_proj.bias": Shard(0),
        "v_proj.weight": Shard(0),
        "v_proj.bias": Shard(0),
        "o_proj.weight": Shard(1),
        "o_proj.bias": Replicate(),
        "q_norm.weight": Replicate(),
        "k_norm.weight": Replicate(),
    }
    assert spec.views == {"o_proj.bias": FirstRank()}
    assert tp(spec.in_src) == {"hidden_states": Shard(1), "position_embeddings": Replicate()}
    assert tp(spec.in_dst) == {"hidden_states": Replicate(), "position_embeddings": Replicate()}
    assert (tp(spec.out_src), tp(spec.out_dst)) == ({"output": Partial()}, {"output": Shard(1)})
    assert spec.out_names == ("output", None)


@pytest.mark.parametrize(("degree", "sliced"), [(1, False), (2, False), (4, True), (8, True)])
def test_with_fewer_kv_heads_than_ranks_each_rank_takes_the_slice_of_its_head(degree, sliced):
    spec = attention(Topology(tp=degree))
    names = [f"{projection}.{kind}" for projection in ("k_proj", "v_proj") for kind in ("weight", "bias")]
    assert {spec.views.get(name) for name in names} == {HeadSlice(0, 2) if sliced else None}
    assert {spec.params[name]["tp"] for name in names} == {Replicate() if sliced else Shard(0)}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norms_and_routers_work_where_the_tokens_are(sequence_parallel):
    topology = Topology(tp=2, sequence_parallel=sequence_parallel)
    norm = spec_of("model.norm", layout.norm, topology)
    router = spec_of("model.layers.0.mlp.gate", layout.router, topology)
    assert {found["tp"] for found in (*norm.in_dst.values(), *norm.out_dst.values())} == {
        Shard(1) if sequence_parallel else Replicate()
    }
    assert {found["tp"] for found in (*router.in_dst.values(), *router.out_dst.values())} == {
        Shard(0) if sequence_parallel else Replicate()
    }
    assert tp(norm.params) == tp(router.params) == {"weight": Replicate()}


def test_the_dense_mlp_cuts_columns_then_rows():
    spec = spec_of("model.layers.1.mlp", layout.dense_mlp, Topology(tp=2))
    assert tp(spec.params) == {"gate_proj.weight": Shard(0), "up_proj.weight": Shard(0), "down_proj.weight": Shard(1)}
    assert (tp(spec.in_src), tp(spec.in_dst)) == ({"x": Shard(1)}, {"x": Replicate()})
    assert (tp(spec.out_src), tp(spec.out_dst)) == ({"output": Partial()}, {"output": Shard(1)})


def test_rotary_angles_are_whole_on_every_rank():
    spec = spec_of("model.rotary_emb", layout.rotary, Topology(tp=2))
    every = (*spec.in_src.values(), *spec.in_dst.values(), *spec.out_src.values(), *spec.out_dst.values())
    assert {found["tp"] for found in every} == {Replicate()}
    assert spec.out_names == ("cos", "sin")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [True] * 4),
        ({"mlp_only_layers": [0, 2]}, [False, True, False, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"num_experts": 0}, [False] * 4),
        ({"mlp_only_layers": None, "decoder_sparse_step": 3}, [False, False, True, False]),
    ],
)
def test_layers_are_mixtures_where_the_model_makes_them_so(config, expected):
    assert layout.moe_layers({**CONFIG, **config}) == expected
    counts = layout.counts({**CONFIG, **config})
    assert (counts["router"], counts["experts"], counts["dense_mlp"]) == (sum(expected), sum(expected), 4 - sum(expected))


def test_the_number_of_experts_has_two_names():
    assert layout.experts({"num_experts": 8}) == layout.experts({"num_local_experts": 8}) == 8


@pytest.mark.parametrize(
    ("config", "mesh", "told"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            {"tp": 4},
            "num_attention_heads (6) must be divisible by tp (4)",
        ),
        ({"vocab_size": 255}, {"tp": 2}, "vocab_size (255) must be divisible by tp (2)"),
        ({"moe_intermediate_size": 30}, {"tp": 4}, "moe_intermediate_size (30) must be divisible by tp (4)"),
        (
            {"intermediate_size": 90, "mlp_only_layers": [0]},
            {"tp": 4},
            "intermediate_size (90) must be divisible by tp (4)",
        ),
        ({"num_key_value_heads": 4, "num_attention_heads": 12}, {"tp": 3}, "vocab_size (256) must be divisible by tp (3)"),
        (
            {"num_key_value_heads": 6, "num_attention_heads": 12},
            {"tp": 4},
            "num_key_value_heads (6) must be divisible by tp (4)",
        ),
        (
            {"num_key_value_heads": 3, "num_attention_heads": 24},
            {"tp": 8},
            "tp (8) must be divisible by num_key_value_heads (3) when it is larger",
        ),
    ],
)
def test_a_size_that_does_not_divide_is_named_with_the_mesh(config, mesh, told):
    topology = Topology(**mesh)
    first = layout.check_config({**CONFIG, **config}, topology)[0]
    assert (first.code, first.what, first.where) == ("HP502", told, "mesh.tp")


def test_only_sizes_that_the_model_has_must_divide():
    assert layout.check_config({**CONFIG, "intermediate_size": 90}, Topology(tp=4)) == []
    assert layout.check_config({**CONFIG, "moe_intermediate_size": 90, "num_experts": 0}, Topology(tp=4)) == []


def problem(**config):
    (found,) = layout.check_config({**CONFIG, **config}, Topology())
    assert found.code is None
    return found.what, found.expected, found.where, found.fix


def test_the_router_loss_that_the_model_itself_would_add_is_refused():
    assert problem(output_router_logits=True) == (
        "output_router_logits is true",
        "false: the loss component does not add the router's auxiliary loss",
        "model.config.output_router_logits",
        "leave it out; auxiliary losses come with loss.aux",
    )


@pytest.mark.parametrize("value", [0, -2])
@pytest.mark.parametrize("key", layout.SIZES)
def test_a_size_below_one_is_refused(key, value):
    assert problem(**{key: value}) == (f"{key} is {value}", "at least 1", f"model.config.{key}", "")


@pytest.mark.parametrize(
    ("key", "value", "others", "expected"),
    [
        ("num_experts", -1, {}, "at least 1, or 0 for dense layers only"),
        ("num_experts_per_tok", 9, {}, "at most num_experts (8)"),
        ("num_key_value_heads", 3, {}, "a divisor of num_attention_heads (8)"),
        ("num_key_value_heads", 16, {}, "a divisor of num_attention_heads (8)"),
        ("head_dim", 7, {"hidden_size": 64}, "an even number: rotary embeddings turn pairs"),
        ("head_dim", 9, {"hidden_size": 72, "head_dim": None}, "an even number: rotary embeddings turn pairs"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(key, value, others, expected):
    assert problem(**{key: value, **others}) == (f"{key} is {value}", expected, f"model.config.{key}", "")


def test_a_dense_model_needs_no_experts_to_choose_from():
    assert layout.check_config({**CONFIG, "num_experts": 0, "num_experts_per_tok": 8}, Topology()) == []
    assert layout.check_config({**CONFIG, "mlp_only_layers": [0, 1, 2, 3], "num_experts_per_tok": 9}, Topology()) == []


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}])
def test_dropout_is_refused_where_ranks_share_a_sequence(mesh):
    config = {**CONFIG, "attention_dropout": 0.1}
    assert layout.check_config(config, Topology(dp_shard=2)) == []
    (problem,) = layout.check_config(config, Topology(**mesh))
    assert problem.where == "model.config.attention_dropout"
    assert problem.what == f"attention_dropout is 0.1 with tp={mesh.get('tp', 1)} cp={mesh.get('cp', 1)}"
    assert problem.expected == "0 with tp or cp: ranks would drop different things than one process"


@pytest.mark.parametrize("name", QWEN)
def test_flops_are_the_published_models(name):
    case = QWEN[name]
    assert round(layout.flops(case["config"], 4096) / 1e9, 2) == case["train_gflops_per_token_seq4096"]


def test_dense_layers_cost_their_own_mlp():
    config = {**QWEN["Qwen3-30B-A3B"]["config"], "num_hidden_layers": 1}
    sparse, dense = layout.flops(config, 4096), layout.flops({**config, "mlp_only_layers": [0]}, 4096)
    assert sparse - dense == 6 * 2048 * (128 + 8 * 3 * 768 - 3 * 6144)
