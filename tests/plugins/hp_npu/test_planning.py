"""A plan for NPUs is made on any machine; applying it where torch_npu is missing is one error."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from npu_operators import Calls
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch_npu_wheel import stored

from hp_core.applier.apply import apply
from hp_core.contracts import BuildPlan
from hp_core.errors import HPError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.models.build import build
from hp_core.plugins.lazy import module_exists
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict

pytest.importorskip("hp_qwen3_moe")
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
}
REPLACED = [  # pattern, component, source type
    ("model.norm", "rms_norm", "Qwen3MoeRMSNorm"),
    ("model.layers.*.self_attn", "gqa_attention", "Qwen3MoeAttention"),
    ("model.layers.0.mlp", "swiglu_mlp", "Qwen3MoeMLP"),
]
OVERRIDES = [
    {"match": match, "replace": {"kind": "module", "implementation": name, "source_type": source}}
    for match, name, source in REPLACED
]


def recipe(**keys: Any) -> Any:
    model = {"adapter": "qwen3_moe", "config": {**CONFIG, **keys.pop("config", {})}, "dtype": keys.pop("dtype", "float32")}
    return recipe_from_dict({"model": model, "overrides": OVERRIDES, "device": "npu", **keys}, plugins=load_plugins(environ={}))


def chosen(plan: BuildPlan, fqn: str) -> dict[str, tuple[str, str]]:
    return {entry.op: (entry.name, entry.reason) for entry in plan.kernels if entry.fqn == fqn}


def test_auto_takes_the_kernels_for_npus() -> None:
    plan = build(recipe()).plan
    assert plan.device == "npu"
    own = ("npu", "auto: for npu")
    assert chosen(plan, "model.norm") == {"rms_norm": own}
    assert chosen(plan, "model.layers.0.mlp") == {"swiglu": own}
    assert chosen(plan, "model.layers.1.self_attn") == dict.fromkeys(("rms_norm", "rotary", "attention"), own)
    assert {entry.requires for entry in plan.kernels if entry.name == "npu"} == {("torch_npu",)}


def test_where_a_condition_is_false_the_next_kernel_is_taken_and_the_plan_says_why() -> None:
    plan = build(recipe(config={"head_dim": 896})).plan
    assert chosen(plan, "model.layers.1.self_attn") == {
        "rms_norm": ("npu", "auto: for npu"),
        "rotary": ("torch", "auto: for any device; npu does not apply (hp_npu.conditions:rotary)"),
        "attention": ("torch", "auto: for any device; npu does not apply (hp_npu.conditions:attention)"),
    }
    assert {entry.name for entry in build(recipe(dtype="float64")).plan.kernels if entry.op in ("rms_norm", "attention")} == {
        "torch"
    }


def test_a_kernel_that_is_named_but_does_not_apply_is_refused() -> None:
    with pytest.raises(HPError) as caught:
        build(recipe(config={"head_dim": 896}, kernels={"attention": "npu"}))
    assert str(caught.value) == (
        "HP570: the kernel attention@npu does not apply to model.layers.0.self_attn: its condition "
        "hp_npu.conditions:attention is false; expected a kernel that applies. recipe: kernels.attention. "
        "fix: one of npu, reference, torch, for the modules it does not apply to"
    )


@pytest.mark.skipif(module_exists("torch_npu"), reason="torch_npu is installed")
def test_applying_it_without_torch_npu_is_one_error() -> None:
    start_single()
    built = build(recipe())
    with pytest.raises(HPError) as caught:
        apply(built.model, built.plan, MeshContext.create(Topology()))
    op, fqn = "rms_norm", "model.layers.0.self_attn"
    assert str(caught.value) == (
        f"HP571: the kernel {op}@npu needs torch_npu, which this machine does not have; expected it to be installed where the "
        f"plan is applied. {fqn}, auto: for npu. "
        f"fix: pip install 'hp-npu[npu]', or choose another kernel: kernels: {{{op}: NAME}}"
    )
    assert all(parameter.is_meta for parameter in built.model.parameters())


def test_a_plan_without_kernels_of_its_own_is_for_its_device_too() -> None:
    start_single()
    built = build(recipe())
    with pytest.raises(HPError) as caught:
        apply(built.model, attrs.evolve(built.plan, kernels=()), MeshContext.create(Topology()))
    assert str(caught.value) == (
        "HP551: the mesh is on cpu, and the plan, with its kernels, for npu; expected MeshContext.create(..., device='npu')"
    )


def step(kernels: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses and all gradients of one micro-batch whose operators these kernels compute, on the CPU."""
    start_single()
    built = build(recipe(device="cpu" if kernels == "torch" else "npu"))
    here = [attrs.evolve(entry, requires=()) for entry in built.plan.kernels]  # the namespace of the tests is registered
    model = apply(built.model, attrs.evolve(built.plan, device="cpu", kernels=here), MeshContext.create(Topology()))
    torch.manual_seed(0)
    tokens = torch.randint(64, (2, 17))
    positions = torch.arange(16).expand(2, -1)
    losses = model(input_ids=tokens[:, :-1], position_ids=positions, hp_labels=tokens[:, 1:]).logits
    losses.sum().backward()
    return losses.detach(), {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def test_a_whole_model_computes_the_same_with_them(npu: Calls) -> None:
    """Same seed, so same weights: float32, one process."""
    losses, gradients = step("torch")
    assert npu == []
    found_losses, found = step("npu")
    assert {name for name, _ in npu} == set(stored())
    torch.testing.assert_close(found_losses, losses, rtol=1e-5, atol=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=2e-5 * float(gradient.abs().max()), msg=name)


def test_a_plan_for_npus_survives_json() -> None:
    from hp_core.planner.serialise import plan_from_json, plan_to_json

    plan = build(recipe()).plan
    assert plan_from_json(plan_to_json(plan)) == plan
