"""The cells of Qwen3-MoE: four layers, eight experts, top-2, twice as many heads as key-value heads, biases on attention."""

from __future__ import annotations

from typing import Any

import attrs

from hp_core.mesh.topology import Topology
from hp_core.testing.cell import Cell, ModelCase

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1.0e-6,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def model(*, freeze: tuple[str, ...] = (), reachable: int | None = None, **changes: Any) -> ModelCase:
    """Return the base model with some configuration keys changed."""
    return ModelCase(adapter="qwen3_moe", config={**BASE, **changes}, freeze=freeze, reachable=reachable)


MOE = model()
TIED = model(tie_word_embeddings=True, attention_bias=False)
MIXED = model(mlp_only_layers=[1])
PACKED = attrs.evolve(MOE, packed=True)
FROZEN = model(freeze=("model.embed_tokens.*", "*.mlp.gate.*", "model.layers.1.*"))

TP2 = Topology(tp=2)
FSDP2 = Topology(dp_shard=2)


def replaced(match: str | list[str], implementation: str, source_type: str, **arguments: Any) -> dict[str, Any]:
    """Return the override that puts a component in place of every module that ``match`` hits."""
    replace = {"kind": "module", "implementation": implementation, "source_type": source_type, "with": arguments}
    return {"match": match, "replace": replace}


NORMS = ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"]
BLOCKS = [
    replaced(NORMS, "rms_norm", "Qwen3MoeRMSNorm"),
    replaced("model.layers.*.self_attn", "gqa_attention", "Qwen3MoeAttention"),
    replaced("model.layers.*.mlp.gate", "topk_router", "Qwen3MoeTopKRouter"),
    replaced("model.layers.*.mlp.experts", "grouped_experts", "Qwen3MoeExperts"),
]
COMPONENTS = {"overrides": BLOCKS}
DENSE = {"overrides": [*BLOCKS, replaced("model.layers.1.mlp", "swiglu_mlp", "Qwen3MoeMLP")]}
PLAIN = {**COMPONENTS, "kernels": {"rms_norm": "reference", "rotary": "reference", "attention": "reference"}}
TORCHS = {  # what runs where there is no compiler
    **COMPONENTS,
    "kernels": {
        "attention": "blocked",
        **dict.fromkeys(("embedding", "rms_norm", "rotary", "swiglu", "topk_gating", "vocab_parallel_cross_entropy"), "torch"),
    },
}
FUSED = {"overrides": [replaced("model.layers.*.self_attn", "gqa_attention", "Qwen3MoeAttention", qkv="fused")]}
EXPERTS = {
    gemm: {"overrides": [replaced("model.layers.*.mlp.experts", "grouped_experts", "Qwen3MoeExperts", gemm=gemm)]}
    for gemm in ("loop", "batched")
}
CHOSEN = {
    "kernels": {
        "grouped_matmul": {"model.layers.0.*": "reference"},
        "swiglu": {"model.layers.1.*": "reference"},
        "moe_permute": {"model.layers.2.*": "reference"},
        "moe_unpermute": {"model.layers.2.*": "reference"},
        "vocab_parallel_cross_entropy": "reference",
        "embedding": "reference",
    },
    "loss": {"chunk": 48},
}
SP_OFF = Topology(tp=2, sequence_parallel=False)

EP2 = Topology(dp_shard=2, ep=2)
EP2_TP2 = Topology(dp_shard=2, tp=2, ep=2)  # each ep group is a tp group
EP2_OVER_TP2 = Topology(tp=2, ep=2)
EP4 = Topology(dp_shard=2, tp=2, ep=4)
FULL, SELECTIVE = ({"recompute": {"mode": mode}} for mode in ("full", "selective"))
A2A = {"protocols": {"ep": "all_to_all"}}


def sp_off(mesh: Topology) -> Topology:
    """Return the mesh without sequence parallelism: every tp rank has all tokens of its batch."""
    return attrs.evolve(mesh, sequence_parallel=False)


