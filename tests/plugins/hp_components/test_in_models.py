"""Components inside whole models: by the replacement engine without an adapter, by a recipe, and in Hugging Face files."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from component_recipes import NORMS, QWEN, recipe, replaced
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from hp_components import plugin
from hp_components.compiled import rms_norm as compiled
from hp_components.kernels import rms_norm
from hp_components.reference import rms_norm as plain_rms_norm
from hp_components.reference.grouped_matmul import grouped_matmul
from hp_core.applier.apply import apply
from hp_core.applier.kernels import check_kernels
from hp_core.contracts import KernelPlan, PrecisionScheme, Replacement, hookimpl
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.models import attention
from hp_core.models.build import build
from hp_core.models.replace import Rule, compile_rules, install, prepare
from hp_core.models.state import state_of
from hp_core.planner.report import kernels as kernel_table
from hp_core.plugins.load import plugins_from
from hp_core.recipe.load import recipe_from_dict
from hp_core.state.huggingface import save_hf
from hp_core.testing.promote import promote
from hp_core.testing.ranks import run_ranks
from hp_core.testing.reference import make_reference

DEEPSEEK = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 32,
}
BLOCKS = (  # patterns, family, class, arguments: everything of DeepSeek-V3
    (["model.embed_tokens"], "vocab_embedding", "Embedding", {}),
    (NORMS, "rms_norm", "DeepseekV3RMSNorm", {}),
    (["model.layers.*.self_attn"], "mla_attention", "DeepseekV3Attention", {}),
    (["model.layers.0.mlp"], "swiglu_mlp", "DeepseekV3MLP", {}),
    (["model.layers.*.mlp.gate"], "topk_router", "DeepseekV3TopkRouter", {"scoring": "sigmoid"}),
    (["model.layers.*.mlp.experts"], "grouped_experts", "DeepseekV3Experts", {}),
    (["model.layers.*.mlp.shared_experts"], "shared_expert", "DeepseekV3MLP", {}),
    (["lm_head"], "linear_cross_entropy", "Linear", {}),
)


def rules(**changed: dict[str, Any]) -> list[Rule]:
    """Return a rule for every block; ``changed`` are other arguments, by family."""
    families = {family.name: family for family in plugin.hp_families()}
    return [
        Rule(
            replacement=Replacement(
                match=match, implementation=name, source_type=source, arguments=changed.get(name, arguments)
            ),
            family=families[name],
            declared_by="test",
        )
        for match, name, source, arguments in BLOCKS
    ]


VARIETIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, direct queries, halves, weights as they are": {
        "attention_bias": True, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False
    },
    "yarn, tied": {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 8,
        },
    },
}  # fmt: skip


def deepseek(**changes: Any) -> nn.Module:
    """Return a small DeepSeek-V3 in float64, every parameter and buffer random, whose attention takes no mask."""
    attention.register()
    torch.manual_seed(0)
    config = DeepseekV3Config(**{**DEEPSEEK, **changes})
    config.use_cache = False
    with promote():
        model = DeepseekV3ForCausalLM._from_config(
            config, dtype=torch.float64, attn_implementation=attention.NAME, experts_implementation="eager"
        )
    saved = model.state_dict().keys()
    for tensor in (*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name in saved)):
        nn.init.normal_(tensor, std=0.3)
    return model


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and every gradient in Hugging Face's shapes."""
    torch.manual_seed(1)
    tokens = torch.randint(64, (2, 17))
    with promote():
        logits = model(input_ids=tokens[:, :-1], position_ids=torch.arange(16).expand(2, -1)).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("absorbed", "gemm"), [(False, "grouped"), (True, "loop"), (False, "batched")])
