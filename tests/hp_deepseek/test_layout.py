"""The layouts of DeepSeek-V3 against the table of parallel placements, from a stored inventory: no model, no torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_components.attention_layout import mla_attention
from hp_components.block_layout import swiglu_mlp
from hp_core.contracts import FirstRank, LayoutContext, Partial, Replicate, Shard
from hp_core.mesh.topology import Topology
from hp_core.planner.serialise import inventory_from_json
from hp_deepseek import layout

DATA = Path(__file__).parents[1] / "data"
INVENTORY = inventory_from_json((DATA / "deepseek_v3_inventory.json").read_text())
FIGURES = json.loads((DATA / "model_figures.json").read_text())["DeepSeek-V3"]


def spec_of(name, provider, topology):
    context = LayoutContext(topology=topology, config=INVENTORY.config, inventory=INVENTORY)
    return provider(INVENTORY.module(name), context)


def tp(layouts):
    return {name: found["tp"] for name, found in layouts.items()}


def test_attention_cuts_heads_and_keeps_latents_whole():
    spec = spec_of("model.layers.0.self_attn", mla_attention, Topology(tp=2))
    assert tp(spec.params) == {
        "q_a_proj.weight": Replicate(),
        "q_a_proj.bias": Replicate(),
        "q_a_layernorm.weight": Replicate(),
        "q_b_proj.weight": Shard(0),
        "kv_a_proj_with_mqa.weight": Replicate(),
        "kv_a_proj_with_mqa.bias": Replicate(),
        "kv_a_layernorm.weight": Replicate(),
        "kv_b_proj.weight": Shard(0),
        "o_proj.weight": Shard(1),
        "o_proj.bias": Replicate(),
    }
    assert spec.views == {"o_proj.bias": FirstRank()}
    assert (tp(spec.out_src), tp(spec.out_dst)) == ({"output": Partial()}, {"output": Shard(1)})


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_routers_work_where_the_tokens_are(sequence_parallel):
    spec = spec_of("model.layers.1.mlp.gate", layout.router, Topology(tp=2, sequence_parallel=sequence_parallel))
    stream, tokens = (Shard(1), Shard(0)) if sequence_parallel else (Replicate(), Replicate())
    assert {found["tp"] for found in (*spec.in_src.values(), *spec.in_dst.values())} == {stream}
    assert {found["tp"] for found in (*spec.out_src.values(), *spec.out_dst.values())} == {tokens}
    assert tp(spec.params) == {"weight": Replicate()}


@pytest.mark.parametrize("name", ["model.layers.0.mlp", "model.layers.1.mlp.shared_experts"])
def test_dense_and_shared_blocks_cut_columns_then_rows(name):
    spec = spec_of(name, swiglu_mlp, Topology(tp=2))
    assert tp(spec.params) == {"gate_proj.weight": Shard(0), "up_proj.weight": Shard(0), "down_proj.weight": Shard(1)}
    assert (tp(spec.in_src), tp(spec.in_dst)) == ({"x": Shard(1)}, {"x": Replicate()})


def test_rotary_angles_are_whole_on_every_rank():
    spec = spec_of("model.rotary_emb", layout.rotary, Topology(tp=2))
    every = (*spec.in_src.values(), *spec.in_dst.values(), *spec.out_src.values(), *spec.out_dst.values())
    assert {found["tp"] for found in every} == {Replicate()}
    assert spec.out_names == ("cos", "sin")


@pytest.mark.parametrize(("first", "dense"), [(0, 0), (1, 1), (4, 4), (9, 4)])
def test_the_first_layers_are_dense(first, dense):
    found = layout.counts({**INVENTORY.config, "first_k_dense_replace": first})
    assert found["dense_mlp"] == dense
    assert {found[name] for name in ("router", "experts", "shared_experts")} == {4 - dense}


def test_flops_are_the_published_model():
    assert round(layout.flops(FIGURES["config"], 4096) / 1e9, 2) == FIGURES["train_gflops_per_token_seq4096"]


def test_queries_without_a_latent_cost_their_own_matrix():
    config = {**FIGURES["config"], "num_hidden_layers": 1}
    latent, direct = layout.flops(config, 4096), layout.flops({**config, "q_lora_rank": None}, 4096)
    assert direct - latent == 6 * (7168 * 128 * 192 - 1536 * (7168 + 128 * 192))