ONE_EXPERT = model(num_experts_per_tok=1, norm_topk_prob=False, reachable=1)  # every token goes to it
SOME_EXPERTS = model(reachable=3)  # the others have no tokens, and with ep the last ranks have none
AUX = {"loss": {"aux": {"kind": "hf", "coefficient": 0.01}}}
SEQUENCE = {"loss": {"aux": {"kind": "sequence", "coefficient": 0.01}}}
Z = {"loss": {"router_z": 1.0e-3}}
BOTH = {"loss": {**AUX["loss"], **Z["loss"]}}

ROUTER_LOSSES = [
    Cell(name="one process, aux, two micro-batches", model=MOE, recipe=AUX, micro_batches=2),
    Cell(name="one process, sequence aux", model=MOE, recipe=SEQUENCE),
    Cell(name="tp2 aux", model=MOE, mesh=TP2, recipe=AUX),
    Cell(name="tp2 sequence aux, full recompute", model=MOE, mesh=TP2, recipe={**SEQUENCE, **FULL}),
    Cell(name="tp2 sp-off, aux and z", model=MIXED, mesh=sp_off(TP2), recipe=BOTH),
    Cell(
        name="fsdp2 aux and z, full recompute, two parts",
        model=MOE,
        mesh=FSDP2,
        recipe={**BOTH, **FULL},
        micro_batches=2,
    ),
    Cell(name="fsdp2 tp2 z, router component", model=MOE, mesh=Topology(dp_shard=2, tp=2), recipe={**COMPONENTS, **Z}),
    Cell(name="ep4 over tp2 fsdp2, aux and z", model=MOE, mesh=EP4, recipe=BOTH),
    Cell(name="packed documents, tp2 aux and z", model=PACKED, mesh=TP2, recipe=BOTH),
    Cell(name="packed documents, ep2 sequence aux", model=PACKED, mesh=Topology(dp_shard=2, ep=2), recipe=SEQUENCE),
]

EXPERT_PARALLEL = [
    Cell(name="one process, all tokens to one expert", model=ONE_EXPERT),
    Cell(name="one process, some experts empty", model=SOME_EXPERTS),
    Cell(name="tp2 some experts empty", model=SOME_EXPERTS, mesh=TP2),
    Cell(name="ep2 all tokens to one expert", model=ONE_EXPERT, mesh=EP2),
    Cell(name="ep2 some experts empty", model=SOME_EXPERTS, mesh=EP2),
    Cell(name="ep2 some experts empty, all_to_all, recompute", model=SOME_EXPERTS, mesh=EP2, recipe={**A2A, **SELECTIVE}),
    Cell(name="ep4 over tp2 fsdp2, all tokens to one expert", model=ONE_EXPERT, mesh=EP4),
    Cell(name="ep4 over tp2 fsdp2, sp-off, some experts empty", model=SOME_EXPERTS, mesh=sp_off(EP4)),
    Cell(name="ep2", model=MOE, mesh=EP2),
    Cell(name="ep2 all_to_all", model=MOE, mesh=EP2, recipe=A2A),
    Cell(name="ep2 four choices", model=model(num_experts_per_tok=4), mesh=EP2),
    Cell(name="ep2 two micro-batches", model=MOE, mesh=EP2, micro_batches=2),
    Cell(name="ep2 full recompute", model=MOE, mesh=EP2, recipe=FULL),
    Cell(name="ep2 selective recompute", model=MOE, mesh=EP2, recipe=SELECTIVE),
    Cell(name="ep2 tied", model=TIED, mesh=EP2),
    Cell(name="ep2 frozen", model=FROZEN, mesh=EP2),
    Cell(name="ep2 frozen experts", model=model(freeze=("*.mlp.experts.*",)), mesh=EP2),
    Cell(name="ep2 dense layer among experts", model=MIXED, mesh=EP2),
    Cell(name="ep2 fp32", model=MOE, mesh=EP2, precision="float32"),
    Cell(name="ep2 bf16", model=MOE, mesh=EP2, precision="bfloat16"),
    Cell(name="ep2 components", model=MOE, mesh=EP2, recipe=COMPONENTS),
    Cell(name="ep2 over tp2", model=MOE, mesh=EP2_OVER_TP2),
    Cell(name="ep2 tp2 sp-off", model=MOE, mesh=sp_off(EP2_OVER_TP2)),
    Cell(name="ep2 tp2 sp-off, all_to_all, recompute", model=MOE, mesh=sp_off(EP2_OVER_TP2), recipe={**A2A, **FULL}),
    Cell(name="fsdp2 ep2 tp2", model=MOE, mesh=EP2_TP2),
    Cell(name="ep4 over tp2 fsdp2", model=MOE, mesh=EP4),
    Cell(name="ep4 over tp2 fsdp2, sp-off", model=MOE, mesh=sp_off(EP4)),
    Cell(name="ep4 over tp2 fsdp2, selective recompute", model=MOE, mesh=EP4, recipe=SELECTIVE),
    Cell(name="ep4 over tp2 fsdp2, bf16", model=MOE, mesh=EP4, precision="bfloat16"),
    Cell(name="ep2 under tp4", model=MOE, mesh=Topology(tp=4, ep=2)),
    Cell(name="ep2 under tp4, sp-off", model=MOE, mesh=sp_off(Topology(tp=4, ep=2))),
    Cell(name="ep8 on four ranks of tp and two of fsdp", model=MOE, mesh=Topology(dp_shard=2, tp=4, ep=8)),
    Cell(name="hsdp2x2 ep2", model=MOE, mesh=Topology(dp_replicate=2, dp_shard=2, ep=2)),
    Cell(name="hsdp2x2 ep2 tp2", model=MOE, mesh=Topology(dp_replicate=2, dp_shard=2, ep=2, tp=2)),
    Cell(name="fsdp4 ep2, more parts than experts", model=model(num_experts=2), mesh=Topology(dp_shard=4, ep=2)),
]

