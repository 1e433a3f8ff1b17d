"""The adapter of Qwen3-MoE: which modules are boundaries, how values flow between them, how weights begin."""

from __future__ import annotations

from hp_core.contracts import (
    FlowRule,
    Init,
    LayoutRule,
    ModelAdapter,
    NativeParallelBindingRequest,
    ParallelModuleSpec,
    Replacement,
    Router,
    Stack,
)
from hp_core.contracts.adapter import Role

LAYER = "model.layers.{i}"
_PROVIDERS = "hp_qwen3_moe.layout"
_COMPONENTS = "hp_components.layout"


def _rule(name: str, module_class: str, match: str, provider: str, *, role: Role | None = None) -> LayoutRule:
    return LayoutRule(name=name, module_class=module_class, match=match, provider=provider, role=role)


LAYOUT = (
    _rule("embedding", "Embedding", "model.embed_tokens", f"{_COMPONENTS}:vocab_embedding", role="embedding"),
    _rule("rotary", "Qwen3MoeRotaryEmbedding", "model.rotary_emb", f"{_PROVIDERS}:rotary"),
    _rule("input_norm", "Qwen3MoeRMSNorm", "model.layers.*.input_layernorm", f"{_PROVIDERS}:norm", role="norm"),
    _rule("attention", "Qwen3MoeAttention", "model.layers.*.self_attn", f"{_PROVIDERS}:attention", role="attention"),
    _rule(
        "post_attention_norm", "Qwen3MoeRMSNorm", "model.layers.*.post_attention_layernorm", f"{_PROVIDERS}:norm", role="norm"
    ),
    _rule("router", "Qwen3MoeTopKRouter", "model.layers.*.mlp.gate", f"{_PROVIDERS}:router", role="router"),
    _rule("experts", "Qwen3MoeExperts", "model.layers.*.mlp.experts", f"{_COMPONENTS}:grouped_experts", role="experts"),
    _rule("dense_mlp", "Qwen3MoeMLP", "model.layers.*.mlp", f"{_PROVIDERS}:dense_mlp", role="mlp"),
    _rule("final_norm", "Qwen3MoeRMSNorm", "model.norm", f"{_PROVIDERS}:norm", role="norm"),
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
    FlowRule(
        producer=f"{LAYER}.post_attention_layernorm:output", consumer=f"{LAYER}.mlp.gate:hidden_states", view="flatten_tokens"
    ),
    FlowRule(
        producer=f"{LAYER}.post_attention_layernorm:output",
        consumer=f"{LAYER}.mlp.experts:hidden_states",
        view="flatten_tokens",
    ),
    FlowRule(producer=f"{LAYER}.mlp.gate:router_logits", consumer="@output"),
    FlowRule(producer=f"{LAYER}.mlp.gate:router_scores", consumer=f"{LAYER}.mlp.experts:top_k_weights"),
    FlowRule(producer=f"{LAYER}.mlp.gate:router_indices", consumer=f"{LAYER}.mlp.experts:top_k_index"),
    FlowRule(producer=f"{LAYER}.mlp.experts:output", consumer="@residual", view="unflatten_tokens"),
    FlowRule(producer=f"{LAYER}.post_attention_layernorm:output", consumer=f"{LAYER}.mlp:x"),
    FlowRule(producer=f"{LAYER}.mlp:output", consumer="@residual"),
    FlowRule(producer="@residual", consumer="model.norm:hidden_states"),
    FlowRule(producer="model.norm:output", consumer="lm_head:input"),
    FlowRule(producer="lm_head:output", consumer="@output"),
)

REPLACEMENTS = (
    Replacement(match="model.embed_tokens", implementation="vocab_embedding", source_type="Embedding"),
    Replacement(
        match="model.layers.*.mlp.experts",
        implementation="grouped_experts",
        source_type="Qwen3MoeExperts",
        layout_rule="experts",
    ),
    Replacement(match="lm_head", implementation="linear_cross_entropy", source_type="Linear"),
)

BINDINGS = (  # Hugging Face's own attention, through the interface that hp registers
    NativeParallelBindingRequest(
        match=("model.layers.*.self_attn",),
        parallel=ParallelModuleSpec(
            protocol="attention", binding_kind="cp", validate="hp_components.attention_layout:check_over_cp"
        ),
        kernels=("attention_with_lse",),
    ),
)

INIT = (
    Init(match="model.rotary_emb.*", kind="computed", function="hp_qwen3_moe.weights:rotary"),
    Init(match="*norm.weight", kind="constant", value=1.0),
    Init(match="*.bias", kind="constant", value=0.0),
    Init(match="*", kind="normal", config_key="initializer_range"),
)

ADAPTER = ModelAdapter(
    name="qwen3_moe",
    model_class="transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeForCausalLM",
    config_class="transformers.models.qwen3_moe.configuration_qwen3_moe:Qwen3MoeConfig",
    hf_model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    requires={"transformers": ">=5.20,<6", "torch": ">=2.13"},
    config_checks=f"{_PROVIDERS}:check_config",
    layout=LAYOUT,
    counts=f"{_PROVIDERS}:counts",
    residual=f"{_PROVIDERS}:residual",
    flow=FLOW,
    replacements=REPLACEMENTS,
    bindings=BINDINGS,
    loss="lm_head",
    checkpoint="hp_qwen3_moe.weights:mapping",
    init=INIT,
    protocols=("ep:*", "cp:*"),
    fp32=("model.layers.*.mlp.gate",),
    stack=Stack(layers="model.layers", before=("model.embed_tokens",), after=("model.norm", "lm_head")),
    experts=("model.layers.*.mlp.experts",),
    router=Router(scoring="softmax"),
    flops=f"{_PROVIDERS}:flops",
    shrink="hp_qwen3_moe.small:shrink",
)