@pytest.mark.parametrize("changes", VARIETIES.values(), ids=VARIETIES)
def test_every_block_of_deepseek_v3_is_replaced_without_an_adapter(absorbed, gemm, changes) -> None:
    theirs = deepseek(**changes)
    loss, gradients = step(theirs)
    ours = copy.deepcopy(theirs)
    targets = compile_rules(ours, rules(mla_attention={"absorbed": absorbed}, grouped_experts={"gemm": gemm}))
    # embedding, norms, attentions, the dense block; router, experts, shared expert twice; head
    assert len(targets) == 1 + 3 * 2 + 1 + 3 + 1 + 3 * 2 + 1
    install(ours, prepare(targets))
    own = {type(module).__name__ for module in ours.modules() if type(module).__module__.startswith("hp_components")}
    experts = {"grouped": "GroupedExperts", "loop": "LoopExperts", "batched": "BatchedExperts"}[gemm]
    blocks = {"RMSNorm", "MLAAttention", "SwiGLUMLP", "SigmoidRouter", experts, "SharedExpert"}
    assert own == {"VocabEmbedding", *blocks, "LinearCrossEntropy"}
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    found_loss, found = step(ours)
    assert float((found_loss - loss).abs()) < 1e-12
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found[name].view(gradient.shape) - gradient).abs().max()) <= 1e-9 * float(gradient.abs().max()), name


def test_the_plan_says_which_kernel_computes_what_and_applying_hands_it_over() -> None:
    start_single("cpu")
    asked = recipe(kernels={"rms_norm": {"model.norm": "reference"}})
    built = build(asked)
    chosen = {(entry.fqn, entry.op): (entry.name, entry.reason) for entry in built.plan.kernels}
    assert chosen["model.norm", "rms_norm"] == ("reference", "kernels.rms_norm of model.norm")
    name, reason = chosen["model.layers.1.self_attn", "attention"]
    assert name in ("compiled", "blocked")  # the second where there is no compiler
    assert reason.startswith("auto: for cpu")
    assert {op for fqn, op in chosen if fqn == "model.layers.0.self_attn"} == {"rms_norm", "rotary", "attention"}
    model = apply(built.model, built.plan, MeshContext.create(Topology()))

    def norm_of(fqn: str) -> Any:
        state = state_of(model.get_submodule(fqn))
        assert state is not None
        return state.kernels["rms_norm"]

    assert norm_of("model.norm") is plain_rms_norm.rms_norm
    planned = chosen["model.layers.0.input_layernorm", "rms_norm"][0]
    assert norm_of("model.layers.0.input_layernorm") is {"compiled": compiled.rms_norm, "torch": rms_norm.rms_norm}[planned]


def test_experts_and_head_take_their_operators_from_the_plan_layer_by_layer() -> None:
    start_single("cpu")
    kernels = {
        "grouped_matmul": {"model.layers.1.*": "reference"},
        "moe_permute": "reference",
        "vocab_parallel_cross_entropy": "reference",
    }
    config = {**QWEN, "num_hidden_layers": 3}
    built = build(recipe(config, kernels=kernels))
    chosen = {(entry.fqn, entry.op): entry.name for entry in built.plan.kernels}
    assert [chosen[f"model.layers.{layer}.mlp.experts", "grouped_matmul"] for layer in (1, 2)] == ["reference", "torch"]
    assert [chosen[f"model.layers.{layer}.mlp.experts", "moe_permute"] for layer in (1, 2)] == ["reference"] * 2
    assert chosen["lm_head", "vocab_parallel_cross_entropy"] == "reference"
    rows = {(row[0], row[1]): row[2] for row in kernel_table(built.plan).rows}
    assert rows["model.layers.1.mlp.experts", "grouped_matmul"] == "reference"
    model = apply(built.model, built.plan, MeshContext.create(Topology()))
    state = state_of(model.get_submodule("model.layers.1.mlp.experts"))
    assert state is not None
    assert state.kernels["grouped_matmul"] is grouped_matmul