CELLS = [
    Cell(name="one process", model=MOE),
    Cell(name="one process, four micro-batches", model=MOE, micro_batches=4),
    Cell(name="one process, dense layer among experts", model=MIXED),
    Cell(name="one process, tied", model=TIED),
    Cell(name="one process, frozen", model=FROZEN),
    Cell(name="one process, full recompute", model=MOE, recipe={"recompute": {"mode": "full"}}),
    Cell(name="one process, selective recompute", model=MOE, recipe={"recompute": {"mode": "selective"}}),
    Cell(name="one process, loss in chunks", model=MOE, recipe={"loss": {"chunk": 48}}),
    Cell(name="one process, fp32", model=MOE, precision="float32"),
    Cell(name="tp2", model=MOE, mesh=TP2),
    Cell(name="tp2 sp-off", model=MOE, mesh=Topology(tp=2, sequence_parallel=False)),
    Cell(name="tp2 over sockets", model=MOE, mesh=Topology(tp=2, shared_memory=False)),
    Cell(name="fsdp2 over sockets", model=MOE, mesh=Topology(dp_shard=2, shared_memory=False)),
    Cell(name="ep2 over sockets", model=MOE, mesh=Topology(dp_shard=2, ep=2, shared_memory=False)),
    Cell(name="tp2 loss-parallel off", model=MOE, mesh=Topology(tp=2, loss_parallel=False)),
    Cell(name="tp2 sp-off loss-parallel off", model=MOE, mesh=Topology(tp=2, sequence_parallel=False, loss_parallel=False)),
    Cell(name="tp2 dense layer among experts", model=MIXED, mesh=TP2),
    Cell(name="tp2 tied", model=TIED, mesh=TP2),
    Cell(name="tp2 frozen", model=FROZEN, mesh=TP2),
    Cell(name="tp2 full recompute", model=MOE, mesh=TP2, recipe={"recompute": {"mode": "full"}}),
    Cell(name="tp2 selective recompute", model=MOE, mesh=TP2, recipe={"recompute": {"mode": "selective"}}),
    Cell(name="tp2 fp32", model=MOE, mesh=TP2, precision="float32"),
    Cell(name="tp2 bf16", model=MOE, mesh=TP2, precision="bfloat16"),
    Cell(name="components one process", model=MOE, recipe=COMPONENTS),
    Cell(name="components one process, dense layer among experts", model=MIXED, recipe=DENSE),
    Cell(name="components one process, reference kernels", model=MOE, recipe=PLAIN),
    Cell(name="components one process, torch's kernels", model=MOE, recipe=TORCHS),
    Cell(name="components tp2, torch's kernels", model=MOE, mesh=TP2, recipe=TORCHS),
    Cell(name="components ep2, torch's kernels", model=MOE, mesh=Topology(dp_shard=2, ep=2), recipe=TORCHS),
    Cell(name="components one process, fp32", model=MOE, recipe=COMPONENTS, precision="float32"),
    Cell(name="components tp2", model=MOE, mesh=TP2, recipe=COMPONENTS),
    Cell(name="components tp2 sp-off, dense layer among experts", model=MIXED, mesh=SP_OFF, recipe=DENSE),
    Cell(name="components tp2 full recompute", model=MOE, mesh=TP2, recipe={**COMPONENTS, "recompute": {"mode": "full"}}),
    Cell(name="components tp2 bf16", model=MOE, mesh=TP2, recipe=COMPONENTS, precision="bfloat16"),
    Cell(name="components fsdp2 tp2", model=MOE, mesh=Topology(dp_shard=2, tp=2), recipe=COMPONENTS),
    Cell(name="components tp4 with 2 kv heads", model=MOE, mesh=Topology(tp=4), recipe=COMPONENTS),
    Cell(name="fused qkv one process", model=MOE, recipe=FUSED),
    Cell(name="fused qkv tp2", model=MOE, mesh=TP2, recipe=FUSED),
    Cell(name="fused qkv fsdp2 tp2", model=MOE, mesh=Topology(dp_shard=2, tp=2), recipe=FUSED),
    Cell(name="experts by loop one process", model=MOE, recipe=EXPERTS["loop"]),
    Cell(name="experts by loop tp2", model=MOE, mesh=TP2, recipe=EXPERTS["loop"]),
    Cell(name="experts batched one process", model=MOE, recipe=EXPERTS["batched"]),
    Cell(name="experts batched tp2", model=MOE, mesh=TP2, recipe=EXPERTS["batched"]),
    Cell(name="expert and loss kernels by layer, one process", model=MOE, recipe=CHOSEN),
    Cell(name="expert and loss kernels by layer, fsdp2 tp2", model=MOE, mesh=Topology(dp_shard=2, tp=2), recipe=CHOSEN),
    Cell(name="dp2", model=MOE, mesh=Topology(dp_replicate=2)),
    Cell(name="fsdp2", model=MOE, mesh=FSDP2),
    Cell(name="fsdp2 two micro-batches", model=MOE, mesh=FSDP2, micro_batches=2),
    Cell(name="fsdp2 tied", model=TIED, mesh=FSDP2),
    Cell(name="fsdp2 frozen", model=FROZEN, mesh=FSDP2),
    Cell(name="fsdp2 full recompute", model=MOE, mesh=FSDP2, recipe={"recompute": {"mode": "full"}}),
    Cell(name="fsdp2 bf16", model=MOE, mesh=FSDP2, precision="bfloat16"),
    Cell(name="tp4 with 2 kv heads", model=MOE, mesh=Topology(tp=4)),
    Cell(name="tp4 with 2 kv heads, sp-off", model=MOE, mesh=Topology(tp=4, sequence_parallel=False)),
    Cell(name="hsdp2x2", model=MOE, mesh=Topology(dp_replicate=2, dp_shard=2)),
    Cell(name="fsdp2 tp2", model=MOE, mesh=Topology(dp_shard=2, tp=2)),
    Cell(
        name="fsdp2 tp2 tied, full recompute",
        model=TIED,
        mesh=Topology(dp_shard=2, tp=2),
        recipe={"recompute": {"mode": "full"}},
    ),
    *EXPERT_PARALLEL,
    *ROUTER_LOSSES,
    Cell(name="dp2 tp2", model=MIXED, mesh=Topology(dp_replicate=2, tp=2)),
]
