"""The adapter of DeepSeek-V3: which modules are boundaries, how values flow between them, how weights begin."""

from __future__ import annotations

from hp_core.contracts import FlowRule, Init, LayoutRule, ModelAdapter, Replacement, Router, Stack
from hp_core.contracts.adapter import Role

LAYER = "model.layers.{i}"
NORMED = f"{LAYER}.post_attention_layernorm:output"
_PROVIDERS = "hp_deepseek.layout"
_COMPONENTS = "hp_components.layout"
_BLOCKS = "hp_components.block_layout"
_ATTENTION = "hp_components.attention_layout:mla_attention"


def _rule(name: str, module_class: str, match: str, provider: str, *, role: Role | None = None) -> LayoutRule:
    return LayoutRule(name=name, module_class=module_class, match=match, provider=provider, role=role)


def _norm(name: str, match: str) -> LayoutRule:
    return _rule(name, "DeepseekV3RMSNorm", match, f"{_BLOCKS}:rms_norm", role="norm")


LAYOUT = (
    _rule("embedding", "Embedding", "model.embed_tokens", f"{_COMPONENTS}:vocab_embedding", role="embedding"),
    _rule("rotary", "DeepseekV3RotaryEmbedding", "model.rotary_emb", f"{_PROVIDERS}:rotary"),
    _norm("input_norm", "model.layers.*.input_layernorm"),
    _rule("attention", "DeepseekV3Attention", "model.layers.*.self_attn", _ATTENTION, role="attention"),
    _norm("post_attention_norm", "model.layers.*.post_attention_layernorm"),
    _rule("router", "DeepseekV3TopkRouter", "model.layers.*.mlp.gate", f"{_PROVIDERS}:router", role="router"),
    _rule("experts", "DeepseekV3Experts", "model.layers.*.mlp.experts", f"{_COMPONENTS}:grouped_experts", role="experts"),
    _rule("shared_experts", "DeepseekV3MLP", "model.layers.*.mlp.shared_experts", f"{_BLOCKS}:swiglu_mlp", role="mlp"),
    _rule("dense_mlp", "DeepseekV3MLP", "model.layers.*.mlp", f"{_BLOCKS}:swiglu_mlp", role="mlp"),
    _norm("final_norm", "model.norm"),
    _rule("head", "Linear", "lm_head", f"{_COMPONENTS}:linear_cross_entropy", role="head"),
)

FLOW = (
    FlowRule(producer="@input", consumer="model.embed_tokens:input"),
    FlowRule(producer="@input", consumer="model.rotary_emb:position_ids"),
    FlowRule(producer="model.embed_tokens:output", consumer="@residual"),
    FlowRule(producer="@residual", consumer=f"{LAYER}.input_layernorm:hidden_states"),
    FlowRule(producer=f"{LAYER}.input_layernorm:output", consumer=f"{LAYER}.self_attn:hidden_states"),
    FlowRule(producer="model.rotary_emb:cos", consumer=f"{LAYER}.self_attn:position_embeddings"),
    FlowRule(producer="model.rotary_emb:sin", consumer=f"{LAYER}.self_attn:position_embeddings"),
    FlowRule(producer=f"{LAYER}.self_attn:output", consumer="@residual"),
    FlowRule(producer="@residual", consumer=f"{LAYER}.post_attention_layernorm:hidden_states"),
    FlowRule(producer=NORMED, consumer=f"{LAYER}.mlp.gate:hidden_states"),
    FlowRule(producer=NORMED, consumer=f"{LAYER}.mlp.experts:hidden_states", view="flatten_tokens"),
    FlowRule(producer=NORMED, consumer=f"{LAYER}.mlp.shared_experts:x"),
    FlowRule(producer=f"{LAYER}.mlp.gate:router_logits", consumer="@output"),
    FlowRule(producer=f"{LAYER}.mlp.gate:router_scores", consumer=f"{LAYER}.mlp.experts:top_k_weights"),
    FlowRule(producer=f"{LAYER}.mlp.gate:router_indices", consumer=f"{LAYER}.mlp.experts:top_k_index"),
    FlowRule(producer=f"{LAYER}.mlp.experts:output", consumer="@residual", view="unflatten_tokens"),
    FlowRule(producer=f"{LAYER}.mlp.shared_experts:output", consumer="@residual"),
    FlowRule(producer=NORMED, consumer=f"{LAYER}.mlp:x"),
    FlowRule(producer=f"{LAYER}.mlp:output", consumer="@residual"),
    FlowRule(producer="@residual", consumer="model.norm:hidden_states"),
    FlowRule(producer="model.norm:output", consumer="lm_head:input"),
    FlowRule(producer="lm_head:output", consumer="@output"),
)

REPLACEMENTS = (
    Replacement(match="model.embed_tokens", implementation="vocab_embedding", source_type="Embedding"),
    Replacement(match="model.layers.*.self_attn", implementation="mla_attention", source_type="DeepseekV3Attention"),
    Replacement(
        match="model.layers.*.mlp.experts",
        implementation="grouped_experts",
        source_type="DeepseekV3Experts",
        layout_rule="experts",
    ),
    Replacement(match="lm_head", implementation="linear_cross_entropy", source_type="Linear"),
)

INIT = (
    Init(match="model.rotary_emb.*", kind="computed", function="hp_deepseek.weights:rotary"),
    Init(match="*norm.weight", kind="constant", value=1.0),
    Init(match="*.e_score_correction_bias", kind="constant", value=0.0),
    Init(match="*.bias", kind="constant", value=0.0),
    Init(match="*", kind="normal", config_key="initializer_range"),
)

ADAPTER = ModelAdapter(
    name="deepseek_v3",
    model_class="transformers.models.deepseek_v3.modeling_deepseek_v3:DeepseekV3ForCausalLM",
    config_class="transformers.models.deepseek_v3.configuration_deepseek_v3:DeepseekV3Config",
    hf_model_types=("deepseek_v3",),
    architectures=("DeepseekV3ForCausalLM",),
    requires={"transformers": ">=5.20,<6", "torch": ">=2.13"},
    config_checks="hp_deepseek.checks:check_config",
    layout=LAYOUT,
    counts=f"{_PROVIDERS}:counts",
    residual=f"{_PROVIDERS}:residual",
    flow=FLOW,
    replacements=REPLACEMENTS,
    protocols=("cp:*", "ep:*"),
    loss="lm_head",
    checkpoint="hp_deepseek.weights:mapping",
    init=INIT,
    fp32=("model.layers.*.mlp.gate",),
    stack=Stack(layers="model.layers", before=("model.embed_tokens",), after=("model.norm", "lm_head")),
    experts=("model.layers.*.mlp.experts",),
    router=Router(scoring="sigmoid", bias="e_score_correction_bias"),
    flops=f"{_PROVIDERS}:flops",
    shrink="hp_deepseek.small:shrink",
)
