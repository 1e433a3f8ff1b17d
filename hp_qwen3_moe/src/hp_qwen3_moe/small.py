"""Qwen3-MoE with the same structure and small sizes, for ``hp verify``. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hp_qwen3_moe.layout import experts, moe_layers

LAYERS = 4


def shrink(config: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return ``config`` with small sizes that divide by ``degrees``.

    Kept: heads for each key-value head, which layers are dense where the first four say it, more experts than top-k and at
    least two for each ep rank, and every switch. Kept too: sizes that are smaller already.
    """
    tp, ep = degrees["tp"], degrees["ep"]
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    small_kv = _kv_heads(heads // kv_heads, kv_heads, tp=tp)
    top_k = min(int(config["num_experts_per_tok"]), 2)
    layers = min(int(config["num_hidden_layers"]), LAYERS)
    count = experts(config) and max(8, 2 * ep, top_k + ep)
    return {
        **config,
        "vocab_size": math.lcm(128, tp),
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": small_kv * (heads // kv_heads),
        "num_key_value_heads": small_kv,
        "head_dim": 16,
        "intermediate_size": math.lcm(32, tp) * 3,
        "moe_intermediate_size": math.lcm(32, tp),
        "num_experts" if "num_experts" in config else "num_local_experts": min(experts(config), -(-count // ep) * ep),
        "num_experts_per_tok": top_k,
        "max_position_embeddings": min(int(config["max_position_embeddings"]), 1024),
        **_pattern(config, layers),
    }


def _kv_heads(ratio: int, kv_heads: int, *, tp: int) -> int:
    """Return the least number of key-value heads, two if there are several, that fits tp with the same ratio."""
    fits = (n for n in range(min(kv_heads, 2), kv_heads + 1) if n * ratio % tp == 0 and (n % tp == 0 or tp % n == 0))
    return next(fits, kv_heads)


def _pattern(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the keys that say which of the small model's layers are dense: both kinds where the whole model has both."""
    moe = moe_layers(config)
    dense = [index for index in range(layers) if not moe[index]]
    if all(moe[:layers]) and not all(moe):
        dense = [layers - 1]
    if layers > 1 and len(dense) == layers and any(moe):
        dense = dense[:-1]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}
