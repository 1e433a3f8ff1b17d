"""DeepSeek-V3 with the same structure and small sizes, for ``hp verify``. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LAYERS = 4


def shrink(config: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return ``config`` with small sizes that divide by ``degrees``.

    Kept: a latent of queries where there is one, dense layers before mixtures where there are both, more groups than are
    open, more experts than top-k and at least two for each ep rank, and every switch. Kept too: sizes that are smaller
    already.
    """
    tp, ep = degrees["tp"], degrees["ep"]
    layers = min(int(config["num_hidden_layers"]), LAYERS)
    heads = min(int(config["num_attention_heads"]), math.lcm(4, tp))
    groups = min(int(config["n_group"]), 4)
    size = int(config["n_routed_experts"]) // int(config["n_group"])
    size = min(size, max(4, -(-2 * ep // groups)))
    while groups * size % ep:
        size += 1
    opened = min(int(config["topk_group"]), max(groups // 2, 1))
    small = {
        "vocab_size": math.lcm(128, tp),
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": min(int(config["kv_lora_rank"]), 20),
        "qk_nope_head_dim": min(int(config["qk_nope_head_dim"]), 16),
        "qk_rope_head_dim": min(int(config["qk_rope_head_dim"]), 8),
        "v_head_dim": min(int(config["v_head_dim"]), 12),
        "intermediate_size": math.lcm(32, tp) * 3,
        "moe_intermediate_size": math.lcm(32, tp),
        "n_routed_experts": groups * size,
        "n_shared_experts": min(int(config["n_shared_experts"]), 2),
        "num_experts_per_tok": min(int(config["num_experts_per_tok"]), max(opened * size // 2, 1)),
        "n_group": groups,
        "topk_group": opened,
        "first_k_dense_replace": _dense(config, layers),
        "max_position_embeddings": min(int(config["max_position_embeddings"]), 1024),
    }
    if config.get("q_lora_rank") is not None:
        small["q_lora_rank"] = min(int(config["q_lora_rank"]), 24)
    return {**config, **small}


def _dense(config: Mapping[str, Any], layers: int) -> int:
    """Return how many of the small model's first layers are dense: one if the model has both kinds, else none or all."""
    dense = min(int(config["first_k_dense_replace"]), int(config["num_hidden_layers"]))
    if dense == int(config["num_hidden_layers"]):
        return layers
    return min(dense, 1) if layers > 1 else 0
