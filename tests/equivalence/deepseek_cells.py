"""The cells of DeepSeek-V3: one dense layer and three mixtures, sixteen experts in four groups of which two are open, top-4.

Queries, rotary parts and values have widths of their own; two shared experts; biases on the latent and output projections.
"""

from __future__ import annotations

from typing import Any

from qwen3_moe_cells import A2A, EP2, EP2_OVER_TP2, EP2_TP2, EP4, FSDP2, FULL, SELECTIVE, SP_OFF, TP2, replaced, sp_off

from hp_core.mesh.topology import Topology
from hp_core.testing.cell import Cell, ModelCase

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1.0e-6,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def model(*, freeze: tuple[str, ...] = (), **changes: Any) -> ModelCase:
    """Return the base model with some configuration keys changed."""
    return ModelCase(adapter="deepseek_v3", config={**BASE, **changes}, freeze=freeze)


MLA = model()
TIED = model(tie_word_embeddings=True, attention_bias=False)
DIRECT = model(q_lora_rank=None, rope_parameters=YARN, norm_topk_prob=False)  # no latent of queries, and YaRN
FROZEN = model(freeze=("model.embed_tokens.*", "*.mlp.gate.*", "*.kv_a_proj_with_mqa.*", "model.layers.1.*"))

ROUTER = replaced("model.layers.*.mlp.gate", "topk_router", "DeepseekV3TopkRouter", scoring="sigmoid")
NORMS = ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"]
COMPONENTS = {
    "overrides": [
        ROUTER,
        replaced(NORMS, "rms_norm", "DeepseekV3RMSNorm"),
        replaced("model.layers.0.mlp", "swiglu_mlp", "DeepseekV3MLP"),
        replaced("model.layers.*.mlp.shared_experts", "shared_expert", "DeepseekV3MLP"),
    ]
}
ABSORBED = {"overrides": [replaced("model.layers.*.self_attn", "mla_attention", "DeepseekV3Attention", absorbed=True)]}


AUX = {"loss": {"aux": {"kind": "hf", "coefficient": 0.01}}}
SEQUENCE = {"loss": {"aux": {"kind": "sequence", "coefficient": 0.01}, "router_z": 1.0e-3}}
BIAS = {"loss": {"bias_update_rate": 0.01}}
BALANCED = {"loss": {**SEQUENCE["loss"], **BIAS["loss"]}}


def cell(name: str, mesh: Topology | None = None, **fields: Any) -> Cell:
    """Return a cell of :data:`MLA` unless another model is given."""
    return Cell(name=f"deepseek {name}", mesh=mesh or Topology(), **{"model": MLA, **fields})


CELLS = [
    cell("one process"),
    cell("one process, four micro-batches", micro_batches=4),
    cell("one process, tied", model=TIED),
    cell("one process, frozen", model=FROZEN),
    cell("one process, no query latent, yarn", model=DIRECT),
    cell("one process, full recompute", recipe=FULL),
    cell("one process, selective recompute", recipe=SELECTIVE),
    cell("one process, components", recipe=COMPONENTS),
    cell("one process, absorbed", recipe=ABSORBED),
    cell("one process, fp32", precision="float32"),
    cell("tp2", TP2),
    cell("tp2 sp-off", SP_OFF),
    cell("tp2 loss-parallel off", Topology(tp=2, loss_parallel=False)),
    cell("tp2 tied", TP2, model=TIED),
    cell("tp2 frozen", TP2, model=FROZEN),
    cell("tp2 no query latent, yarn", TP2, model=DIRECT),
    cell("tp2 full recompute", TP2, recipe=FULL),
    cell("tp2 selective recompute", TP2, recipe=SELECTIVE),
    cell("tp2 components", TP2, recipe=COMPONENTS),
    cell("tp2 sp-off absorbed", SP_OFF, recipe=ABSORBED),
    cell("tp2 fp32", TP2, precision="float32"),
    cell("tp2 bf16", TP2, precision="bfloat16"),
    cell("dp2", Topology(dp_replicate=2)),
    cell("fsdp2", FSDP2),
    cell("fsdp2 two micro-batches", FSDP2, micro_batches=2),
    cell("fsdp2 tied", FSDP2, model=TIED),
    cell("fsdp2 frozen", FSDP2, model=FROZEN),
    cell("fsdp2 full recompute", FSDP2, recipe=FULL),
    cell("fsdp2 bf16", FSDP2, precision="bfloat16"),
    cell("tp4", Topology(tp=4)),
    cell("tp4 sp-off", Topology(tp=4, sequence_parallel=False)),
    cell("hsdp2x2", Topology(dp_replicate=2, dp_shard=2)),
    cell("fsdp2 tp2", Topology(dp_shard=2, tp=2)),
    cell("fsdp2 tp2 tied, full recompute", Topology(dp_shard=2, tp=2), model=TIED, recipe=FULL),
    cell("one process, aux", recipe=AUX),
    cell("one process, sequence aux, z and bias, two micro-batches", recipe=BALANCED, micro_batches=2),
    cell("tp2 aux", TP2, recipe=AUX),
    cell("tp2 bias, full recompute", TP2, recipe={**BIAS, **FULL}),
    cell("tp2 sequence aux, z and bias, selective recompute", TP2, recipe={**BALANCED, **SELECTIVE}),
    cell("tp2 sp-off, sequence aux, z and bias", SP_OFF, recipe=BALANCED),
    cell("fsdp2 aux, full recompute", FSDP2, recipe={**AUX, **FULL}),
    cell("fsdp2 sequence aux, z and bias, two micro-batches", FSDP2, recipe=BALANCED, micro_batches=2),
    cell("fsdp2 tp2 sequence aux, z and bias, router component", Topology(dp_shard=2, tp=2), recipe={**COMPONENTS, **BALANCED}),
    cell("ep4 over tp2 fsdp2, sequence aux, z and bias", EP4, recipe=BALANCED),
    cell("ep2", EP2),
    cell("ep2 all_to_all, two micro-batches", EP2, recipe=A2A, micro_batches=2),
    cell("ep2 selective recompute", EP2, recipe=SELECTIVE),
    cell("ep2 bf16", EP2, precision="bfloat16"),
    cell("ep2 over tp2", EP2_OVER_TP2),
    cell("ep2 tp2 sp-off", sp_off(EP2_OVER_TP2)),
    cell("fsdp2 ep2 tp2", EP2_TP2),
    cell("ep4 over tp2 fsdp2", EP4),
    cell("ep4 over tp2 fsdp2, sp-off, full recompute", sp_off(EP4), recipe=FULL),
    cell("ep2 under tp4", Topology(tp=4, ep=2)),
    cell("hsdp2x2 ep2", Topology(dp_replicate=2, dp_shard=2, ep=2)),
]
