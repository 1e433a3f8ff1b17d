"""A recipe's model loads Hugging Face files, computes what Hugging Face computes, and saves the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hp_core.applier.apply import apply
from hp_core.mesh.context import MeshContext
from hp_core.models.build import build
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict
from hp_core.state.full import full_state
from hp_core.state.huggingface import save_hf
from hp_core.testing.ranks import run_ranks


def write_reference(folder: Path, *, tied: bool) -> None:
    """A checkpoint of Hugging Face whose every parameter is random."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)


def load_compute_save(source: str, target: str, mesh: dict[str, int]) -> tuple[torch.Tensor, bool]:
    """Return the logits of the loaded model and whether each whole tensor is Hugging Face's; save it to ``target``."""
    data = {
        "model": {"adapter": "qwen3_moe", "checkpoint": source, "dtype": "float32"},
        "mesh": mesh,
        "precision": {"compute": "float32"},
    }
    recipe = recipe_from_dict(data, plugins=load_plugins())
    built = build(recipe)
    context = MeshContext.create(built.plan.topology)
    model = apply(built.model, built.plan, context, weights=source)
    ids = torch.arange(32).reshape(2, 16)
    logits = model(ids, position_ids=torch.arange(16).expand(2, 16)).logits.detach()
    reference = Qwen3MoeForCausalLM.from_pretrained(source).state_dict()
    found = full_state(model, built.plan)
    save_hf(model, built.plan, context, path=target)
    return logits, all(torch.equal(found[name], reference[name]) for name in found)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mesh", "tied"),
    [({"tp": 2}, False), ({"tp": 2, "dp_shard": 2}, True)],
    ids=["tp", "fsdp and tp, tied"],
)
def test_hugging_face_in_and_out_on(tmp_path, mesh, tied):
    source, target = tmp_path / "in", tmp_path / "out"
    write_reference(source, tied=tied)
    world = 2 * mesh.get("dp_shard", 1)
    ids = torch.arange(32).reshape(2, 16)
    expected = Qwen3MoeForCausalLM.from_pretrained(source)(ids).logits
    for logits, equal in run_ranks(world, load_compute_save, str(source), str(target), mesh):
        assert equal
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    with safe_open(source / "model.safetensors", "pt") as one, safe_open(target / "model.safetensors", "pt") as two:
        assert set(one.keys()) == set(two.keys())
        assert all(torch.equal(one.get_tensor(key), two.get_tensor(key)) for key in one.keys())  # noqa: SIM118
    assert (target / "config.json").read_text() == (source / "config.json").read_text()
    assert torch.equal(Qwen3MoeForCausalLM.from_pretrained(target)(ids).logits, expected)
