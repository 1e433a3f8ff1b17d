"""The checkpoint mapping and the rotary frequencies agree with transformers' own, in names and in values."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from hp_core.contracts import BuildPlan, ParameterPlan
from hp_core.mesh.topology import Topology
from hp_core.state.manifest import Piece, make_manifest
from hp_qwen3_moe.weights import mapping, rotary


def config(**fields) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=8,
        num_experts=12,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        mlp_only_layers=[1],
        **fields,
    )


def plan_of(model: Qwen3MoeForCausalLM) -> BuildPlan:
    return BuildPlan(
        adapter="qwen3_moe",
        model_class="transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeForCausalLM",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=8,
        parameters=[
            ParameterPlan(fqn=name, owner="", shape=parameter.shape, dtype="float32")
            for name, parameter in model.named_parameters()
        ],
        mapping=mapping(model.config.to_dict()),
    )


def cut(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's part of a runtime tensor, written out once more."""
    part = whole if piece.expert is None else whole[piece.expert]
    return part if piece.dim is None else part[piece.start : piece.start + piece.shape[0]]


def test_file_keys_and_values_are_those_of_transformers_own_conversion():
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config())
    runtime = model.state_dict()
    ours = {
        piece.key: cut(runtime[entry.fqn], piece) for entry in make_manifest(plan_of(model)).entries for piece in entry.pieces
    }
    theirs = revert_weight_conversion(model, dict(runtime))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert "model.layers.2.mlp.experts.11.up_proj.weight" in ours
    assert "model.layers.1.mlp.up_proj.weight" in ours


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_read_under_both_of_its_names(key):
    assert [rule.experts for rule in mapping({key: 12}).rules] == [12, 12]


def test_the_mapping_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from hp_qwen3_moe.weights import mapping; mapping({'num_experts': 2})"
    subprocess.run([sys.executable, "-c", code], check=True)


ROPES = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16},
]


@pytest.mark.parametrize("parameters", ROPES, ids=[rope["rope_type"] for rope in ROPES])
@pytest.mark.parametrize("name", ["inv_freq", "original_inv_freq"])
def test_rotary_frequencies_of_a_model_without_memory_are_those_of_a_real_one(parameters, name):
    real = Qwen3MoeForCausalLM(config(rope_parameters=dict(parameters)))
    with torch.device("meta"):
        empty = Qwen3MoeForCausalLM(config(rope_parameters=dict(parameters))).bfloat16()
    found = rotary(empty, f"model.rotary_emb.{name}")
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    assert torch.equal(found, getattr(real.model.rotary_emb, name))
