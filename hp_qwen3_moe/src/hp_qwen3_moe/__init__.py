"""hp-qwen3-moe: a plugin of HP."""
