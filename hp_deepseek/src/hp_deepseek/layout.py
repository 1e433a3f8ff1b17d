"""How DeepSeek-V3 lies on the mesh where no component says it already, and what a token costs. Torch-free.

Legend: B batch, S sequence, T tokens (B x S), H hidden, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.contracts import Layout, LayoutContext, ModuleInfo, ModuleShardingSpec, Port, Replicate

Config = Mapping[str, Any]


def residual(ctx: LayoutContext) -> Layout:
    """The residual stream [B, S, H]."""
    return ctx.residual


def counts(config: Config) -> dict[str, int]:
    """How many modules each layout rule describes."""
    layers, dense = int(config["num_hidden_layers"]), dense_layers(config)
    sparse = layers - dense
    return {
        "embedding": 1,
        "rotary": 1,
        "input_norm": layers,
        "attention": layers,
        "post_attention_norm": layers,
        "router": sparse,
        "experts": sparse,
        "shared_experts": sparse,
        "dense_mlp": dense,
        "final_norm": 1,
        "head": 1,
    }


def dense_layers(config: Config) -> int:
    """How many layers, the first ones, have a dense MLP instead of a mixture of experts."""
    return min(int(config["first_k_dense_replace"]), int(config["num_hidden_layers"]))


def rotary(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Angles of the whole (cp-local) sequence on every tp rank; ``x`` only lends its dtype."""
    angles = ctx.inside(dim=1)
    return ModuleShardingSpec(
        in_src={"position_ids": angles},
        in_dst={"position_ids": angles},
        out_names=("cos", "sin"),
        out_src={"cos": angles, "sin": angles},
        out_dst={"cos": angles, "sin": angles},
    )


def router(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Each token by itself: [B, S, H] in; logits [T, E] and choices [T, K] stay where the token is.

    The correction bias is the same on every rank and no parameter.
    """
    tokens, routes = ctx.tokens(dim=0), ("T", int(ctx.config["num_experts_per_tok"]))
    names = ("router_logits", "router_scores", "router_indices")
    return ModuleShardingSpec(
        params={"weight": {"tp": Replicate()}},
        in_src={"hidden_states": ctx.residual},
        in_dst={"hidden_states": ctx.residual},
        out_names=names,
        out_src=dict.fromkeys(names, tokens),
        out_dst=dict.fromkeys(names, tokens),
        ports={
            "hidden_states": ctx.hidden(),
            "router_logits": Port(shape=("T", int(ctx.config["n_routed_experts"])), dtype="float32"),
            "router_scores": Port(shape=routes, dtype="float32"),
            "router_indices": Port(shape=routes, dtype="int64"),
        },
        each_token=True,
    )


def flops(config: Config, sequence: int) -> float:
    """Training FLOPs per token, forward and backward (three times the forward).

    Two per active matrix element (experts by top-k, shared ones, head in, embedding out), and the two attention products over
    half the sequence, since each token attends to those before it; keys are as wide as queries, values narrower.
    """
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    inner = int(config["moe_intermediate_size"])
    used = int(config["num_experts_per_tok"]) + int(config["n_shared_experts"])
    dense, sparse = 3 * hidden * int(config["intermediate_size"]), hidden * (int(config["n_routed_experts"]) + used * 3 * inner)
    first = dense_layers(config)
    matrices = hidden * int(config["vocab_size"]) + layers * _attention_matrices(config)
    matrices += first * dense + (layers - first) * sparse
    widths = _query_width(config) + int(config["v_head_dim"])
    scores = layers * int(config["num_attention_heads"]) * widths * (sequence / 2)
    return 6.0 * (matrices + scores)


def _query_width(config: Config) -> int:
    return int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])


def _attention_matrices(config: Config) -> int:
    """Elements of one layer's projections; the latents of queries are absent where ``q_lora_rank`` is null."""
    hidden, heads, latent = (int(config[key]) for key in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    plain, rotated, value = (int(config[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, queries = config.get("q_lora_rank"), heads * _query_width(config)
    query = hidden * queries if rank is None else int(rank) * (hidden + queries)
    return query + hidden * (latent + rotated) + latent * heads * (plain + value) + heads * value * hidden
