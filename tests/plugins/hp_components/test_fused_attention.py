"""Attention with one projection for queries, keys and values: against Hugging Face, on meshes, and in Hugging Face's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_cases import CASES, attend, built, qwen_config, results
from component_recipes import QWEN, recipe
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from hp_components import plugin
from hp_components.fused_attention import FusedGQAAttention
from hp_core.applier.apply import apply
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_core.models.build import build
from hp_core.state.huggingface import save_hf
from hp_core.state.transforms import inverse_gradient, strands
from hp_core.testing.ranks import run_ranks

FAMILY = next(family for family in plugin.hp_families() if family.name == "gqa_attention")
BIASED: dict[str, Any] = {**QWEN, "attention_bias": True}
FUSED = {
    "match": "model.layers.*.self_attn",
    "replace": {
        "kind": "module",
        "implementation": "gqa_attention",
        "source_type": "Qwen3MoeAttention",
        "with": {"qkv": "fused"},
    },
}


def as_hugging_faces(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients by Hugging Face's names and in its shapes."""
    found = {}
    for name, gradient in gradients.items():
        for strand in strands(FAMILY.transforms.get(name, ()), tuple(gradient.shape)):
            found[strand.source or name] = inverse_gradient(strand.steps, gradient)
    return found


@pytest.mark.parametrize("case", ["qwen attention", "qwen attention with biases"])
def test_outputs_and_gradients_are_hugging_faces(case: str) -> None:
    make, _, _, call = CASES[case]
    theirs = built(make)
    gradients, outputs = results(theirs, call)
    ours = FusedGQAAttention(module=theirs)
    found, found_outputs = results(ours, call)
    found = as_hugging_faces(found)
    assert found.keys() == gradients.keys()
    pairs = [*zip(found_outputs, outputs, strict=True), *((found[name], gradients[name]) for name in gradients)]
    assert all(float((one - other).abs().max()) <= 1e-9 * float(other.abs().max()) for one, other in pairs)


def test_a_window_and_no_norms_are_kept() -> None:
    theirs = built(lambda: qwen.Qwen3MoeAttention(qwen_config(use_sliding_window=True, sliding_window=3), 0))
    expected = results(theirs, attend(16, 3))[1]
    ours = FusedGQAAttention(module=theirs)
    torch.testing.assert_close(results(ours, attend(16))[1], expected, rtol=0, atol=1e-9)
    del theirs._modules["q_norm"], theirs._modules["k_norm"]
    bare = FusedGQAAttention(module=theirs)
    assert [name for name, _ in bare.named_children()] == ["qkv_proj", "o_proj"]
    assert not torch.equal(results(bare, attend(16))[1][0], expected[0])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_group_holds_the_rows_of_its_heads(device: str, bias: bool) -> None:
    with torch.device(device):
        theirs = qwen.Qwen3MoeAttention(qwen_config(attention_bias=bias), 0).eval().requires_grad_(False)
        ours = FusedGQAAttention(module=theirs)
    assert ours.qkv_proj.weight.shape == (2, 4, 16, 32)
    assert (ours.training, ours.qkv_proj.weight.requires_grad) == (False, False)
    assert ours.o_proj is theirs.o_proj
    assert (ours.qkv_proj.bias is not None) == bias
    if device == "cpu":
        assert torch.equal(ours.qkv_proj.weight[1, :2].flatten(0, 1), theirs.q_proj.weight[32:])
        assert torch.equal(ours.qkv_proj.weight[:, 3].flatten(0, 1), theirs.v_proj.weight)


def test_biases_on_some_projections_only_are_refused() -> None:
    theirs = qwen.Qwen3MoeAttention(qwen_config(attention_bias=True), 0)
    theirs.k_proj.bias = None
    with pytest.raises(PlanError) as caught:
        FusedGQAAttention(module=theirs)
    assert str(caught.value) == (
        "HP541: gqa_attention cannot replace a module with biases on q_proj, v_proj only; expected biases on q_proj, k_proj "
        "and v_proj, or on none. fix: keep the original module"
    )


def test_fewer_key_value_heads_than_ranks_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        build(recipe(mesh={"tp": 4}, overrides=[FUSED]))
    assert str(caught.value) == (
        "HP502: model.layers.0.self_attn.num_kv_heads (2) must be divisible by tp (4) where queries, keys and values are "
        "fused. recipe: mesh.tp, mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=4 ep=1. fix: with: {qkv: separate}"
    )


def saved_again(folder: Path, out: Path, tp: int, shards: int) -> list[str]:
    """Load Hugging Face files into a model with fused attention, and save them; return its parameters' names."""
    asked = recipe(BIASED, mesh={"tp": tp, "dp_shard": shards}, overrides=[FUSED])
    mesh = MeshContext.create(asked.topology(tp * shards))
    built_model = build(asked, mesh=mesh)
    model: nn.Module = apply(built_model.model, built_model.plan, mesh, weights=folder)
    save_hf(model, built_model.plan, mesh, path=out)
    return [name for name, _ in model.named_parameters()]


@pytest.mark.distributed
@pytest.mark.parametrize(("tp", "shards"), [(1, 1), (2, 2)])
def test_hugging_faces_files_stay_what_they_were(tmp_path: Path, tp: int, shards: int) -> None:
    from hp_core.testing.cell import ModelCase
    from hp_core.testing.reference import make_reference

    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    run_ranks(1, make_reference, ModelCase(adapter="qwen3_moe", config=BIASED, rows=2, sequence=16), source, "float32")
    names = run_ranks(tp * shards, saved_again, source, out, tp, shards)[0]
    assert {"model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.self_attn.qkv_proj.bias"} <= set(names)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
