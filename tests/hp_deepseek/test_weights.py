"""The checkpoint mapping and the rotary frequencies agree with transformers' own, in names and in values."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from hp_core.contracts import BufferPlan, BuildPlan, ParameterPlan
from hp_core.mesh.topology import Topology
from hp_core.state.manifest import Piece, make_manifest
from hp_deepseek.weights import mapping, rotary

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "max_position_embeddings": 64,
}


def config(**fields) -> DeepseekV3Config:
    return DeepseekV3Config(**{**CONFIG, **fields})


def plan_of(model: DeepseekV3ForCausalLM) -> BuildPlan:
    saved = model.state_dict().keys()
    return BuildPlan(
        adapter="deepseek_v3",
        model_class="transformers.models.deepseek_v3.modeling_deepseek_v3:DeepseekV3ForCausalLM",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=8,
        parameters=[
            ParameterPlan(fqn=name, owner="", shape=parameter.shape, dtype="float32")
            for name, parameter in model.named_parameters()
        ],
        buffers=[
            BufferPlan(fqn=name, shape=buffer.shape, dtype="float32", persistent=name in saved)
            for name, buffer in model.named_buffers()
        ],
        mapping=mapping(model.config.to_dict()),
    )


def cut(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's part of a runtime tensor, written out once more."""
    part = whole if piece.expert is None else whole[piece.expert]
    return part if piece.dim is None else part[piece.start : piece.start + piece.shape[0]]


def test_file_keys_and_values_are_those_of_transformers_own_conversion():
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config())
    runtime = model.state_dict()
    ours = {
        piece.key: cut(runtime[entry.fqn], piece) for entry in make_manifest(plan_of(model)).entries for piece in entry.pieces
    }
    theirs = revert_weight_conversion(model, dict(runtime))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert "model.layers.2.mlp.experts.11.up_proj.weight" in ours
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in ours
    assert "model.layers.0.mlp.up_proj.weight" in ours


@pytest.mark.parametrize(("further", "ignored"), [(0, []), (1, [3]), (2, [3, 4])])
def test_layers_that_predict_further_tokens_are_left_out_on_purpose(further, ignored):
    manifest = make_manifest(plan_of(DeepseekV3ForCausalLM(config(num_nextn_predict_layers=further))))
    found = [layer for layer in range(2, 6) if manifest.ignores(f"model.layers.{layer}.eh_proj.weight")]
    assert found == ignored
    assert not manifest.ignores("model.layers.30.eh_proj.weight")


def test_the_mapping_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from hp_deepseek.weights import mapping; "
        "mapping({'n_routed_experts': 2, 'num_hidden_layers': 1})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


ROPES = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0},
]


@pytest.mark.parametrize("parameters", ROPES, ids=[rope["rope_type"] for rope in ROPES])
@pytest.mark.parametrize("name", ["inv_freq", "original_inv_freq"])
def test_rotary_frequencies_of_a_model_without_memory_are_those_of_a_real_one(parameters, name):
    real = DeepseekV3ForCausalLM(config(rope_parameters=dict(parameters)))
    with torch.device("meta"):
        empty = DeepseekV3ForCausalLM(config(rope_parameters=dict(parameters))).bfloat16()
    found = rotary(empty, f"model.rotary_emb.{name}")
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    assert torch.equal(found, getattr(real.model.rotary_emb, name))
