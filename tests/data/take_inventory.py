"""Write ``*_inventory.json``: what a small model contains after its replacements. Run it from the repository root.

Dense layers and mixtures, heads of several widths, biases, tied embeddings: every kind of parameter occurs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hp_core.models.build import build
from hp_core.planner.serialise import inventory_to_json
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "deepseek_v3": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}

if __name__ == "__main__":
    for name, config in CONFIGS.items():
        recipe = recipe_from_dict({"model": {"adapter": name, "config": config}}, plugins=load_plugins())
        Path(__file__).with_name(f"{name}_inventory.json").write_text(inventory_to_json(build(recipe).inventory) + "\n")
