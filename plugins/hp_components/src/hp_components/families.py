"""The blocks of a transformer as families. Torch-free."""

from __future__ import annotations

from hp_core.contracts import Init, Join, ModuleFamily, SelectorSpec, Transform, Unflatten, VariantRule

WEIGHTS = (Init(match="*bias", kind="constant", value=0.0), Init(match="*", kind="normal", config_key="initializer_range"))
NORM = Init(match="*norm.weight", kind="constant", value=1.0)


def _qkv(name: str) -> tuple[Transform, ...]:
    """Return how Hugging Face's three projections become one [K, Q + 2, D, ..], by key-value head."""
    return (Unflatten(0, (-1, -1, -1)), Join(1, {f"q_proj.{name}": -1, f"k_proj.{name}": 1, f"v_proj.{name}": 1}))


BLOCKS = (
    ModuleFamily(
        name="rms_norm",
        baseline="hp_components.rms_norm:RMSNorm",
        arguments={"offset": "float"},
        selectors={"argument": SelectorSpec(choices=("hidden_states", "x"), default="hidden_states")},
        variants={"of_x": "hp_components.rms_norm:RMSNormOfX"},
        rules=[VariantRule(when={"argument": "x"}, variant="of_x")],
        sharding="hp_components.block_layout:rms_norm",
        kernels=("rms_norm",),
        init=[Init(match="weight", kind="constant", value=1.0)],
        role="norm",
    ),
    ModuleFamily(
        name="swiglu_mlp",
        baseline="hp_components.swiglu_mlp:SwiGLUMLP",
        arguments={"intermediate_size": "int"},
        sharding="hp_components.block_layout:swiglu_mlp",
        kernels=("swiglu",),
        init=WEIGHTS,
        role="mlp",
    ),
    ModuleFamily(
        name="shared_expert",
        baseline="hp_components.swiglu_mlp:SharedExpert",
        arguments={"intermediate_size": "int"},
        sharding="hp_components.block_layout:swiglu_mlp",
        kernels=("swiglu",),
        init=WEIGHTS,
        role="mlp",
    ),
    ModuleFamily(
        name="gqa_attention",
        baseline="hp_components.gqa_attention:GQAAttention",
        arguments={"interleaved": "bool", "qk_norm": "bool"},
        selectors={"qkv": SelectorSpec(choices=("separate", "fused"), default="separate")},
        variants={"fused": "hp_components.fused_attention:FusedGQAAttention"},
        rules=[VariantRule(when={"qkv": "fused"}, variant="fused")],
        transforms={f"qkv_proj.{name}": _qkv(name) for name in ("weight", "bias")},
        sharding="hp_components.attention_layout:gqa_attention",
        kernels=("rms_norm", "rotary", "attention", "attention_with_lse"),
        init=[NORM, *WEIGHTS],
        role="attention",
    ),
    ModuleFamily(
        name="mla_attention",
        baseline="hp_components.mla_attention:MLAAttention",
        arguments={"absorbed": "bool"},
        sharding="hp_components.attention_layout:mla_attention",
        kernels=("rms_norm", "rotary", "attention", "attention_with_lse"),
        init=[NORM, *WEIGHTS],
        role="attention",
    ),
    ModuleFamily(
        name="topk_router",
        baseline="hp_components.topk_router:TopKRouter",
        selectors={"scoring": SelectorSpec(choices=("softmax", "sigmoid"), default="softmax")},
        variants={"sigmoid": "hp_components.topk_router:SigmoidRouter"},
        rules=[VariantRule(when={"scoring": "sigmoid"}, variant="sigmoid")],
        sharding="hp_components.block_layout:topk_router",
        kernels=("topk_gating",),
        init=WEIGHTS,
        role="router",
    ),
)