@pytest.mark.parametrize("gemm", ["loop", "batched"])
def test_experts_without_a_grouped_product_have_no_kernel_for_one(gemm: str) -> None:
    experts = replaced("model.layers.*.mlp.experts", "grouped_experts", "Qwen3MoeExperts")
    experts["replace"]["with"] = {"gemm": gemm}
    plan = build(recipe(overrides=[experts])).plan
    operators = {entry.op for entry in plan.kernels if entry.fqn == "model.layers.1.mlp.experts"}
    assert operators == {"moe_permute", "swiglu", "moe_unpermute"}


def test_a_scheme_with_code_runs_it_on_every_boundary_of_its_subtree() -> None:
    adapter = pytest.importorskip("hp_qwen3_moe.plugin")
    start_single("cpu")
    scheming = types.ModuleType("acme_schemes")
    scheme = PrecisionScheme(name="halved", compute="float32", implementation="component_recipes:halve_outputs")
    vars(scheming).update(HP_API=1, hp_schemes=hookimpl(provider(scheme)))
    plugins = plugins_from(scheming, plugin, adapter)
    model = {"adapter": "qwen3_moe", "config": QWEN, "dtype": "float32"}
    plain, halved = (
        recipe_from_dict({"model": model, "overrides": overrides}, plugins=plugins)
        for overrides in ([], [{"match": "model.layers.0.mlp", "scheme": "halved"}])
    )
    outputs = []
    for asked in (plain, halved):
        built = build(asked)
        live = apply(built.model, built.plan, MeshContext.create(Topology()))
        outputs.append(live.get_submodule("model.layers.0.mlp")(torch.ones(1, 2, 32)))
    assert [entry.fqn for entry in built.plan.schemes] == ["model.layers.0.mlp"]
    torch.testing.assert_close(outputs[1], outputs[0] / 2)


def provider(scheme: PrecisionScheme) -> Callable[[], list[PrecisionScheme]]:
    def hp_schemes() -> list[PrecisionScheme]:
        return [scheme]

    return hp_schemes


def test_a_kernel_that_is_not_here_is_refused_where_the_plan_is_applied() -> None:
    import attrs

    entry = KernelPlan(
        fqn="model.norm",
        op="rms_norm",
        name="npu",
        device="npu",
        implementation="a:b",
        requires=["torch_of_nowhere"],
        reason="auto: for npu",
    )
    plan = attrs.evolve(build(recipe()).plan, kernels=[entry])
    with pytest.raises(PlanError) as caught:
        check_kernels(plan)
    assert str(caught.value) == (
        "HP571: the kernel rms_norm@npu needs torch_of_nowhere, which this machine does not have; expected it to be installed "
        "where the plan is applied. model.norm, auto: for npu. "
        "fix: install torch_of_nowhere, or choose another kernel: kernels: {rms_norm: NAME}"
    )


def test_a_norm_of_the_heads_is_left_to_the_attention_around_it() -> None:
    overrides = [replaced("model.layers.1.self_attn.q_norm", "rms_norm", "Qwen3MoeRMSNorm")]
    with pytest.raises(PlanError) as caught:
        build(recipe(overrides=overrides))
    assert str(caught.value) == (
        "HP522: model.layers.1.self_attn.q_norm normalises 8 features, hidden_size is 32; expected a norm of the residual "
        "stream. family rms_norm. fix: replace the attention around it, which computes its own norms"
    )


def saved_again(folder: Path, out: Path) -> None:
    """Load Hugging Face files into a model of components on tp=2, and save them."""
    asked = recipe(mesh={"tp": 2})
    mesh = MeshContext.create(asked.topology(2))
    built = build(asked, mesh=mesh)
    model = apply(built.model, built.plan, mesh, weights=folder)
    save_hf(model, built.plan, mesh, path=out)


@pytest.mark.distributed
def test_hugging_face_files_stay_what_they_were(tmp_path: Path) -> None:
    from hp_core.testing.cell import ModelCase

    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    run_ranks(1, make_reference, ModelCase(adapter="qwen3_moe", config=QWEN, rows=2, sequence=16), source, "float32")
    run_ranks(2, saved_again, source, out)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
