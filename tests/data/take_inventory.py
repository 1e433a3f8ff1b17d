"""Write ``qwen3_moe_inventory.json``: what a small Qwen3-MoE contains after its replacements. Run it from the repository root.

Four layers (the second dense), heads != kv heads, biases, tied embeddings: every kind of parameter occurs.
"""

from __future__ import annotations

from pathlib import Path

from hp_core.models.build import build
from hp_core.planner.serialise import inventory_to_json
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict

CONFIG = {
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
}

if __name__ == "__main__":
    recipe = recipe_from_dict({"model": {"adapter": "qwen3_moe", "config": CONFIG}}, plugins=load_plugins())
    Path(__file__).with_name("qwen3_moe_inventory.json").write_text(inventory_to_json(build(recipe).inventory) + "\n")
