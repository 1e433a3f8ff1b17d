"""A recipe's model loads Hugging Face files, computes what Hugging Face computes, and saves the same files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from hp_core.applier.apply import apply
from hp_core.errors import CheckpointError
from hp_core.mesh.context import MeshContext
from hp_core.models.build import build
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict
from hp_core.state.full import full_state
from hp_core.state.huggingface import save_hf
from hp_core.testing.ranks import run_ranks

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 64,
}
FURTHER = ["model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"]


def write_reference(folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """A checkpoint of Hugging Face whose every parameter is random, and with them the layers that it does not build."""
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM._from_config(DeepseekV3Config(**CONFIG), dtype=dtype)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(folder)


def add_further_layers(folder: Path, *keys: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **{key: torch.ones(2, 2) for key in keys}}, folder / "model.safetensors", {"format": "pt"})


def live(source: str, mesh: dict[str, int], dtype: str):
    data = {"model": {"adapter": "deepseek_v3", "checkpoint": source, "dtype": dtype}, "mesh": mesh}
    built = build(recipe_from_dict(data, plugins=load_plugins()))
    context = MeshContext.create(built.plan.topology)
    return apply(built.model, built.plan, context, weights=source), built.plan, context


def load_compute_save(source: str, target: str, mesh: dict[str, int], dtype: str) -> tuple[torch.Tensor, list[str], list[str]]:
    """Return the logits of the loaded model, and the names of tensors that are not Hugging Face's; save it to ``target``."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hp_core").addHandler(handler)
    model, plan, context = live(source, mesh, dtype)
    ids = torch.arange(32).reshape(2, 16)
    logits = model(ids, position_ids=torch.arange(16).expand(2, 16)).logits.detach()
    reference = DeepseekV3ForCausalLM.from_pretrained(source, dtype=dtype).state_dict()
    found = full_state(model, plan)
    other = [name for name in found if found[name].dtype != reference[name].dtype or not found[name].equal(reference[name])]
    save_hf(model, plan, context, path=target)
    return logits, other, lines


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "dp_shard": 2}], ids=["tp", "fsdp and tp"])
def test_hugging_face_in_and_out_on(tmp_path, mesh):
    source, target = tmp_path / "in", tmp_path / "out"
    write_reference(source)
    ids = torch.arange(32).reshape(2, 16)
    expected = DeepseekV3ForCausalLM.from_pretrained(source)(ids).logits
    add_further_layers(source, *FURTHER)
    for logits, other, lines in run_ranks(
        2 * mesh.get("dp_shard", 1), load_compute_save, str(source), str(target), mesh, "float32"
    ):
        assert other == []
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert lines == [f"2 tensors left out, which the model does not build: {', '.join(FURTHER)}"]
    with safe_open(source / "model.safetensors", "pt") as one, safe_open(target / "model.safetensors", "pt") as two:
        assert set(one.keys()) == {*two.keys(), *FURTHER}
        assert all(torch.equal(one.get_tensor(key), two.get_tensor(key)) for key in two.keys())  # noqa: SIM118
    assert torch.equal(DeepseekV3ForCausalLM.from_pretrained(target)(ids).logits, expected)


@pytest.mark.distributed
def test_a_bf16_checkpoint_keeps_router_and_correction_bias_in_fp32(tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    write_reference(source, dtype=torch.bfloat16)
    ((_, other, _),) = run_ranks(1, load_compute_save, str(source), str(target), {}, "bfloat16")
    assert other == []
    with safe_open(source / "model.safetensors", "pt") as one, safe_open(target / "model.safetensors", "pt") as two:
        assert all(torch.equal(one.get_tensor(key), two.get_tensor(key)) for key in one.keys())  # noqa: SIM118
        kept = {key: two.get_tensor(key).dtype for key in two.keys() if ".gate." in key}  # noqa: SIM118
    assert len(kept) == 4
    assert set(kept.values()) == {torch.float32}


@pytest.mark.distributed
def test_a_layer_that_nobody_knows_is_refused(tmp_path):
    write_reference(tmp_path / "in")
    add_further_layers(tmp_path / "in", "model.layers.4.eh_proj.weight")
    assert run_ranks(1, refusal, str(tmp_path / "in"))[0].startswith("HP802: ")


def refusal(source: str) -> str:
    with pytest.raises(CheckpointError) as error:
        live(source, {}, "float32")
    return str(error.value)
